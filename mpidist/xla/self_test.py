"""Whether the interface of the jaxlib that is installed is the one known here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from mpidist.arrays import AnyArray
from mpidist.xla import native, structs

_DTYPES = (np.bool_, np.int8, np.int32, np.uint16, np.float16, ml_dtypes.bfloat16, np.float32, np.complex64)


@lru_cache
def reason_for_callbacks() -> str | None:
    """Local. Why calls cannot go by XLA's foreign function interface; None where they can.

    The C header of jaxlib is compared with the structs, then small programs run: views, errors and the order of calls.
    """
    try:
        # The header first: a struct of other fields would be read beyond its end.
        structs.version_of(structs.read_header())
        # The first call may be made while JAX records a program, to which these do not belong.
        with jax.ensure_compile_time_eval():
            _test_views()
            _test_order()
    # Anything may come out of an interface that has changed: names that are gone, an error of XLA, wrong numbers.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _test_views() -> None:
    given = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in _DTYPES]
    given += [np.zeros((0, 3), np.float32), np.array(7, np.int32)]
    seen: list[AnyArray] = []

    def work(inputs: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
        if place != "call 0 at a test":
            raise ValueError(f"expected call 0 at a test, got {place}")
        seen.extend(one.copy() for one in inputs)
        for one in outputs:
            one[...] = one[..., ::-1] if one.ndim else one

    call = native.NativeCall("mpidist.xla.test_views", work, None)
    made = [np.asarray(one) for one in jax.jit(lambda *leaves: call.primitive.bind(*leaves, site="a test"))(*given)]
    expected = [one[..., ::-1] if one.ndim else one for one in given]
    _require(seen, given)
    _require(made, expected)

    def fail(*_: Any) -> None:
        raise ValueError("an error of the test")

    failing = native.NativeCall("mpidist.xla.test_errors", fail, None)
    try:
        jax.block_until_ready(failing.primitive.bind(given[0], site="a test"))
    except jax.errors.JaxRuntimeError as error:
        if "an error of the test" in str(error):
            return
    raise RuntimeError("expected an error of a call to arrive")


def _require(found: list[AnyArray], expected: list[AnyArray]) -> None:
    for one, other in zip(found, expected, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape or not np.array_equal(one, other):
            raise RuntimeError(f"expected a call to get {other!r}, got {one!r}")


def _test_order() -> None:
    """Calls that do not depend on each other, around a loop and in a function."""
    seen: list[int] = []

    def work(inputs: list[AnyArray], *_: Any) -> None:
        seen.append(int(inputs[0]))

    call = native.NativeCall("mpidist.xla.test_order", work, None)

    def mark(number: Any) -> Any:
        return call.primitive.bind(jnp.int32(number), site="a test")[0]

    marked = jax.jit(lambda number: mark(number) + 1)

    def program(x: Any) -> Any:
        first = mark(x)
        looped, _ = lax.scan(lambda carry, _: (mark(carry + 1), None), x, None, length=2)
        return first, looped, marked(x + 3), mark(x + 4), marked(x + 5), mark(x + 6)

    jax.block_until_ready(jax.jit(program)(jnp.int32(0)))
    if seen != list(range(7)):
        raise RuntimeError(f"expected the calls of a program in their order, got {seen}")
