"""Training on several ranks gives the parameters of one rank: plain optax with the same global batches beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is in the extra 'jax'")
optax = pytest.importorskip("optax", reason="optax is in the extra 'jax'")

import jax.numpy as jnp  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpidist.jax  # noqa: E402
from mpidist.cli.checkpoints.look import content_of  # noqa: E402
from mpidist.comm.group.communicator import Communicator  # noqa: E402
from mpidist.errors import CheckpointError, MismatchError  # noqa: E402
from tests.helpers.amounts import turns  # noqa: E402
from tests.helpers.strategies import ArenaStrategy  # noqa: E402

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = pytest.mark.mpi

STEPS, BATCH, FEATURES = 20, 12, 6
# The last batch has one row: on several ranks all but the first have none.
ROWS = 4 * BATCH + 1

Tree = dict[str, Any]


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((ROWS, FEATURES)).astype("f4"), rng.standard_normal((ROWS, 1)).astype("f4")


def initial() -> Tree:
    rng = np.random.default_rng(7)
    return {
        "first": jnp.asarray(rng.standard_normal((FEATURES, 8)), "float32"),
        "second": [jnp.asarray(rng.standard_normal((8, 1)), "float32"), jnp.zeros(1)],
    }


def loss(params: Tree, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"])
    return jnp.mean((hidden @ params["second"][0] + params["second"][1] - y) ** 2)


def batches(steps: range, rows: Callable[[int], slice]) -> Any:
    x, y = data()
    for step in steps:
        begin = step % 5 * BATCH
        batch = slice(begin, begin + BATCH)
        own = rows(len(x[batch]))
        yield x[batch][own], y[batch][own]


def everything(_: int) -> slice:
    return slice(None)


def make_step(optimizer: Any, *, weighted: bool) -> Callable[..., Any]:
    def step(params: Tree, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        extra = {"rows": len(x)} if weighted else {}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    jitted: Callable[..., Any] = jax.jit(step)
    return jitted


def train(optimizer: Any, rows: Callable[[int], slice], *, weighted: bool = True) -> Tree:
    params = initial()
    state = optimizer.init(params)
    step = make_step(optimizer, weighted=weighted)
    for x, y in batches(range(STEPS), rows):
        params, state, _ = step(params, state, x, y)
    return params


def require_close(found: Tree, expected: Tree, tolerance: float = 1e-6) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=tolerance), found, expected)


def require_alike(strategy: Strategy, tree: Tree) -> None:
    everyone = strategy.gather_object(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)))
    assert len(set(everyone)) == 1


MADE: dict[str, Callable[[], Any]] = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", turns(list(MADE), 1))
def test_training_is_that_of_one_rank(strategy: Strategy, name: str) -> None:
    expected = train(MADE[name](), everything, weighted=False)
    found = train(mpidist.jax.distribute(MADE[name]()), strategy.extended.rows)
    require_close(found, expected)
    require_alike(strategy, found)


def test_all_steps_in_one_program(strategy: Strategy) -> None:
    """A call in the body of a loop, and one after it."""
    optimizer = mpidist.jax.distribute(optax.sgd(0.1, momentum=0.9))
    x, y = data()
    whole = ROWS // 4 // strategy.num_replicas_in_sync * strategy.num_replicas_in_sync
    xs, ys = (a[: 4 * whole].reshape(4, whole, -1)[:, strategy.extended.rows(whole)] for a in (x, y))

    def body(carry: Any, batch: Any) -> Any:
        params, state = carry
        value, gradients = jax.value_and_grad(jax.checkpoint(loss))(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def program(params: Tree) -> Any:
        (params, _), values = jax.lax.scan(body, (params, optimizer.init(params)), (xs, ys))
        return params, mpidist.jax.all_reduce("MEAN", values)

    params, values = program(initial())
    expected, plain = initial(), optax.sgd(0.1, momentum=0.9)
    state, step = plain.init(expected), make_step(plain, weighted=False)
    for i in range(4):
        expected, state, value = step(expected, state, x[i * whole : (i + 1) * whole], y[i * whole : (i + 1) * whole])
        np.testing.assert_allclose(values[i], value, rtol=1e-5)
    require_close(params, expected)


def test_halves_are_weighted_exactly(strategy: Strategy) -> None:
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    optimizer = mpidist.jax.distribute(optax.sgd(1.0))
    gradients = {"h": jnp.full(3, float(rank), "bfloat16"), "f": jnp.full(3, jnp.nan if rank else 1.0)}
    state = optimizer.init(jax.tree.map(jnp.zeros_like, gradients))
    # The first rank alone has rows, then all have, some more than others.
    made, _ = optimizer.update(gradients, state, rows=0 if rank else 5)
    np.testing.assert_array_equal(made["f"], -1.0)
    made, _ = optimizer.update(gradients, state, rows=jnp.int32(rank + 1))
    expected = sum(one * (one + 1) for one in range(size)) / sum(range(1, size + 1))
    np.testing.assert_allclose(np.asarray(made["h"], "f4"), -expected, rtol=4e-3)


def test_flax_takes_it(strategy: Strategy) -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    rank = strategy.communicator.rank
    x, y = (a[: 3 * strategy.num_replicas_in_sync] for a in data())

    def trained(seed: int, transformation: Any, *, own: slice) -> Any:
        model = nnx.Linear(FEATURES, 1, rngs=nnx.Rngs(seed))
        if own != slice(None):
            nnx.update(model, mpidist.jax.broadcast(nnx.state(model)))
        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any) -> None:
            gradients = nnx.grad(lambda model: jnp.mean((model(x[own]) - y[own]) ** 2))(model)
            optimizer.update(model, gradients)

        for _ in range(3):
            step(model, optimizer)
        return jax.tree.leaves(nnx.state(model))

    found = trained(rank, mpidist.jax.distribute(optax.adam(1e-2)), own=strategy.extended.rows(len(x)))
    require_close({"w": found}, {"w": trained(0, optax.adam(1e-2), own=slice(None))})


class Job:
    """A training whose state is in a folder, under one strategy."""

    def __init__(self, strategy: Strategy, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder
        self.optimizer = mpidist.jax.distribute(optax.adam(1e-2), strategy)
        self.step = make_step(self.optimizer, weighted=True)

    def run(self, steps: range, *, save: bool = False) -> Tree:
        """Some steps, from what was saved or from the beginning."""
        state = mpidist.jax.State(
            params=initial(), optimizer=self.optimizer.init(initial()), key=jax.random.key(3), step=0
        )
        checkpoint = mpidist.Checkpoint(state=state)
        if steps.start:
            state.params = jax.tree.map(jnp.zeros_like, state.params)
            checkpoint.restore(mpidist.latest_checkpoint(self.folder)).assert_consumed()
            assert (state.step, type(state.step)) == (steps.start, int)
            assert jax.random.key_data(state.key)[1] == 3 + steps.start
        for x, y in batches(steps, self.strategy.extended.rows):
            state.params, state.optimizer, _ = self.step(state.params, state.optimizer, x, y)
        state.step, state.key = steps.stop, jax.random.key(3 + steps.stop)
        if save:
            checkpoint.save(self.folder / "state")
        params: Tree = state.params
        return params


def test_resumed_training_is_the_undisturbed_one_also_on_other_ranks(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        job = Job(strategy, mpi_tmp_path)
        undisturbed = job.run(range(6))
        job.run(range(3), save=True)
        jax.tree.map(np.testing.assert_array_equal, job.run(range(3, 6)), undisturbed)
    if communicator.size > 1:
        alone = communicator.split(color=int(communicator.rank == 0))
        with ArenaStrategy(alone) as strategy:
            require_close(Job(strategy, mpi_tmp_path).run(range(3, 6)), undisturbed)
        alone.close()


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """Two children of one name."""

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.DictKey("a"), 1.0), (jax.tree_util.GetAttrKey("a"), 2.0)], None

    @classmethod
    def tree_unflatten(cls, _: Any, __: Any) -> Twins:
        return cls()


def test_what_does_not_fit_a_checkpoint(strategy: Strategy, mpi_tmp_path: Path) -> None:
    state = mpidist.jax.State(params={"w": jnp.ones(3), "b": 2})
    path = mpidist.Checkpoint(state=state).save(mpi_tmp_path / "state")
    other = mpidist.jax.State(params={"w": jnp.ones(4), "b": 2})
    with pytest.raises(CheckpointError, match=r"shape \(4,\) and dtype float32 at 'params/w', got \(3,\)"):
        mpidist.Checkpoint(state=other).restore(path)
    other = mpidist.jax.State(params={"w": jnp.ones(3), "new": 2})
    with pytest.raises(CheckpointError, match="expected an entry 'params/new' in the checkpoint"):
        mpidist.Checkpoint(state=other).restore(path)
    with pytest.raises(AttributeError, match="has the trees params, got 'parameters'"):
        state.parameters = {}
    with pytest.raises(TypeError, match="got 'x' of type str at params/w"):
        mpidist.jax.State(params={"w": "x"})
    with pytest.raises(TypeError, match="two leaves of 'params' have one path"):
        mpidist.jax.State(params=Twins())


def test_trees_are_shown_verified_and_restored_in_part_and_on_other_ranks(
    strategy: Strategy, mpi_tmp_path: Path
) -> None:
    def made(value: float, outputs: int = 2) -> Any:
        params = {"body": jnp.full((3, 4), value), "head": jnp.full((4, outputs), value)}
        return mpidist.jax.State(params=params, optimizer=optax.adam(0.1).init(params))

    path = mpidist.Checkpoint(state=made(1.0)).save(mpi_tmp_path / "state")
    shown = {one["path"]: one["shape"] for one in content_of(path)["arrays"]}
    assert shown["state/params/body"] == [3, 4]
    assert shown["state/optimizer/0/mu/head"] == [4, 2]
    assert mpidist.checkpoint.verify(path) > 0
    with mpidist.MultiWorkerMirroredStrategy(communicator=MPI.COMM_SELF) as alone, alone.scope():
        other = made(0.0)
        mpidist.Checkpoint(state=other).restore(path).assert_consumed()
        assert float(other.params["head"].sum()) == 8
    part = made(0.0, 5)
    status = mpidist.Checkpoint(state=part).restore(path, partial=True)
    with pytest.raises(AssertionError, match=r"'state/params/head': it has shape \(4, 5\), but \(4, 2\) was saved"):
        status.assert_existing_objects_matched()
    assert float(part.params["body"].sum()) == 12
    assert float(part.params["head"].sum()) == 0


def test_distribute_twice_by_others_and_of_what_is_none(strategy: Strategy) -> None:
    optimizer = mpidist.jax.distribute(optax.sgd(1.0))
    again, state = mpidist.jax.distribute(optimizer), optimizer.init(jnp.ones(2))
    made, _ = again.update(jnp.ones(2), state)
    np.testing.assert_array_equal(made, -1.0)
    with (
        mpidist.OneDeviceStrategy("cpu:0") as other,
        pytest.raises(ValueError, match=r"is distributed by .*MultiWorkerMirroredStrategy.* already"),
    ):
        mpidist.jax.distribute(optimizer, other)
    with pytest.raises(TypeError, match="expected a transformation of optax, such as"):
        mpidist.jax.distribute(optax.adam)
    with pytest.raises(TypeError, match=r"expected `rows` to be this rank's number of rows, got 'all' of type str"):
        optimizer.update(jnp.ones(2), state, rows="all")
    strategy.close()
    with pytest.raises(RuntimeError, match="closed"):
        mpidist.jax.distribute(optax.sgd(1.0), strategy)


@pytest.mark.mpi(min_size=2)
def test_what_differs_between_ranks_raises_on_all(strategy: Strategy) -> None:
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    optimizer = mpidist.jax.distribute(optax.sgd(1.0))
    with pytest.raises(MismatchError, match=r"others at \['w'\] on rank 1 than on rank 0. Call `params = mpidist"):
        optimizer.init({"w": jnp.full(2, float(rank))})
    # A program that runs on the thread of its caller raises the second.
    raised, state = (jax.errors.JaxRuntimeError, ValueError), optimizer.init(jnp.ones(2))
    with pytest.raises(raised, match=r"at least 0, got \[1.0, -1.0.*Pass the length of this rank's batch"):
        jax.block_until_ready(optimizer.update(jnp.ones(2), state, rows=jnp.int32(-1 if rank else 1)))
    with pytest.raises(raised, match="must be the same on all ranks"):
        jax.block_until_ready(
            jax.jit(lambda x: optimizer.update(x, state, rows=3 if rank else None))(jnp.ones(2))
        )
    with pytest.raises(raised, match="must be the same on all ranks"):
        jax.block_until_ready(jax.jit(optimizer.update)(jnp.ones(2 + rank), state))
    assert mpidist.jax.all_reduce("SUM", jnp.ones(2))[0] == size
