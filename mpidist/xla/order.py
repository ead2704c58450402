"""The order of calls within a program: a token goes through all of them, as data.

XLA runs what does not depend on each other in any order, also calls that are marked as having side effects. So each
call has a token as its first operand and result, and the token of one call is the operand of the next. When JAX has
made the module of a program, and before XLA compiles it, `_Threading` connects them. Functions get the token as one
more argument; the bodies of loops and branches capture it; what comes after a loop, a branch or a function depends on
all its results, by a small call of its own.

JAX's own ordered effects do the same, but cost 200 us a call of a program, and remat takes none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from mpidist.arrays import AnyArray
from mpidist.xla import target

# JAX says so on the thread that has made a module, before it compiles it.
_MODULE_IS_MADE = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_AFTER = "mpidist.xla.after"
# The token of a call that was not connected; see `require_connected`.
UNCONNECTED = -1

TOKEN_DTYPE = np.dtype(np.int32)
# By how much a token grows over a loop, a branch or a function.
_STRIDE = 1 << 16

_pending: list[Any] = []


def require_connected(token: AnyArray) -> int:
    """Local. The number of a call in its program, which its token holds.

    Raises:
        RuntimeError: The calls of the program are in no order.
    """
    number = int(token)
    if number == UNCONNECTED:
        raise RuntimeError(
            "expected JAX to tell when a program's module is made, but it did not, so that the order of the calls is "
            "unknown: `jax.monitoring.clear_event_listeners()` was called. Call it before `import mpidist.jax`"
        )
    return number


def connect_later(module: Any) -> None:
    """Local. Connect the calls of a module, which JAX is making on this thread, when it is made."""
    if not any(one is module for one in _pending):
        # A module whose making failed stays here; more than a few of them do not.
        del _pending[:-8]
        _pending.append(module)


def _connect(event: str, *_: Any, **__: Any) -> None:
    if event != _MODULE_IS_MADE:
        return
    for module in list(_pending):
        main = _functions(module).get("main")
        if main is None or not _is_whole(main):
            continue
        _pending[:] = [one for one in _pending if one is not module]
        with module.context, ir.Location.unknown(module.context):
            _Threading(module).connect(main)


class _Threading:
    """Connects the calls of one module."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._functions = _functions(module)
        self._carrying: dict[str, bool] = {}
        self._connected: set[str] = set()
        self._type = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))

    def connect(self, main: Any) -> None:
        """Local. Connect all calls, from the first operation of the program on."""
        self._require_one_device()
        block = main.regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(block):
            first = constant(0)
        self._through(block, first)
        self._module.operation.verify()

    def _require_one_device(self) -> None:
        attributes = self._module.operation.attributes
        for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
            count = ir.IntegerAttr(attributes[name]).value if name in attributes else 1
            if count > 1:
                raise ValueError(
                    f"expected a program of one device, since a rank is one replica, got {name} = {count} around a "
                    "call. Start one rank per device (`mpirun -n K`), and remove the mesh, `shard_map` or `pmap`"
                )

    def _through(self, block: Any, token: Any) -> None:
        for one in list(block.operations):
            operation = one.operation
            if not self._carries(operation):
                continue
            if _is_call(operation):
                operation.operands[0] = token
                token = operation.results[0]
            elif operation.name == "func.call":
                token = self._after(self._enter_function(operation, token), token)
            else:
                for region in operation.regions:
                    for inner in region.blocks:
                        self._through(inner, token)
                token = self._after(operation, token)

    def _carries(self, operation: Any) -> bool:
        """Whether there is a call in an operation, or in a function that it calls."""
        if _is_call(operation):
            return True
        if operation.name == "func.call":
            name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            if name not in self._carrying:
                self._carrying[name] = any(self._carries(one) for one in _inner(self._functions[name]))
            return self._carrying[name]
        return any(self._carries(one) for one in _inner(operation))

    def _enter_function(self, call: Any, token: Any) -> Any:
        """Give a function the token as its last argument, and replace the operation that calls it."""
        name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
        if name not in self._connected:
            self._connected.add(name)
            function = self._functions[name]
            block = function.regions[0].blocks[0]
            own = block.add_argument(self._type, ir.Location.unknown())
            kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
            kind = ir.FunctionType.get([*kind.inputs, self._type], kind.results)
            function.attributes["function_type"] = ir.TypeAttr.get(kind)
            if "arg_attrs" in function.attributes:
                given = ir.ArrayAttr(function.attributes["arg_attrs"])
                function.attributes["arg_attrs"] = ir.ArrayAttr.get([*given, ir.DictAttr.get({})])
            self._through(block, own)
        made = ir.Operation.create(
            "func.call", results=[one.type for one in call.results], operands=[*call.operands, token],
            attributes={"callee": call.attributes["callee"]}, ip=ir.InsertionPoint(call),
        )
        for old, new in zip(call.results, made.results, strict=True):
            old.replace_all_uses_with(new)
        call.erase()
        return made

    def _after(self, operation: Any, token: Any) -> Any:
        """A token for the calls after an operation: the result of a call that takes all results of the operation."""
        operands = [token, *(one for one in operation.results if isinstance(one.type, ir.RankedTensorType))]
        made = ir.Operation.create(
            "stablehlo.custom_call", results=[self._type], operands=operands,
            attributes={
                "call_target_name": ir.StringAttr.get(_AFTER), "backend_config": ir.DictAttr.get({}),
                "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
                "has_side_effect": ir.BoolAttr.get(False),
            },
            ip=ir.InsertionPoint.after(operation),
        )
        return made.results[0]


def constant(value: int) -> Any:
    """Local. A constant of the module that is being made: a token, for instance."""
    kind = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    content = ir.DenseElementsAttr.get(np.array(value, TOKEN_DTYPE), type=kind.element_type, shape=[])
    return ir.Operation.create("stablehlo.constant", results=[kind], attributes={"value": content}).results[0]


def _functions(module: Any) -> dict[str, Any]:
    found = (one.operation for one in module.body.operations)
    return {ir.StringAttr(one.attributes["sym_name"]).value: one for one in found if one.name == "func.func"}


def _inner(operation: Any) -> list[Any]:
    return [one.operation for region in operation.regions for block in region.blocks for one in block.operations]


def _is_whole(function: Any) -> bool:
    operations = _inner(function)
    return bool(operations) and operations[-1].name == "func.return"


# The targets of calls, which `Call` fills.
targets: set[str] = set()


def _is_call(operation: Any) -> bool:
    if operation.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(operation.attributes["call_target_name"]).value in targets


def _work_after(operands: list[AnyArray], results: list[AnyArray]) -> None:
    results[0][...] = operands[0] + _STRIDE


@lru_cache
def start() -> None:
    """Local. Begin to connect the calls of programs; the first time only."""
    target.register(_AFTER, _work_after, is_aliased=False, operand_count=1)
    jax.monitoring.register_event_duration_secs_listener(_connect)
