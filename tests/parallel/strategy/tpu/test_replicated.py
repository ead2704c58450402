"""A replicated variable is one over all ranks, and so is a step: what would break in silence device by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.experimental import CommunicationOptions
from mpidist.optimizers import LAMB, LARS, SGD, Adam, LossScaleOptimizer
from mpidist.variables.logical_arena import LogicalArena
from tests.helpers.amounts import turns
from tests.parallel.layouts import LAYOUTS
from tests.parallel.strategy.tpu.making import devices_of, make_tpu, place

pytestmark = pytest.mark.mpi

SOME_LAYOUTS = turns(LAYOUTS, 1, always=("node", "each"))


def same(communicator: Communicator, array: AnyArray) -> AnyArray:
    """An array, which has the same bits on all ranks."""
    everyone = communicator.all_gather_object(array.tobytes())
    assert len(set(everyone)) == 1
    return array


def train(strategy: mpidist.TPUStrategy, optimizer: Any, *, steps: int, devices_differ: bool, options: Any) -> AnyArray:
    """Parameters after some steps, of dense and of sparse gradients, as one array."""
    replica, device = place(strategy)
    # Sums are the same on all replicas.
    replica = 0 if options["summed"] else replica
    with strategy.scope():
        dense = mpidist.Variable(np.linspace(-1, 1, 6).reshape(2, 3).astype(np.float32))
        rows = mpidist.Variable(np.ones((5, 2), np.float32), sparse_gradient=options["rows"])
        half = mpidist.Variable(np.ones(4, np.float16))

    def step(number: int) -> None:
        random = np.random.default_rng((number, replica))
        one = random.normal(size=(2, 3)).astype(np.float32)
        if devices_differ and device:
            # As another order of summation in a matrix product gives.
            one = np.nextafter(one, np.float32(9))
        indices = np.array([number % 5, replica % 5, 1]) if not device or not devices_differ else np.array([4])
        values = random.normal(size=(3, 2)).astype(np.float32)
        slices = mpidist.IndexedSlices(values[: len(indices)], indices)
        halves = random.normal(size=4).astype(np.float16) * (1 if not device or not devices_differ else np.float16(2))
        pairs = [(one, dense), (slices, rows), (halves, half)]
        optimizer.apply_gradients(pairs, skip_gradients_aggregation=options["summed"])

    for number in range(steps):
        strategy.run(step, args=(number,))
    state = [variable.numpy().reshape(-1).astype(np.float32) for variable in optimizer.variables]
    return np.concatenate([v.numpy().reshape(-1).astype(np.float32) for v in (dense, rows, half)] + state)


CASES: dict[str, tuple[Callable[[], Any], dict[str, bool]]] = {
    "plain": (lambda: SGD(0.1), {"rows": True, "summed": False}),
    "clipped": (lambda: Adam(0.01, global_clipnorm=1.0), {"rows": True, "summed": False}),
    "accumulated": (lambda: Adam(0.01, gradient_accumulation_steps=2, use_ema=True), {"rows": False, "summed": False}),
    "layers": (lambda: LAMB(0.01), {"rows": False, "summed": False}),
    "summed": (lambda: Adam(0.01, master_copy=True), {"rows": True, "summed": True}),
}


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_one_bit_of_difference_between_devices_does_not_count(communicator: Communicator, layout: str) -> None:
    with make_tpu(communicator, layout) as strategy:
        for make, options in map(CASES.__getitem__, turns(tuple(CASES), 2, always=("plain",))):
            results = []
            for differ in (True, False):
                with strategy.scope():
                    optimizer = make()
                made = train(strategy, optimizer, steps=2, devices_differ=differ, options=options)
                results.append(same(communicator, made))
            assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_gradients_that_are_sums_count_once(communicator: Communicator, layout: str) -> None:
    with make_tpu(communicator, layout) as strategy:
        _, device = place(strategy)
        with strategy.scope():
            dense, rows = mpidist.Variable(np.zeros(3)), mpidist.Variable(np.zeros((3, 2)), sparse_gradient=True)
            optimizer, later = SGD(1.0), SGD(1.0, gradient_accumulation_steps=2)

        def step() -> None:
            factor = 1.0 if device == 0 else 1.5
            slices = mpidist.IndexedSlices(np.full((1, 2), factor), np.array([1]))
            optimizer.apply_gradients([(np.full(3, factor), dense), (slices, rows)], skip_gradients_aggregation=True)
            for _ in range(2):
                later.apply_gradients([(np.full(3, factor), dense)], skip_gradients_aggregation=True)

        for number in (1, 2):
            strategy.run(step)
            assert same(communicator, dense.numpy()).tolist() == [-2.0 * number] * 3
            assert same(communicator, rows.numpy()).tolist() == [[0, 0], [-number, -number], [0, 0]]


def test_only_the_ranks_of_device_0_have_a_segment(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.zeros(1000, np.float32)), SGD(1.0)
        reserved: list[int] = []
        home = strategy.home
        assert isinstance(home, LogicalArena)
        reserve = home.reserve
        home.reserve = lambda count, *a, **k: reserved.append(count) or reserve(count, *a, **k)  # type: ignore
        view = optimizer.gradients([variable])[0]
        assert reserved == [strategy.num_replicas_in_sync * 1008]
        view[...] = 1 if strategy.logical_devices.device == 0 else 100
        strategy.run(lambda: optimizer.apply_gradients([(view, variable)]))
        assert variable.numpy()[0] == -strategy.num_replicas_in_sync


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_clipping_and_layer_norms_are_over_all_tiles(communicator: Communicator, layout: str) -> None:
    """As one device with the whole would do, whose norm counts each tile once and what is replicated once."""
    whole = np.arange(24.0).reshape(4, 6)
    makes: list[Callable[[], Any]] = [
        lambda: SGD(1.0, global_clipnorm=1.0), lambda: SGD(1.0, clipnorm=2.0), lambda: LAMB(0.5), lambda: LARS(0.5)
    ]
    results: list[list[AnyArray]] = [[] for _ in makes]
    for devices in {1, devices_of(communicator)}:
        with make_tpu(communicator, layout, devices=devices) as strategy:
            n = strategy.num_replicas_in_sync
            for make, found in zip(makes, results, strict=True):
                with strategy.scope():
                    kernel = mpidist.Variable(whole / 24 + 1, partition_dimensions=[1, devices])
                    bias = mpidist.Variable(np.ones(4))
                    optimizer = make()

                def step(k: Any = kernel, b: Any = bias, o: Any = optimizer, n: int = n) -> None:
                    o.apply_gradients([(k.tiling.take(whole) / n, k), (np.ones(4) / n, b)])

                strategy.run(step)
                found.append(same(communicator, np.concatenate([kernel.numpy().reshape(-1), bias.numpy()])))
    for found in results:
        for one in found:
            np.testing.assert_allclose(one, found[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("layout", ["node", "private", "each"])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(communicator: Communicator, layout: str) -> None:
    with make_tpu(communicator, layout) as strategy:
        devices = strategy.logical_devices.count
        with strategy.scope():
            tile = mpidist.Variable(np.zeros((2, 2 * devices), np.float32), partition_dimensions=[1, devices])
            bias = mpidist.Variable(np.zeros(2, np.float32))
            optimizer = LossScaleOptimizer(Adam(1.0), initial_scale=4.0)
        for bad in range(communicator.size):
            def step(bad: int = bad) -> None:
                gradient = np.ones((2, 2), np.float32)
                if communicator.rank == bad:
                    gradient[0, 0] = np.nan
                optimizer.apply_gradients([(gradient, tile), (np.ones(2, np.float32), bias)])

            strategy.run(step)
            assert optimizer.iterations == 0
            assert not tile.numpy().any()
            assert not bias.numpy().any()

        # Of what is replicated a NaN of another device is not seen, and does not count.
        def other() -> None:
            gradient = np.full(2, np.nan if strategy.logical_devices.device else 1.0, np.float32)
            optimizer.apply_gradients([(np.ones((2, 2), np.float32), tile), (gradient, bias)])

        strategy.run(other)
        assert optimizer.iterations == 1
        assert (same(communicator, bias.numpy()) < 0).all()


@pytest.mark.parametrize("layout", ["node", "each"])
def test_state_that_overflows_is_an_error_everywhere(communicator: Communicator, layout: str) -> None:
    with make_tpu(communicator, layout) as strategy:
        devices = strategy.logical_devices.count
        with strategy.scope():
            tile = mpidist.Variable(np.zeros((2, devices), np.float32), name="tile", partition_dimensions=[1, devices])
            optimizer = Adam(1.0)
        large = np.full((2, 1), 1e30 if strategy.logical_devices.device == devices - 1 else 1.0, np.float32)
        for _ in range(2):
            with pytest.raises(OverflowError, match="of variable 'tile' have become infinite") as caught:
                strategy.run(lambda: optimizer.apply_gradients([(large, tile)]))
            assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


@pytest.mark.parametrize("layout", ["node", "private", "pairs"])
def test_what_replicas_write_is_what_their_device_0_writes(communicator: Communicator, layout: str) -> None:
    with make_tpu(communicator, layout) as strategy:
        replica, device = place(strategy)
        n = strategy.num_replicas_in_sync
        with strategy.scope():
            total = mpidist.Variable(np.zeros(2), aggregation="SUM")
            mean = mpidist.Variable(np.zeros(2), aggregation="MEAN")
            first = mpidist.Variable(np.zeros(2))
            count = mpidist.Variable([0, 0], aggregation="SUM")
            table = mpidist.Variable(np.zeros((3, 2)), aggregation="SUM")

        def write() -> None:
            own = replica + 1 if device == 0 else 1000
            total.assign(np.full(2, own))
            mean.assign(np.full(2, own))
            first.assign(np.full(2, communicator.rank))
            count.assign_add([own, 1])
            table.scatter_add(mpidist.IndexedSlices(np.full((1, 2), float(own)), np.array([replica % 3])))

        strategy.run(write)
        assert same(communicator, total.numpy()).tolist() == [n * (n + 1) / 2] * 2
        assert same(communicator, mean.numpy()).tolist() == [(n + 1) / 2] * 2
        assert same(communicator, first.numpy()).tolist() == [0, 0]
        assert same(communicator, count.numpy()).tolist() == [n * (n + 1) / 2, n]
        assert same(communicator, table.numpy()).sum() == n * (n + 1)
        total.assign_add(np.ones(2))
        assert total.numpy().tolist() == [n * (n + 1) / 2 + 1] * 2


def test_copies_that_have_drifted_apart_are_found_under_check(communicator: Communicator) -> None:
    options = CommunicationOptions(check=True)
    with make_tpu(communicator, "private", communication_options=options) as strategy:
        devices = strategy.logical_devices.count
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(3), name="b")
            tile = mpidist.Variable(np.zeros((2, devices)), name="w", partition_dimensions=[1, devices])
            optimizer = SGD(0.1)
        given = [(np.full(3, 1 + 1e-16 * strategy.logical_devices.device), variable), (np.ones((2, 1)), tile)]
        strategy.run(lambda: optimizer.apply_gradients(given))
        for skipped in (False, True):
            strategy.run(lambda s=skipped: optimizer.apply_gradients(given, skip_gradients_aggregation=s))
        # What logical devices give may differ, and that of tiles does.
        factor = 1 + strategy.logical_devices.device
        later, apart = SGD(0.1, gradient_accumulation_steps=2), [(one * factor, held) for one, held in given]
        for skipped in (False, False, True, True):
            strategy.run(lambda s=skipped: later.apply_gradients(apart, skip_gradients_aggregation=s))
        if communicator.size > 1:
            with pytest.raises(MismatchError, match="the value written to variable 'w'"):
                tile.assign(np.full((2, devices), communicator.rank))
            home: Any = strategy.home
            (_, held), *_ = home.variables()
            if communicator.rank == communicator.size - 1:
                held.address.writable[0] += 1
            with pytest.raises(MismatchError, match="'b', first seen"):
                strategy.run(lambda: None)
