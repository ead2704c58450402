"""One kernel from an optimizer's update: its calls of NumPy's functions are recorded, and written as C for a GPU.

An update of ten passes over memory becomes one pass: blocks are loaded, the whole arithmetic is done in registers, and
changed blocks are stored. Scratch blocks are registers. Numbers are arguments, so that another learning rate does not
compile again. The operations and their order are the update's own, without fused multiply-adds. Results have NumPy's
bits except where CUDA computes otherwise: CuPy compiles so that float32 numbers too small for a full mantissa
(subnormal, below 1.2e-38) become 0 (`-ftz=true`); `power`, `exp`, `log` and `tanh` differ in the last bits.
"""

from __future__ import annotations

import functools
import importlib
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.variables.update.kernel import Update

# The C of an operation on names; it treats NaNs as NumPy does.
_OPERATIONS: dict[str, str] = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "negative": "-{0}",
    "positive": "{0}",
    "square": "{0} * {0}",
    "reciprocal": "T(1) / {0}",
    "absolute": "{0} < T(0) ? -{0} : {0} + T(0)",
    "sqrt": "sqrt({0})",
    "exp": "exp({0})",
    "log": "log({0})",
    "tanh": "tanh({0})",
    "power": "pow({0}, {1})",
    "maximum": "{0} >= {1} || {0} != {0} ? {0} : {1}",
    "minimum": "{0} <= {1} || {0} != {0} ? {0} : {1}",
    "sign": "{0} != {0} ? {0} : T(({0} > T(0)) - ({0} < T(0)))",
}
_COMPARISONS = {
    "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">=",
}


# The C of operations that are not one function of NumPy's.
_PARTS = {
    "copy": "{0}",
    "raise to": _OPERATIONS["maximum"],
    "lower to": _OPERATIONS["minimum"],
    **{f"where {name}": f"{{0}} {sign} {{1}} ? {{2}} : {{3}}" for name, sign in _COMPARISONS.items()},
}


class Statement(NamedTuple):
    """One assignment of a recorded update.

    Attributes:
        target: The name that gets the result: of an array, p, g, s0, s1, ..., or of a scratch block, t0, t1, ...
        operation: A function of NumPy's; or "copy"; "raise to" and "lower to", the halves of `np.clip`; or "where" and
            a comparison of the first two operands, which chooses one of the others.
        operands: Names, those of the numbers k0, k1, ... among them.
    """

    target: str
    operation: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A recorded update.

    Attributes:
        names: The arrays that the program loads or stores, in the order of its arguments: p, g, s0, s1, ...
        loaded: The arrays whose first value counts.
        stored: The arrays that the program changes.
        statements: The statements in their order.
        scalars: The numbers of this step.
        widens: Whether a number is of a wider dtype than the blocks, or rounded: then NumPy computes in a wider one.
    """

    names: tuple[str, ...]
    loaded: tuple[str, ...]
    stored: tuple[str, ...]
    statements: tuple[Statement, ...]
    scalars: tuple[float, ...]
    widens: bool

    @functools.cached_property
    def body(self) -> str:
        """Local. C for one element number `i`, over arrays `a_<name>` of type `T` and numbers `k0`, `k1`, ..."""
        defined = set(self.loaded)
        lines = [f"T {name} = a_{name}[i];" for name in self.loaded]
        for target, operation, operands in self.statements:
            declares = "T " if target not in defined else ""
            defined.add(target)
            template = _OPERATIONS.get(operation) or _PARTS[operation]
            lines.append(f"{declares}{target} = {template.format(*operands)};")
        return "\n".join([*lines, *(f"a_{name}[i] = {name};" for name in self.stored)])


class UnknownOperationError(TypeError):
    """The update calls a function that has no C here."""


class _Recorder:
    """The statements of an update, and the values that they load and change."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self.statements: list[Statement] = []
        self.scalars: list[float] = []
        self.widens = False
        self.defined: set[str] = set()
        self.loaded: list[str] = []
        self.changed: set[str] = set()

    def operand(self, value: object) -> str:
        """Local. The name of an operand."""
        if isinstance(value, _Value):
            if value.name not in self.defined:
                if value.is_scratch:
                    raise UnknownOperationError("a scratch block is read before it is written")
                self.loaded.append(value.name)
                self.defined.add(value.name)
            return value.name
        if isinstance(value, (numbers.Real, np.number)) or (isinstance(value, np.ndarray) and value.ndim == 0):
            self.scalars.append(float(cast(float, value)))
            # Python's own numbers take the dtype of the blocks; others are numbers of their own dtype.
            if isinstance(value, (np.generic, np.ndarray)):
                self.widens |= np.result_type(value.dtype, self._dtype) != self._dtype
            elif isinstance(value, numbers.Integral):
                self.widens |= self.scalars[-1] != value
            return f"k{len(self.scalars) - 1}"
        raise UnknownOperationError(f"an operand of type {type(value).__name__}")

    def assign(self, target: object, operation: str, *operands: str) -> None:
        """Local. Record that `target` becomes the result of an operation."""
        if not isinstance(target, _Value):
            raise UnknownOperationError("a result must go into one of the blocks, by `out=`")
        self.defined.add(target.name)
        self.changed.add(target.name)
        self.statements.append(Statement(target.name, operation, operands))


class _Condition(NamedTuple):
    """A comparison, for the `where` of `np.copyto`."""

    name: str
    left: str
    right: str


class _Value:
    """The stand-in for a block while an update is recorded."""

    def __init__(self, recorder: _Recorder, name: str, dtype: np.dtype[Any], *, is_scratch: bool = False) -> None:
        self.name = name
        self.dtype = dtype
        self.is_scratch = is_scratch
        self._recorder = recorder

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: Any) -> object:
        name, recorder = ufunc.__name__, self._recorder
        (out,) = options.pop("out", (None,))
        if method != "__call__" or options:
            raise UnknownOperationError(f"np.{name}.{method} with {sorted(options)}")
        if name in _COMPARISONS and out is None:
            left, right = (recorder.operand(value) for value in inputs)
            return _Condition(name, left, right)
        if name == "clip":
            return self._clip(inputs[0], inputs[1], inputs[2], out)
        if name not in _OPERATIONS:
            raise UnknownOperationError(f"np.{name}")
        recorder.assign(out, name, *(recorder.operand(value) for value in inputs))
        return out

    def __array_function__(
        self, function: Callable[..., Any], types: object, args: Sequence[Any], options: dict[str, Any]
    ) -> object:
        if function is np.clip:
            return self._clip(*args, **options)
        if function is np.copyto and len(args) == 2:
            # All blocks have one dtype, so `casting` changes nothing.
            self._copy(args[0], args[1], options.get("where", True))
            return None
        raise UnknownOperationError(f"np.{function.__name__}")

    def __eq__(self, other: object) -> Any:
        return self.__array_ufunc__(np.equal, "__call__", self, other)

    __hash__ = None  # type: ignore[assignment]

    def _clip(self, value: object, low: object, high: object, out: object = None) -> object:
        recorder = self._recorder
        names = [recorder.operand(operand) for operand in (value, low, high)]
        # `out` is assigned twice, a maximum and then a minimum: the first must not change an operand of the second.
        if isinstance(out, _Value) and out.name in names[1:]:
            raise UnknownOperationError("np.clip into one of its own limits")
        recorder.assign(out, "raise to", *names[:2])
        recorder.assign(out, "lower to", recorder.operand(out), names[2])
        return out

    def _copy(self, target: _Value, source: object, where: object) -> None:
        recorder = self._recorder
        value = recorder.operand(source)
        if where is True:
            recorder.assign(target, "copy", value)
        elif isinstance(where, _Condition):
            name, left, right = where
            recorder.assign(target, f"where {name}", left, right, value, recorder.operand(target))
        else:
            raise UnknownOperationError("np.copyto with a `where` that is no comparison")


def record(
    update: Update, dtype: np.dtype[Any], slot_count: int, scratch_count: int, *, keeps_gradient: bool = False
) -> Program:
    """Local. Record the work of an update.

    Args:
        update: The update of one step, see `Kernel.prepare`. It is called once, with stand-ins for its blocks.
        dtype: The dtype of the blocks: float32, float64 or float16.
        slot_count: Number of its slots.
        scratch_count: Number of its scratch blocks.
        keeps_gradient: Whether to store the values that the update leaves in `gradient`.

    Returns:
        The program.

    Raises:
        UnknownOperationError: The update calls a function that has no C here, or the dtype is no real number.
    """
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise UnknownOperationError(f"blocks of dtype {dtype}")
    recorder = _Recorder(dtype)
    slots = [_Value(recorder, f"s{number}", dtype) for number in range(slot_count)]
    scratch = [_Value(recorder, f"t{number}", dtype, is_scratch=True) for number in range(scratch_count)]
    parameter, gradient = _Value(recorder, "p", dtype), _Value(recorder, "g", dtype)
    values: Any = (parameter, gradient, slots, scratch)
    update(*values)
    stored = tuple(
        value.name for value in (parameter, gradient, *slots)
        if value.name in recorder.changed and (value is not gradient or keeps_gradient)
    )
    names = tuple(v.name for v in (parameter, gradient, *slots) if v.name in recorder.loaded or v.name in stored)
    loaded = tuple(name for name in names if name in recorder.loaded)
    return Program(names, loaded, stored, tuple(recorder.statements), tuple(recorder.scalars), recorder.widens)


def fused(update: Update, slot_count: int, scratch_count: int, *, keeps_gradient: bool = False) -> Update:
    """Local. The same update, as one kernel for blocks of CuPy's; blocks of NumPy's are updated as before.

    Args:
        update: See `record`.
        slot_count: See `record`.
        scratch_count: See `record`.
        keeps_gradient: See `record`.

    Returns:
        An update. Where a function has no C here, all run one by one, by CuPy.
    """
    programs: dict[np.dtype[Any], Program | None] = {}

    def run(parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]) -> None:
        if not arrays.is_cupy(parameter):
            update(parameter, gradient, slots, scratch)
            return
        dtype = parameter.dtype
        if dtype not in programs:
            try:
                programs[dtype] = record(update, dtype, slot_count, scratch_count, keeps_gradient=keeps_gradient)
            except Exception:
                # Stand-ins are no arrays, so a user's update may fail on them in any way. On arrays it then works, one
                # function after another, or raises its own error.
                programs[dtype] = None
        program = programs[dtype]
        if program is None:
            update(parameter, gradient, slots, scratch)
            return
        blocks = {"p": parameter, "g": gradient, **{f"s{number}": slot for number, slot in enumerate(slots)}}
        kernel = _compile(program.names, program.body, len(program.scalars))
        kernel(*program.scalars, *(blocks[name] for name in program.names), size=parameter.size)

    return run


@functools.cache
def _compile(names: tuple[str, ...], body: str, scalar_count: int) -> Any:
    # Steps differ in their numbers only, therefore each optimizer compiles once.
    return importlib.import_module("mpidist.comm.gpu.cuda").elementwise_kernel(
        [f"T k{number}" for number in range(scalar_count)], [f"raw T a_{name}" for name in names], body
    )
