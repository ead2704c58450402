"""The calls of one strategy from compiled programs: what they do on the host, under vmap, and to derivatives."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from mpidist import xla
from mpidist.arrays import AnyArray
from mpidist.errors import MismatchError, mark_shared
from mpidist.options import ReduceOp
from mpidist.strategy.base import Strategy
from mpidist.xla.threads import share_cores

Call = Callable[..., list[Any]]
_LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)


class ProgramCalls:
    """Local. The calls of a strategy; `calls_of` keeps one object for each.

    Args:
        strategy: The strategy. A compiled program does not keep it alive.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = weakref.ref(strategy)
        self._prefix = f"mpidist.jax.{next(_counter)}"
        self._size = strategy.num_replicas_in_sync
        self._rank = strategy.extended.rows(self._size).start

    @lru_cache  # noqa: B019 - as many as there are operations
    def all_reduce(self, op: ReduceOp) -> xla.Call:
        """Local. The call that combines arrays, whose dtypes are also those of the results."""

        def work(_: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
            # A single array is combined without a look at a nest.
            nest = outputs[0] if len(outputs) == 1 else outputs
            self._opened.extended.all_reduce(op, nest, in_place=True, name=place)

        call = xla.Call(f"{self._prefix}.all_reduce.{op.name}", work, placed=True)
        # The sum over ranks of what depends on a sum over ranks: each rank's part of it enters all of them.
        _give_rules(call, transposed=(lambda: call) if op in _LINEAR else None, what=f"all_reduce of {op.name}")
        return call

    @lru_cache  # noqa: B019 - as `all_reduce`
    def broadcast(self) -> xla.Call:
        """Local. The call that gives every rank the first one's arrays."""

        def work(inputs: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
            self._require_place(place)
            made = self._opened.extended.broadcast(inputs)
            for output, one in zip(outputs, made, strict=True):
                np.copyto(output, one)

        call = xla.Call(f"{self._prefix}.broadcast", work, placed=True)
        _give_rules(call, transposed=self._reduce_to_first, what="broadcast")
        return call

    @lru_cache  # noqa: B019 - as `all_reduce`
    def _reduce_to_first(self) -> xla.Call:
        """The transpose of a broadcast: sums on the first rank, zeros on the others.

        The zeros are made here. In the program of another rank they would not need the sums, and JAX leaves out a call
        that nobody needs.
        """

        def work(_: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
            self._opened.extended.all_reduce(ReduceOp.SUM, outputs, in_place=True, name=place)
            if self._rank:
                for output in outputs:
                    output.fill(0)

        call = xla.Call(f"{self._prefix}.reduce_to_first", work, placed=True)
        _give_rules(call, transposed=self.broadcast, what="the derivative of broadcast")
        return call

    @lru_cache  # noqa: B019 - as `all_reduce`
    def all_gather(self) -> xla.Call:
        """Local. The call that concatenates the ranks' arrays along the first axis; all have the same shapes."""

        def work(inputs: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
            self._require_place(place)
            made = self._opened.extended.all_gather(inputs)
            _require_shapes(made, outputs, inputs, place)
            for output, one in zip(outputs, made, strict=True):
                np.copyto(output, one)

        def shapes(*operands: Any) -> list[Any]:
            return [jax.ShapeDtypeStruct((one.shape[0] * self._size, *one.shape[1:]), one.dtype) for one in operands]

        call = xla.Call(f"{self._prefix}.all_gather", work, shapes=shapes, placed=True)
        _give_rules(call, transposed=lambda: self.reduce_scatter(ReduceOp.SUM), what="all_gather", axis=1)
        return call

    @lru_cache  # noqa: B019 - as `all_reduce`
    def reduce_scatter(self, op: ReduceOp) -> xla.Call:
        """Local. The call that combines arrays and gives each rank its rows of the first axis."""

        def work(inputs: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
            self._require_place(place)
            made = self._opened.extended.reduce_scatter(op, inputs)
            for output, one in zip(outputs, made, strict=True):
                np.copyto(output, one)

        def shapes(*operands: Any) -> list[Any]:
            return [jax.ShapeDtypeStruct((self.row_count(one.shape[0]), *one.shape[1:]), one.dtype) for one in operands]

        def back(cotangents: Sequence[Any], site: str) -> list[Any]:
            made = self.all_gather()(cotangents, site)
            return [one / self._size for one in made] if op is ReduceOp.MEAN else made

        call = xla.Call(f"{self._prefix}.reduce_scatter.{op.name}", work, shapes=shapes, placed=True)
        _give_rules(
            call, transposed=(lambda: back) if op in _LINEAR else None, what=f"reduce_scatter of {op.name}", axis=1
        )
        return call

    @lru_cache  # noqa: B019 - as `all_reduce`
    def weight(self) -> xla.Call:
        """Local. The call of a rank's number of rows, whose result is its weight in a mean: rows x ranks / all rows."""

        def work(inputs: list[AnyArray], outputs: list[AnyArray], place: str) -> None:
            outputs[0][...] = self._weight(float(inputs[0]), place)

        def shapes(*_: Any) -> list[Any]:
            return [jax.ShapeDtypeStruct((), np.float32)]

        return xla.Call(f"{self._prefix}.weight", work, shapes=shapes, placed=True)

    def row_count(self, count: int) -> int:
        """Local. Number of rows of this rank, of so many in all."""
        rows: slice = self._opened.extended.rows(count)
        return int(rows.stop) - int(rows.start)

    def _weight(self, rows: float, place: str) -> float:
        extended = self._opened.extended
        is_wrong = not (rows >= 0 and rows == int(rows))
        total, wrong = extended.all_reduce("SUM", np.array([rows, is_wrong]), name=f"rows of {place}")
        if wrong:
            everyone = extended.all_gather_object(rows)
            raise ValueError(
                f"update: expected `rows` to be a rank's number of rows, at least 0, got {everyone} on ranks 0 to "
                f"{self._size - 1}. Pass the length of this rank's batch"
            )
        return rows * self._size / float(total) if total else 0.0

    def _require_place(self, place: str) -> None:
        """Raise on all ranks where they are at different calls; for a collective without a name."""
        places = self._opened.extended.all_gather_object(place)
        if len(set(places)) > 1:
            raise mark_shared(MismatchError(
                f"expected all ranks to be at the same call of a program, got {places} on ranks 0 to {self._size - 1}. "
                "Trace the same program on every rank: no `if rank == 0` around a call, or around the use of its result"
            ))

    @property
    def _opened(self) -> Strategy:
        strategy = self._strategy()
        if strategy is None or strategy.is_closed:
            raise RuntimeError(
                "a compiled program calls a strategy that is closed. Close it after the last step, or compile the "
                "program again under the new strategy (`jax.clear_caches()`)"
            )
        return strategy


_counter = itertools.count()
_known: weakref.WeakKeyDictionary[Strategy, ProgramCalls] = weakref.WeakKeyDictionary()


def calls_of(strategy: Strategy) -> ProgramCalls:
    """Local. The calls of a strategy."""
    if strategy not in _known:
        share_cores(strategy)
        _known[strategy] = ProgramCalls(strategy)
        # XLA runs steps later, on other threads. Calls of this one come after those of the steps that it has started;
        # and the strategy's communicators must stay until then.
        strategy.extended.before_calls(xla.wait)
        strategy.on_close(xla.wait)
    return _known[strategy]


def _require_shapes(
    made: Sequence[AnyArray], outputs: Sequence[AnyArray], inputs: Sequence[AnyArray], place: str
) -> None:
    for one, output, own in zip(made, outputs, inputs, strict=True):
        if one.shape != output.shape:
            raise ValueError(
                f"all_gather, {place}: inside jax.jit expected arrays of the same shape on all ranks, got {own.shape} "
                f"on this rank and {len(one)} rows in all. Pad them, or call it outside jax.jit, where sizes may "
                "differ"
            )


def _give_rules(
    call: xla.Call, *, transposed: Callable[[], Call] | None, what: str, axis: int = 0
) -> None:
    """Give a call its rules of batching, and of derivatives where it is linear.

    Args:
        call: The call.
        transposed: A function that makes the call that brings cotangents back; None where it has no derivative.
        what: The name of the call, for errors.
        axis: The axis along which operands are batched: the first that the call does not change.
    """
    primitive = call.primitive
    if primitive is None:
        return

    def batched(operands: Sequence[Any], axes: Sequence[Any], *, site: str) -> tuple[list[Any], list[Any]]:
        moved = [
            one if where is None else jnp.moveaxis(one, where, axis)
            for one, where in zip(operands, axes, strict=True)
        ]
        results = primitive.bind(*moved, site=site)
        return results, [where if where is None else axis for where in axes]

    def derived(primals: Sequence[Any], tangents: Sequence[Any], *, site: str) -> tuple[list[Any], list[Any]]:
        if transposed is None:
            raise NotImplementedError(
                f"mpidist.jax: {what} has no derivative, got one asked for (`jax.grad`, `jax.jvp`). Use SUM or MEAN, "
                "or put `jax.lax.stop_gradient` around the operand"
            )
        results = primitive.bind(*primals, site=site)
        return results, _over(partial(call, site=f"{site}, its derivative"), tangents, results)

    def brought_back(cotangents: Sequence[Any], *operands: Any, site: str) -> list[Any]:
        if transposed is None:
            raise NotImplementedError(f"mpidist.jax: {what} has no transpose")
        return _over(partial(transposed(), site=site), cotangents, [one.aval for one in operands])

    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = derived
    ad.primitive_transposes[primitive] = brought_back


def _over(call: Call, given: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Apply a linear call to the operands that are not zero; the other results are zeros of the types of `like`."""
    made = iter(call([one for one in given if not isinstance(one, ad.Zero)]) if not _all_zero(given) else ())
    return [
        ad.Zero(jax.core.ShapedArray(other.shape, one.aval.dtype)) if isinstance(one, ad.Zero) else next(made)
        for one, other in zip(given, like, strict=True)
    ]


def _all_zero(given: Sequence[Any]) -> bool:
    return all(isinstance(one, ad.Zero) for one in given)
