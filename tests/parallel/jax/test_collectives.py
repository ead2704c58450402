"""Collectives inside and outside compiled programs: values, order, derivatives, and programs that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra 'jax'")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import mpidist.jax  # noqa: E402
from mpidist import xla  # noqa: E402
from mpidist.comm.group.communicator import Communicator  # noqa: E402
from mpidist.errors import MismatchError  # noqa: E402
from tests.helpers.strategies import ArenaStrategy  # noqa: E402

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = pytest.mark.mpi

OPS: dict[str, Callable[..., Any]] = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}

# A program that runs on the thread of its caller raises the second.
RAISED = (jax.errors.JaxRuntimeError, ValueError)


def place(strategy: Strategy) -> tuple[int, int]:
    return strategy.communicator.rank, strategy.num_replicas_in_sync


def mean(x: Any) -> Any:
    return mpidist.jax.all_reduce("MEAN", x)


def test_values_inside_and_outside_programs(strategy: Strategy) -> None:
    rank, size = place(strategy)

    def of(rank: int) -> dict[str, Any]:
        rows = np.arange(6.0, dtype="f4").reshape(2, 3)
        return {"a": rows + rank + 1, "b": [np.float32(rank), np.zeros((0, 3), "f4")]}

    def all_ops(tree: Any) -> Any:
        return [mpidist.jax.all_reduce(op, tree) for op in OPS]

    tree = jax.tree.map(jnp.asarray, of(rank))
    expected = [jax.tree.map(lambda *ones, f=f: f(np.stack(ones), axis=0), *map(of, range(size))) for f in OPS.values()]
    for function in (all_ops, jax.jit(all_ops)):
        made = function(tree)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), made, expected)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made))


def test_dtypes(strategy: Strategy) -> None:
    rank, size = place(strategy)
    x = {dtype: jnp.arange(3).astype(dtype) + jnp.asarray(rank, dtype)
         for dtype in ("bfloat16", "float16", "int32", "uint8", "complex64")}
    sums, means = jax.jit(lambda x: (mpidist.jax.all_reduce("SUM", x), mean(x)))(x)
    for dtype, total in sums.items():
        assert total.dtype == dtype
        np.testing.assert_array_equal(np.asarray(total, "c8"), np.arange(3) * size + sum(range(size)))
        assert means[dtype].dtype == ("float32" if dtype in ("int32", "uint8") else dtype)
        np.testing.assert_allclose(np.asarray(means[dtype], "c8"), np.arange(3) + (size - 1) / 2, rtol=1e-2)


def test_broadcast_gather_and_scatter(strategy: Strategy) -> None:
    rank, size = place(strategy)
    tree = {"x": jnp.full((2, 3), rank), "key": jax.random.key(rank), "flag": jnp.asarray(rank == 0)}
    for made in (mpidist.jax.broadcast(tree), jax.jit(mpidist.jax.broadcast)(tree)):
        assert not made["x"].any()
        assert made["flag"]
        np.testing.assert_array_equal(jax.random.key_data(made["key"]), jax.random.key_data(jax.random.key(0)))
    x = jnp.arange(6.0).reshape(2, 3) + 10 * rank
    whole = np.concatenate([np.arange(6.0).reshape(2, 3) + 10 * one for one in range(size)], axis=1)
    np.testing.assert_array_equal(mpidist.jax.all_gather(x, 1), whole)
    np.testing.assert_array_equal(jax.jit(lambda x: mpidist.jax.all_gather(x, -1))(x), whole)
    # Outside, sizes may differ.
    assert mpidist.jax.all_gather(jnp.ones(rank)).shape == (sum(range(size)),)
    total = np.arange(6.0).reshape(2, 3) * size + 10 * sum(range(size))
    part = np.array_split(total, size, axis=1)[rank]
    np.testing.assert_array_equal(mpidist.jax.reduce_scatter("SUM", x, 1), part)
    np.testing.assert_array_equal(jax.jit(lambda x: mpidist.jax.reduce_scatter("SUM", x, 1))(x), part)


@pytest.mark.mpi(min_size=2)
def test_calls_run_in_the_order_of_the_program(strategy: Strategy) -> None:
    """Without an order XLA runs some of these before others, and sums of other values come out."""
    _, size = place(strategy)

    def slow(x: Any) -> Any:
        return x * (jnp.ones((200, 200)) @ jnp.ones((200, 200)))[0, 0] / 200

    inner = jax.jit(lambda x: mpidist.jax.all_reduce("SUM", x))
    inner(jnp.float32(0))

    def program(x: Any) -> Any:
        made = [mpidist.jax.all_reduce("SUM", slow(x * i) if i % 2 == 0 else x * i) for i in range(6)]
        carry, _ = lax.scan(lambda c, _: (mpidist.jax.all_reduce("SUM", c), None), x * 6, None, length=2)
        made += [carry, inner(slow(x * 7)), inner(x * 8), lax.cond(x > 0, inner, lambda x: x, x * 9)]
        made += [lax.while_loop(lambda c: mean(c) < 11, lambda c: inner(c) / size + 1, x * 10)]
        return [*made, mpidist.jax.all_reduce("SUM", x * 12)]

    expected = [size * i for i in range(6)]
    expected += [6 * size * size, 7 * size, 8 * size, 9 * size, 11, 12 * size]
    for _ in range(3):
        np.testing.assert_allclose(jax.jit(program)(jnp.float32(1)), expected)


def test_derivatives_and_batches(strategy: Strategy) -> None:
    rank, size = place(strategy)
    x = jnp.arange(4.0) + rank
    average = np.arange(4) + (size - 1) / 2

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.sin(mean(x)) * (rank + 1.0))

    def looped(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sin(mean(c)), None), x, None, length=2)[0].sum()

    @jax.jit
    def program(x: Any) -> Any:
        rows = jnp.stack([x, 2 * x])
        return {
            "gradient": jax.grad(loss)(x),
            "recomputed": jax.grad(jax.checkpoint(loss))(x),
            "forward": jax.jvp(mean, (x,), (2 * x,))[1],
            "batch": jax.vmap(mean)(rows),
            "batch of gradients": jax.vmap(jax.grad(loss))(rows)[0],
            "loop": jax.grad(looped)(x),
            "batch of gathered": jax.vmap(mpidist.jax.all_gather, in_axes=1)(jnp.ones((2, 3))),
            # What all ranks' losses together get of a rank's part: the transpose.
            "gathered": jax.grad(lambda x: (mpidist.jax.all_gather(x)[:4] ** 2).sum())(x),
            "broadcast": jax.grad(lambda x: (mpidist.jax.broadcast(x) ** 2).sum())(x),
            "scattered": jax.grad(lambda x: (mpidist.jax.reduce_scatter("SUM", x) * (rank + 1)).sum())(
                jnp.ones(2 * size)
            ),
        }

    slope, once = np.cos(average) * (size + 1) / 2, np.sin(average)
    expected = {
        "gradient": slope, "recomputed": slope, "forward": 2 * average, "batch": [average, 2 * average],
        "batch of gradients": slope, "loop": np.cos(average) * np.cos(once),
        "batch of gathered": np.ones((3, 2 * size)),
        "gathered": 2 * size * np.arange(4) * (rank == 0), "broadcast": 2 * size * np.arange(4) * (rank == 0),
        "scattered": np.repeat(np.arange(size) + 1, 2),
    }
    made = program(x)
    for name, value in expected.items():
        np.testing.assert_allclose(made[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(jax.grad(loss)(x), slope, rtol=1e-5)
    if size > 1:
        with pytest.raises(NotImplementedError, match="all_reduce of MAX has no derivative"):
            jax.grad(lambda x: mpidist.jax.all_reduce("MAX", x).sum())(x)


def test_calls_of_the_main_thread_wait_for_started_programs(strategy: Strategy) -> None:
    """XLA runs them later, on other threads; a rank that is ahead would meet another call."""
    rank, size = place(strategy)

    @partial(jax.jit, static_argnums=1)
    def step(x: Any, work: int) -> Any:
        heavy = jnp.ones((work, work)) * x[0]
        return mpidist.jax.all_reduce("SUM", x + (heavy @ heavy)[0, 0] * 0)

    for i in range(5):
        # The first rank computes long before its call, and the others are in theirs before they go on.
        made = step(jnp.full(3, float(rank)), 1200 if rank == 0 else 1)
        if rank:
            jax.block_until_ready(made)
        assert int(mpidist.jax.all_reduce("SUM", i)) == i * size
        other = step(jnp.full(3, 1.0), 400)
        assert strategy.reduce("SUM", np.float32(i), axis=None) == i * size
        np.testing.assert_array_equal(made, [sum(range(size))] * 3)
        np.testing.assert_array_equal(other, [size] * 3)


@pytest.mark.mpi(min_size=2)
def test_programs_that_differ_raise_on_all_ranks(strategy: Strategy) -> None:
    rank, _ = place(strategy)

    def lines(x: Any) -> Any:
        if rank:
            return mpidist.jax.all_reduce("SUM", x) + mpidist.jax.all_reduce("SUM", 2 * x)
        doubled = mpidist.jax.all_reduce("SUM", 2 * x)
        return mpidist.jax.all_reduce("SUM", x) + doubled

    with pytest.raises(RAISED, match=r"call 0 at test_collectives\.py:\d+ in lines"):
        jax.block_until_ready(jax.jit(lines)(jnp.ones(3)))

    def others(x: Any) -> Any:
        if rank:
            return mpidist.jax.all_gather(x) + mpidist.jax.all_gather(2 * x)
        doubled = mpidist.jax.all_gather(2 * x)
        return mpidist.jax.all_gather(x) + doubled

    with pytest.raises(RAISED, match=r"expected all ranks to be at the same call of a program, got \['call 0 at"):
        jax.block_until_ready(jax.jit(others)(jnp.ones(3)))


@pytest.mark.mpi(min_size=2)
def test_a_call_that_one_rank_leaves_out_raises_on_all(communicator: Communicator) -> None:
    rank = communicator.rank

    @jax.jit
    def program(x: Any) -> Any:
        first = mpidist.jax.broadcast(x)
        # JAX leaves out what nobody uses, here on the first rank.
        return first if rank else x

    def run() -> None:
        jax.block_until_ready(program(jnp.ones(3)))
        mean(jnp.ones(3))

    # After this its ranks have made other numbers of calls.
    own = communicator.split(color=0)
    with ArenaStrategy(own), pytest.raises((*RAISED, MismatchError), match="must be the same on all ranks"):
        run()
    own.close()


def test_bad_input_says_what_where_and_the_way_out(strategy: Strategy) -> None:
    reduce = mpidist.jax.all_reduce
    with pytest.raises(TypeError, match=r"got 'a' of type str at \['w'\]\['name'\].*Keep what is no array out"):
        reduce("SUM", {"w": {"name": "a"}})
    with pytest.raises(ValueError, match="'NORM' is not a valid ReduceOp"):
        reduce("NORM", jnp.ones(2))
    with pytest.raises(TypeError, match=r"SUM is defined, got an array of shape \(2,\) and dtype bool at its root"):
        jax.jit(lambda x: reduce("SUM", x))(jnp.ones(2, bool))
    with pytest.raises(TypeError, match=r"MIN is defined, got .* complex64"):
        reduce("MIN", [jnp.ones(2, "complex64")])
    with pytest.raises(TypeError, match=r"SUM is defined, got .* key.*can be broadcast"):
        reduce("SUM", {"key": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"have an axis 1, got one of shape \(2,\) at \['b'\]"):
        mpidist.jax.all_gather({"b": jnp.ones(2)}, 1)
    with pytest.raises(ValueError, match=r"got one of shape \(\) at its root. Give a scalar an axis"):
        jax.jit(lambda x: mpidist.jax.reduce_scatter("SUM", x))(1.0)
    with pytest.raises(TypeError, match=r"expected `axis` to be an int, got 'x'"):
        mpidist.jax.all_gather(jnp.ones(2), axis="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`strategy` must be a strategy"):
        mpidist.jax.broadcast(jnp.ones(2), strategy="auto")  # type: ignore[arg-type]


def test_which_strategy(strategy: Strategy) -> None:
    with mpidist.OneDeviceStrategy("cpu:0") as other:
        with pytest.raises(ValueError, match=r"mpidist\.jax\.all_reduce needs a strategy, and 2 are open.*strategy="):
            mean(jnp.ones(2))
        with strategy.scope():
            mean(jnp.ones(2))
        assert mpidist.jax.all_reduce("SUM", jnp.ones(2), strategy=other)[0] == 1
    program = jax.jit(mean)
    program(jnp.ones(2))
    strategy.close()
    with pytest.raises(ValueError, match="none is open"):
        mean(jnp.ones(2))
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(RAISED, match="calls a strategy that is closed"):
            jax.block_until_ready(program(jnp.ones(2)))


def test_calls_go_by_the_foreign_function_interface() -> None:
    assert xla.reason_for_callbacks() is None
