"""Optimizers over ranks: the same as PyTorch's on the sum of all replicas' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, MismatchError
from mpidist.optimizers import SGD, Adam, ExponentialDecay, Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import BaseVariable
from tests.optimizers import TORCH
from tests.parallel.bits import require_same_bits
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi

SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (), (50,), (2, 3, 4))
STEPS = 20


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def make_model(strategy: Strategy, dtype: str = "float32") -> list[BaseVariable]:
    generator = np.random.default_rng(1)
    with strategy.scope():
        return [mpidist.Variable(generator.normal(size=shape).astype(dtype), name=f"v{i}")
                for i, shape in enumerate(SHAPES)]


def gradients_of(step: int, rank: int, dtype: str) -> list[AnyArray | None]:
    """This replica's; None for some variables at some steps, alike on all replicas."""
    generator = np.random.default_rng((step, rank))
    return [None if (step + i) % 5 == 4 else np.asarray(generator.normal(size=shape), dtype)
            for i, shape in enumerate(SHAPES)]


def step(strategy: Strategy, optimizer: Optimizer, pairs: list[tuple[Any, BaseVariable]]) -> None:
    strategy.run(optimizer.apply_gradients, args=(pairs,))


# `test_families.py` has the others.
WITH_NONES = ("SGD", "momentum", "Nesterov", "Adam", "AdamW, quick")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", WITH_NONES)
def test_agrees_with_torch(strategy: Strategy, family: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is what the optimizers are compared with")
    make, case = TORCH[family]
    variables = make_model(strategy, dtype)
    parameters = [torch.nn.Parameter(torch.tensor(v.numpy())) for v in variables]
    optimizer, reference = make(case.rate), case.make(torch, parameters, case.rate)
    skips = family.startswith("Adam")
    for number in range(STEPS):
        # PyTorch counts Adam's steps for each parameter apart, we for all together: without None they are the same.
        all_gradients = [
            [np.zeros(s, dtype) if g is None and skips else g
             for g, s in zip(gradients_of(number, rank, dtype), SHAPES, strict=True)]
            for rank in range(strategy.num_replicas_in_sync)
        ]
        mine = all_gradients[strategy.communicator.rank]
        step(strategy, optimizer, list(zip(mine, variables, strict=True)))
        for parameter, parts in zip(parameters, zip(*all_gradients, strict=True), strict=True):
            given = [part for part in parts if part is not None]
            parameter.grad = torch.tensor(np.sum(given, axis=0, dtype=dtype)) if given else None
        reference.step()
    assert optimizer.iterations == STEPS
    tolerance = 3e-5 if dtype == "float32" else 1e-11
    for variable, parameter in zip(variables, parameters, strict=True):
        np.testing.assert_allclose(variable.numpy(), parameter.detach().numpy(), rtol=tolerance, atol=tolerance)
    require_same_bits(strategy.communicator, *(variable.numpy() for variable in variables))


@pytest.mark.parametrize("layout", ["node", "private"])
def test_half_gradients_of_a_node_are_added_in_single_precision(communicator: Communicator, layout: str) -> None:
    """In half precision the ones would be lost, one after another."""
    strategy = make_strategy(communicator, layout)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(5000, np.float16))
    mine = np.full(5000, 2048 if communicator.rank == 0 else 1, np.float16)
    step(strategy, SGD(1.0), [(mine, variable)])
    np.testing.assert_array_equal(variable.numpy(), -np.float16(2048 + communicator.size - 1))


def test_gradients_are_summed_over_replicas(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    variables = make_model(strategy)
    before = [v.numpy() for v in variables]
    gradients = [np.full(v.shape, rank + 1.0) for v in variables]
    step(strategy, SGD(1.0), list(zip(gradients, variables, strict=True)))
    for variable, was, gradient in zip(variables, before, gradients, strict=True):
        np.testing.assert_allclose(variable.numpy(), was - n * (n + 1) / 2, rtol=1e-6)
        assert (gradient == rank + 1).all(), "what the caller passes is not changed"


def test_writing_into_the_views_is_the_same(strategy: Strategy) -> None:
    results = []
    for in_place in (False, True):
        variables = make_model(strategy)
        optimizer = Adam(0.1)
        with strategy.scope():
            views = optimizer.gradients(variables)
        for number in range(5):
            gradients = gradients_of(number * 5, strategy.communicator.rank, "float32")
            if in_place:
                for view, gradient in zip(views, gradients, strict=True):
                    view[...] = 0 if gradient is None else gradient
                gradients = list(views)
            else:
                gradients = [np.zeros(s) if g is None else g for g, s in zip(gradients, SHAPES, strict=True)]
            step(strategy, optimizer, list(zip(gradients, variables, strict=True)))
        results.append([v.numpy() for v in variables])
        assert views[0] is optimizer.gradients(variables)[0]
    np.testing.assert_equal(results[0], results[1])


def test_two_optimizers_share_variables(strategy: Strategy) -> None:
    variables = make_model(strategy)
    before = [v.numpy() for v in variables]
    first, second = SGD(0.5, momentum=0.5), SGD(0.25)
    ones = [(np.ones(v.shape), v) for v in variables]
    step(strategy, first, ones)
    step(strategy, second, ones[:2])
    step(strategy, first, ones)
    n = strategy.num_replicas_in_sync
    for number, (variable, was) in enumerate(zip(variables, before, strict=True)):
        moved = n * (0.5 + 0.75 + (0.25 if number < 2 else 0))
        np.testing.assert_allclose(variable.numpy(), was - moved, rtol=1e-5, atol=1e-6)


def test_a_schedule_sees_the_steps(strategy: Strategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    optimizer = SGD(ExponentialDecay(1.0, 1, 0.5))
    for _ in range(3):
        step(strategy, optimizer, [(1.0 / strategy.num_replicas_in_sync, variable)])
    np.testing.assert_allclose(variable.numpy(), -(1 + 0.5 + 0.25), rtol=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("built", [False, True])
def test_other_gradients_on_other_ranks_are_a_mismatch(strategy: Strategy, built: bool) -> None:
    variables = make_model(strategy)
    before = [v.numpy() for v in variables]
    optimizer = SGD(0.1)
    if built:
        with strategy.scope():
            optimizer.build(variables)
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    cases: list[Callable[[int], AnyArray | None]] = [
        lambda i: None if odd and i == 1 else np.ones(SHAPES[i]),
        lambda i: None if odd else np.ones(SHAPES[i]),  # nothing at all on one rank
    ]
    for case in cases:
        with pytest.raises(MismatchError, match="'v1'") as caught:
            step(strategy, optimizer, [(case(i), v) for i, v in enumerate(variables)])
        assert len(set(strategy.communicator.all_gather_object(str(caught.value)))) == 1
    assert optimizer.iterations == 0
    np.testing.assert_equal([v.numpy() for v in variables], before)
    if not built:
        with pytest.raises(MismatchError, match="the variables of an optimizer"):
            step(strategy, SGD(0.1), [(np.ones(v.shape), v) for v in (variables[:2] if odd else variables)])


def test_errors_alike_on_all_ranks(strategy: Strategy) -> None:
    variables = make_model(strategy)
    optimizer = SGD(0.1)
    ones = [(np.ones(v.shape), v) for v in variables]
    step(strategy, optimizer, ones)
    with pytest.raises(ValueError, match="all are None"):
        step(strategy, optimizer, [(None, v) for v in variables])
    with pytest.raises(ValueError, match=r"expected a value of shape \(3, 4\), got \(4, 3\)"):
        step(strategy, optimizer, [(np.ones((4, 3)), variables[0])])
    with pytest.raises(TypeError, match="complex"):
        step(strategy, optimizer, [(1j * np.ones((3, 4)), variables[0])])
    with pytest.raises(ValueError, match="twice"):
        step(strategy, optimizer, [*ones, ones[0]])
    with strategy.scope():
        later, whole = mpidist.Variable(np.zeros(50, "float32"), name="later"), mpidist.Variable([1, 2])
        local = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    with pytest.raises(ValueError, match="was not built on variable 'later'"):
        step(strategy, optimizer, [(np.ones(50), later)])
    with pytest.raises(ValueError, match="already built on other variables"):
        optimizer.build([*variables[:2], later, variables[3]])
    for wrong, text in [(whole, "floating dtype"), (local, "ON_WRITE"), (np.zeros(3), "ON_WRITE")]:
        with pytest.raises(TypeError, match=text):
            SGD(0.1).build([wrong])  # type: ignore[list-item]  # an array is no variable
    assert optimizer.iterations == 1
    step(strategy, optimizer, ones)


def test_a_variable_made_outside_the_scope_is_refused_in_run(strategy: Strategy) -> None:
    outside = mpidist.Variable(1.0, name="outside")
    early = SGD(0.1)
    early.build([outside])
    for optimizer in (SGD(0.1), early):
        with pytest.raises(ValueError, match=r"'outside' does not belong to the current strategy.*scope"):
            step(strategy, optimizer, [(1.0, outside)])
    early.apply_gradients([(1.0, outside)])
    assert outside.numpy() == np.float32(0.9)


class Stored:
    """An array as a checkpoint gives it back."""

    def __init__(self, array: Any) -> None:
        self.array = np.array(array)
        self.shape = self.array.shape
        self.dtype = self.array.dtype

    def read(self, start: int, stop: int) -> AnyArray:
        result: AnyArray = self.array.reshape(-1)[start:stop]
        return result

    def read_as(self, dtype: np.dtype[Any]) -> Callable[[int, int], AnyArray]:
        assert dtype == self.dtype
        return self.read

    def numpy(self) -> AnyArray:
        return self.array


def whole(variable: BaseVariable) -> AnyArray:
    """What a checkpoint holds of a variable. Collective."""
    return variable.reader()(0, variable.size).reshape(variable.shape)


def saved(optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint would hand to load_state."""
    state = optimizer.state()
    numbers = ("iterations", "learning_rate")
    plain: dict[str, Any] = {name: Stored(state.pop(name)) for name in numbers if name in state}
    return {**plain, **{name: {str(i): Stored(whole(v)) for i, v in enumerate(one)} for name, one in state.items()}}


@pytest.mark.parametrize("when", ["before build", "after build"])
def test_state_round_trip(strategy: Strategy, when: str) -> None:
    pairs = [[(np.full(s, k + 1.0), i) for i, s in enumerate(SHAPES)] for k in range(4)]
    first, second = make_model(strategy), make_model(strategy)
    straight, stopped, resumed = Adam(0.1), Adam(0.1), Adam(0.1)
    for k in range(4):
        step(strategy, straight, [(g, first[i]) for g, i in pairs[k]])
    for k in range(2):
        step(strategy, stopped, [(g, second[i]) for g, i in pairs[k]])
    if when == "after build":
        with strategy.scope():
            resumed.build(second)
    resumed.load_state(saved(stopped))
    for k in range(2, 4):
        step(strategy, resumed, [(g, second[i]) for g, i in pairs[k]])
    assert resumed.iterations == 4
    np.testing.assert_equal([v.numpy() for v in second], [v.numpy() for v in first])
    assert len(resumed.variables) == 2 * len(SHAPES)


def test_state_of_before_the_first_step_resets(strategy: Strategy) -> None:
    variables = make_model(strategy)
    optimizer = SGD(0.1, momentum=0.9)
    fresh = saved(optimizer)
    step(strategy, optimizer, [(np.ones(v.shape), v) for v in variables])
    optimizer.load_state(fresh)
    assert optimizer.iterations == 0
    assert all((slot.numpy() == 0).all() for slot in optimizer.variables)


def test_a_state_that_does_not_fit_is_an_error(strategy: Strategy) -> None:
    variables = make_model(strategy)
    optimizer = SGD(0.1, momentum=0.9)
    step(strategy, optimizer, [(np.ones(v.shape), v) for v in variables])
    state = saved(optimizer)
    for stranger in (Adam(), SGD()):
        with pytest.raises(CheckpointError, match="another optimizer"):
            stranger.load_state(state)
    state["momentum"]["0"] = Stored(np.zeros((4, 3)))
    with pytest.raises(CheckpointError, match=r"'momentum' of variable 'v0' needs shape \(3, 4\).*\(4, 3\)"):
        optimizer.load_state(state)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize(("layout", "steps"), [*((layout, 3) for layout in LAYOUTS), ("node", 20)])
def test_sums_on_one_rank_alone_are_a_mismatch(communicator: Communicator, layout: str, steps: int, odd: str) -> None:
    """Without `check`, too: ranks that share memory see it at every step, others in the first ones."""
    strategy = make_strategy(communicator, layout)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(100))
        optimizer = SGD(1.0)
    pairs: list[tuple[Any, BaseVariable]] = [(np.ones(100), variable)]
    for _ in range(steps):
        step(strategy, optimizer, pairs)
    is_odd = communicator.rank == (0 if odd == "first" else communicator.size - 1)
    with pytest.raises(MismatchError, match=r"variables with gradients must be .*summed"):
        strategy.run(optimizer.apply_gradients, args=(pairs,), kwargs={"skip_gradients_aggregation": is_odd})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("one", "other", "match"), [
    (lambda: SGD(0.1, momentum=0.9), lambda: SGD(0.1, momentum=0.8), r"SGDKernel\(momentum=0.9\).*momentum=0.8"),
    (lambda: SGD(0.1), lambda: SGD(0.1, clipvalue=0.5), r"OptimizerOptions\(clipvalue=0.5\)"),
    (lambda: SGD(0.1), lambda: SGD(0.1, weight_decay=0.5), r"OptimizerOptions\(weight_decay=0.5\)"),
    (lambda: Adam(0.1), lambda: Adam(0.1, beta_2=0.9), r"beta_2=0.999.*beta_2=0.9"),
    (lambda: Adam(0.1), lambda: SGD(0.1), "AdamKernel.*SGDKernel"),
])
def test_other_optimizers_on_one_rank_are_a_mismatch(
    communicator: Communicator, layout: str, one: Callable[[], Optimizer], other: Callable[[], Optimizer], match: str
) -> None:
    """Each rank of a node updates a part of the variables, and would do so in its own way."""
    strategy = make_strategy(communicator, layout)
    with strategy.scope():
        variable = mpidist.Variable(np.ones(100))
        optimizer = (other if communicator.rank == communicator.size - 1 else one)()
    with pytest.raises(MismatchError, match=f"(?s)the optimizer and its options must be .*{match}"):
        step(strategy, optimizer, [(np.ones(100), variable)])
    np.testing.assert_array_equal(variable.numpy(), 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("layout", "steps"), [*((layout, 3) for layout in LAYOUTS), ("node", 20)])
def test_two_optimizers_alike_are_told_apart(communicator: Communicator, layout: str, steps: int) -> None:
    """Their steps look alike, and each would count some ranks' steps."""
    strategy = make_strategy(communicator, layout)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(100))
        optimizers = [SGD(1.0), SGD(1.0)]
    pairs: list[tuple[Any, BaseVariable]] = [(np.ones(100), variable)]
    for _ in range(steps):
        for optimizer in optimizers:
            step(strategy, optimizer, pairs)
    chosen = optimizers[communicator.rank == communicator.size - 1]
    with pytest.raises(MismatchError, match=r"by optimizer number 0.*by optimizer number 1"):
        step(strategy, chosen, pairs)
