"""Calls by XLA's foreign function interface, as primitives of JAX."""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mpidist.arrays import AnyArray
from mpidist.xla import order, target

Shapes = Callable[..., Sequence[Any]]
# Gets operands, results, and the place of the call: its number in the program, and its line.
Work = Callable[[list[AnyArray], list[AnyArray], str], None]

# JAX makes a function of each lowered primitive unless told not to; older versions know no such argument.
_UNCACHED = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}


class _Inside(threading.local):
    depth = 0


_inside = _Inside()
# The lines of the calls, by the numbers that programs hold.
_sites: dict[int, str] = {}


class NativeCall:
    """Local. A primitive whose programs call a Python function; see `mpidist.xla.Call`.

    Args:
        name: The name of the target.
        work: The function.
        shapes: See `mpidist.xla.Call`.

    Attributes:
        primitive: JAX's primitive.
    """

    def __init__(self, name: str, work: Work, shapes: Shapes | None) -> None:
        self.primitive = Primitive(name.replace(".", "_"))
        self._name = name
        self._work = work
        self._shapes = shapes
        order.start()
        target.register(name, self._do, is_aliased=shapes is None)
        order.targets.add(name)
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._results)
        self.primitive.def_impl(jax.jit(self.primitive.bind, static_argnames="site"))
        mlir.register_lowering(self.primitive, self._refuse_device, **_UNCACHED)
        mlir.register_lowering(self.primitive, self._lower, platform="cpu", **_UNCACHED)

    def _do(self, operands: list[AnyArray], results: list[AnyArray]) -> None:
        number = order.require_connected(operands[0])
        results[0][...] = number + 1
        site = int(operands[-1])
        _inside.depth += 1
        try:
            # A program of JAX's cache was compiled by another process, which knew the line.
            self._work(operands[1:-1], results[1:], f"call {number} at {_sites.get(site, site)}")
        finally:
            _inside.depth -= 1

    def _results(self, *operands: Any, site: str) -> list[Any]:
        del site
        return [jax.core.ShapedArray(one.shape, one.dtype) for one in result_shapes(self._shapes, operands)]

    def _lower(self, context: Any, *operands: Any, site: str) -> Any:
        token = jax.core.ShapedArray((), order.TOKEN_DTYPE)
        inner = context.replace(avals_in=[token, *context.avals_in, token], avals_out=[token, *context.avals_out])
        number = zlib.crc32(site.encode()) >> 1
        _sites[number] = site
        aliased = {} if self._shapes is not None else {i: i for i in range(len(operands) + 1)}
        rule = jax.ffi.ffi_lowering(self._name, has_side_effect=False, operand_output_aliases=aliased)
        _, *results = rule(inner, order.constant(order.UNCONNECTED), *operands, order.constant(number))
        order.connect_later(context.module_context.module)
        return results

    def _refuse_device(self, context: Any, *_: Any, site: str) -> Any:
        del site
        raise NotImplementedError(
            f"{self._name}: expected a program for CPUs, got one for {'/'.join(context.module_context.platforms)}. Set "
            "JAX_PLATFORMS=cpu, or make the arrays under `with jax.default_device(jax.devices('cpu')[0]):`"
        )


def result_shapes(shapes: Shapes | None, operands: Sequence[Any]) -> list[Any]:
    """Local. The shapes and dtypes of a call's results, of those of its operands."""
    given = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands]
    return given if shapes is None else list(shapes(*given))


def is_inside() -> bool:
    """Local. Whether this thread is in the function of a call."""
    return _inside.depth > 0
