"""How ranks are divided into groups, and what an outer optimizer must be."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import SGD, Adam
from mpidist.strategy.hybrid import outer
from mpidist.strategy.hybrid.groups import divide
from mpidist.strategy.hybrid.lead import Lead
from mpidist.strategy.hybrid.outer import FlatLayout, Member, OuterStep, Place
from mpidist.strategy.hybrid.part import Part
from mpidist.strategy.hybrid.strategy import default_outer


@pytest.mark.parametrize(
    ("groups", "nodes", "expected"), [
        (2, (0, 0, 0, 0), ((0, 1), (2, 3))),
        # Nodes in turn: each group has a node for itself.
        (2, (0, 1, 0, 1), ((0, 2), (1, 3))),
        (4, (0, 1, 0, 1), ((0,), (2,), (1,), (3,))),
        (1, (0, 0), ((0, 1),)),
        # Without a launcher.
        (8, (0,), ((0,),)),
        ([[2], [1, 0]], (0, 0, 0), ((2,), (1, 0))),
        (((0, 1), range(2, 4)), (0, 0, 1, 1), ((0, 1), (2, 3))),
    ],
)
def test_groups(groups: Any, nodes: tuple[int, ...], expected: Any) -> None:
    assert divide(groups, nodes) == expected


@pytest.mark.parametrize(
    ("groups", "error", "text"), [
        (3, ValueError, r"divide the number of ranks, 4, .* got 3. Here \[1, 2, 4\] fit"),
        (0, ValueError, "got 0"),
        (True, TypeError, "got True"),
        (2.0, TypeError, "got 2.0"),
        ("01", TypeError, "the number of groups, or a list of lists of ranks"),
        ([0, 1, 2, 3], TypeError, "a list of lists of ranks, got the element 0"),
        ([[0, 1], [2, "3"]], TypeError, "got '3'"),
        ([[0, 1, 2, 3], []], ValueError, "an empty list"),
        ([[0, 1], [1, 2, 3]], ValueError, "rank 1 twice"),
        ([[0, 1], [2]], ValueError, "rank 3 that are in no group"),
        ([[0, 1], [2, 3, 4]], ValueError, "rank 4 that do not exist.* mpirun -n 5"),
    ],
)
def test_groups_that_do_not_fit(groups: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        divide(groups, (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("optimizer", "error", "text"), [
        (Adam(), ValueError, "must have linear momentum, got Adam"),
        (SGD(0.7, 0.9, weight_decay=0.1), ValueError, "without options, .* weight_decay"),
        (SGD(0.7, global_clipnorm=1.0), ValueError, "global_clipnorm"),
        (0.7, TypeError, "must be an optimizer of mpidist.optimizers, got 0.7"),
        (SGD, TypeError, "must be an optimizer"),
    ],
)
def test_what_is_no_outer_optimizer(optimizer: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        OuterStep(optimizer)


def test_an_optimizer_of_the_program_is_no_outer_one() -> None:
    optimizer = SGD(0.1)
    optimizer.build([mpidist.Variable(1.0)])
    with pytest.raises(ValueError, match="updates variables of the program"):
        OuterStep(optimizer)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_increments_of_groups_add_up_to_the_step_of_the_mean(
    momentum: float, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer, "_BLOCK", 3)
    random = np.random.default_rng(0)
    with_schedule = [OuterStep(SGD(lambda step: 0.5 / (1 + step), momentum, nesterov)) for _ in range(3)]
    whole = mpidist.Variable(np.zeros(8))
    reference = SGD(lambda step: 0.5 / (1 + step), momentum, nesterov)
    velocities = [[np.zeros(8)] for _ in with_schedule]
    total = np.zeros(8)
    for count in range(4):
        differences = random.normal(size=(3, 8))
        for step, velocity, difference in zip(with_schedule, velocities, differences, strict=True):
            total += step.apply([difference / 3], velocity, count)[0]
        reference.apply_gradients([(differences.mean(axis=0), whole)])
        np.testing.assert_allclose(total, whole.numpy(), rtol=1e-12)


def test_the_default_outer_optimizer_depends_on_the_number_of_groups() -> None:
    for count, momentum in ((2, 0.6), (3, 0.733), (4, 0.8), (100, 0.9)):
        assert repr(OuterStep(default_outer(count))) == repr(OuterStep(SGD(0.7, momentum, nesterov=True)))
    # One group trains as without an outer step.
    assert repr(OuterStep(default_outer(1))) == repr(OuterStep(SGD(1.0)))


def test_ranks_can_compare_an_outer_optimizer_with_a_schedule() -> None:
    first, second = (repr(OuterStep(SGD(lambda step: 0.5 / (1 + step), 0.9))) for _ in range(2))
    assert first == second == "SGDKernel(momentum=0.9, nesterov=False) with rate function()"


def test_what_has_come_is_not_expected() -> None:
    variable: Any = mpidist.Variable(np.zeros(3))
    part = Part(0, [variable], leads=True)
    own = [np.array([1.0, 2.0, 3.0])]
    # Of three other groups the same is expected.
    part.lead.expect(own, 3)
    assert part.present()[0].tolist() == [3.0, 6.0, 9.0]
    # One of them made two windows, as much as two groups were expected to make.
    part.take(0, memoryview(np.full(3, 10.0).tobytes()), 2)
    assert part.outer[0].tolist() == [10.0, 10.0, 10.0]
    np.testing.assert_allclose(part.present()[0], [11.0, 12.0, 13.0])
    # More than was expected.
    part.take(0, memoryview(np.zeros(3).tobytes()), 9)
    assert part.present()[0].tolist() == [10.0, 10.0, 10.0]
    part.lead.expect(own, 1)
    part.lead.clear()
    assert part.present()[0].tolist() == [10.0, 10.0, 10.0]


def test_a_group_that_is_stopped_is_expected_to_make_two_windows_at_most() -> None:
    lead = Lead([Place(0, 0, 1), Place(0, 1, 2)])
    for _ in range(50):
        lead.expect([np.ones(2)], 3)
        assert (lead.flat[0] <= 6 * (1 + 1e-12)).all()
    np.testing.assert_allclose(lead.flat[0], 6)
    # Pieces come by themselves.
    lead.note_arrival(1, 3)
    np.testing.assert_allclose(lead.flat[0], [6, 3])
    # Nobody else is left.
    lead.expect([np.ones(2)], 0)
    assert lead.flat[0].tolist() == [0, 0]


def test_large_parameters_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "PIECE_BYTES", 32)
    variables: Any = [mpidist.Variable(np.zeros(size, dtype)) for size, dtype in ((9, "f4"), (5, "f8"), (2, "c8"))]
    layout = FlatLayout([Member.of(variable) for variable in variables])
    assert layout.dtypes == [np.dtype("f4"), np.dtype("f8")]
    assert layout.sizes == [13, 5]
    assert [tuple(place) for place in layout.places] == [(0, 0, 9), (1, 0, 5), (0, 9, 13)]
    assert [tuple(piece) for piece in layout.pieces()] == [(0, 0, 8), (0, 8, 13), (1, 0, 4), (1, 4, 5)]


def test_one_process_is_one_group() -> None:
    with mpidist.HybridStrategy(4, every=2, outer=SGD(1.0)) as strategy:
        assert strategy.groups == ((0,),)
        with strategy.scope():
            variable = mpidist.Variable(3.0)
            optimizer = SGD(0.5)
        for _ in range(5):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(()), variable)]))
        strategy.finish()
        assert variable.numpy() == 0.5
        with pytest.raises(AttributeError, match=re.escape("HybridStrategy.every cannot be set")):
            strategy.every = 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"), [
        ({"every": 0}, ValueError, "every"),
        ({"every": 1.5}, TypeError, "every"),
        ({"synchronous": 1}, TypeError, "synchronous"),
        ({"communication_options": "ring"}, TypeError, "communication_options"),
    ],
)
def test_arguments_that_do_not_fit(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mpidist.HybridStrategy(1, **arguments)
