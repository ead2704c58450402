"""A call from a compiled program of JAX into Python, in the order of the program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive

from mpidist.arrays import AnyArray
from mpidist.xla import native
from mpidist.xla.self_test import reason_for_callbacks

Work = Callable[[list[AnyArray], list[AnyArray]], None]

# Of these packages are the frames between a program and a call.
_BETWEEN = ("mpidist.", "jax.", "optax.", "flax.", "keras.", "contextlib", "functools")


class ProgramCall:
    """Local. A function of arrays that compiled programs call.

        call = Call("double", lambda inputs, outputs: [np.multiply(x, 2, out=x) for x in outputs])
        jax.jit(lambda x: call([x])[0] + 1)(jnp.ones(3))

    The calls of a program run in the order in which the program was written, also in loops, branches, functions and
    under `jax.checkpoint`; programs run in the order in which a thread starts them. JAX leaves out calls whose results
    nobody uses.

    Args:
        name: The name of the target, which no other call of the process has. Names that are the same in all processes
            allow the use of JAX's cache of compiled programs.
        work: Gets the operands and the results as NumPy views of XLA's memory, which end with the call; by default each
            result has its operand's memory and values, so that work in place is all there is to do. It may be called on
            any thread, on one at a time. An exception becomes a `jax.errors.JaxRuntimeError` with the traceback.
        shapes: A function that returns the shapes and dtypes of the results, as `jax.ShapeDtypeStruct`, for those of
            the operands; by default the same. Where it is given, results have memory of their own.
        placed: `work` gets a third argument: a text with the number of the call in its program, and with the line that
            made it. It tells whether processes run the same program. Without the number where
            `reason_for_callbacks()` is not None.

    Attributes:
        name: The constructor's argument.
        primitive: JAX's primitive, for rules of batching and of derivatives, of which it has none by itself; None where
            calls go by `io_callback`.
    """

    def __init__(
        self, name: str, work: Callable[..., None], *, shapes: native.Shapes | None = None, placed: bool = False
    ) -> None:
        self.name = name
        self._work = work
        self._shapes = shapes
        self._placed = placed
        self._callback = jax.jit(self._call_back, static_argnames="site")
        self.primitive: Primitive | None = None
        if reason_for_callbacks() is None:
            self.primitive = native.NativeCall(name, self._do, shapes).primitive

    def __call__(self, leaves: Sequence[Any], site: str = "") -> list[Any]:
        """Local. Call the function with arrays, inside or outside a compiled program.

        Args:
            leaves: Arrays of JAX, or what `jnp.asarray` takes.
            site: The file and the line for the text, by default those of the caller outside this package.

        Returns:
            The results, in their order.
        """
        arrays = [leaf if isinstance(leaf, jax.Array) else jax.numpy.asarray(leaf) for leaf in leaves]
        site = site or calling_site()
        if self.primitive is None:
            return list(self._callback(*arrays, site=site))
        return list(self.primitive.bind(*arrays, site=site))

    def _do(self, inputs: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
        if self._placed:
            self._work(inputs, outputs, place)
        else:
            self._work(inputs, outputs)

    def _call_back(self, *arrays: Any, site: str) -> Any:
        given = tuple(native.result_shapes(self._shapes, arrays))
        return io_callback(partial(self._on_host, site), given, *arrays, ordered=True)

    def _on_host(self, site: str, *arrays: Any) -> tuple[AnyArray, ...]:
        if self._shapes is None:
            inputs = outputs = [np.array(one) for one in arrays]
        else:
            inputs = [np.asarray(one) for one in arrays]
            outputs = [np.empty(one.shape, one.dtype) for one in native.result_shapes(self._shapes, arrays)]
        self._do(inputs, outputs, f"a call at {site}")
        return tuple(outputs)


def calling_site() -> str:
    """Local. The file and the line of the program that has called the library, and its function."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    # Ranks may have the file in folders of their own.
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def wait() -> None:
    """Local. Wait until the programs that this thread has started are done; nothing within a call.

    XLA runs the programs of a thread one after the other, and some of them on threads of its own.
    """
    if not native.is_inside():
        if reason_for_callbacks() is not None:
            jax.effects_barrier()
        jax.block_until_ready(_last()(0))


@lru_cache
def _last() -> Callable[[int], Any]:
    last: Callable[[int], Any] = jax.jit(lambda x: x + 1)
    return last
