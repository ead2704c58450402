"""The blocks of TensorFlow's tutorial "Distributed Input"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.arithmetic.slices import even_sizes
from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi

GLOBAL_BATCH_SIZE = 16


def train_step(inputs: Any) -> Any:
    features, labels = inputs
    return labels - 0.3 * features


def hundred() -> mpidist.data.Dataset:
    return mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(GLOBAL_BATCH_SIZE)


def test_a_plain_dataset_and_the_same_one_distributed(communicator: Communicator) -> None:
    whole = [train_step(inputs) for inputs in hundred()]
    assert [len(one) for one in whole] == [16] * 6 + [4]
    assert {float(value) for one in whole for value in one[:, 0]} == {np.float32(0.7)}

    mirrored_strategy = mpidist.MirroredStrategy()
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(hundred())
    features, labels = next(iter(dist_dataset))
    assert features.shape == labels.shape == (even_sizes(16, communicator.size)[communicator.rank], 1)

    losses = []
    for x in dist_dataset:
        # train_step trains the model using the dataset elements
        losses.append(mirrored_strategy.run(train_step, args=(x,)))
    of_all = [mirrored_strategy.gather(loss, axis=0) for loss in losses]
    assert [one.tolist() for one in of_all] == [one.tolist() for one in whole]


def test_a_policy_of_the_options(communicator: Communicator) -> None:
    dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
    options = mpidist.data.Options()
    options.experimental_distribute.auto_shard_policy = mpidist.data.AutoShardPolicy.DATA
    dataset = dataset.with_options(options)
    batches = list(mpidist.MirroredStrategy().experimental_distribute_dataset(dataset))
    assert [len(features) for features, _ in batches] == [even_sizes(16, communicator.size)[communicator.rank]] * 4


def test_the_dataset_function_of_the_tutorial(communicator: Communicator) -> None:
    mirrored_strategy = mpidist.MirroredStrategy()
    global_batch_size = 4 * communicator.size

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = mpidist.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
        dataset = dataset.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id)
        dataset = dataset.batch(batch_size)
        return dataset.prefetch(2)  # This prefetches 2 batches per device.

    shapes = [x.shape for x, _ in mirrored_strategy.distribute_datasets_from_function(dataset_fn)]
    # It batches twice: four batches of 16, shared out, and then four of these in one.
    mine = len(range(communicator.rank, 4, communicator.size))
    assert shapes == [(mine, 16, 1)]


def test_steps_of_an_iterator() -> None:
    num_epochs = 10
    steps_per_epoch = 5
    mirrored_strategy = mpidist.MirroredStrategy()
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(hundred())
    losses = []
    for _ in range(num_epochs):
        dist_iterator = iter(dist_dataset)
        for _ in range(steps_per_epoch):
            losses.append(mirrored_strategy.run(train_step, args=(next(dist_iterator),)))
    dist_iterator = iter(dist_dataset)
    loss = mirrored_strategy.run(train_step, args=(dist_iterator.get_next(),))
    assert all(np.array_equal(one, loss) for one in losses)


def test_the_end_without_an_exception(communicator: Communicator) -> None:
    global_batch_size = 4
    steps_per_loop = 5
    strategy = mpidist.MirroredStrategy()

    dataset = mpidist.data.Dataset.range(9).batch(global_batch_size)
    distributed_iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def train_fn(distributed_iterator: Any) -> list[Any]:
        seen = []
        for _ in range(steps_per_loop):
            optional_data = distributed_iterator.get_next_as_optional()
            if not optional_data.has_value():
                break
            per_replica_results = strategy.run(lambda x: x, args=(optional_data.get_value(),))
            seen.append(strategy.experimental_local_results(per_replica_results))
        return seen

    seen = train_fn(distributed_iterator)
    whole = [strategy.gather(x, axis=0).tolist() for (x,) in seen]
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_the_spec_of_an_element() -> None:
    mirrored_strategy = mpidist.MirroredStrategy()
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(hundred())
    # For `@tf.function(input_signature=[dist_dataset.element_spec])`, which is dropped.
    features, labels = dist_dataset.element_spec
    assert features == labels == mpidist.data.ArraySpec((None, 1), np.dtype(np.float32))

    def step(per_replica_inputs: Any) -> Any:
        def step_fn(inputs: Any) -> Any:
            return 2 * inputs[0]

        return mirrored_strategy.run(step_fn, args=(per_replica_inputs,))

    output = step(next(iter(dist_dataset)))
    assert (output == 2).all()


def test_words_are_looked_up_in_a_map(communicator: Communicator) -> None:
    strategy = mpidist.MirroredStrategy()
    vocab = ["a", "b", "c", "d", "f"]
    lookup = {word: number for number, word in enumerate(vocab, start=1)}
    # Keras's StringLookup: words that are not in the vocabulary are 0.
    layer = np.vectorize(lambda word: lookup.get(word, 0))

    def dataset_fn(input_context: mpidist.InputContext) -> mpidist.data.Dataset:
        # a tf.data.Dataset
        dataset = mpidist.data.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
        # Custom your batching, sharding, prefetching, etc.
        global_batch_size = 4 * communicator.size
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        dataset = dataset.batch(batch_size)
        dataset = dataset.shard(
            input_context.num_input_pipelines,
            input_context.input_pipeline_id)

        def preprocess_with_kpl(input: Any) -> Any:  # noqa: A002
            return layer(input)

        return dataset.map(preprocess_with_kpl)

    distributed_dataset_iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    numbers = [next(distributed_dataset_iterator).tolist() for _ in range(3)]
    batches = [[1, 3, 0, 1], [3, 0, 1, 3], [0, 1, 3, 0]]
    assert numbers == [batches[(communicator.rank + step * communicator.size) % 3] for step in range(3)]


def test_predictions_in_the_order_of_the_examples() -> None:
    mirrored_strategy = mpidist.MirroredStrategy()
    dataset_size = 24
    batch_size = 6
    dataset = mpidist.data.Dataset.range(dataset_size).enumerate().batch(batch_size)
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)

    def predict(index: Any, inputs: Any) -> Any:
        outputs = 2 * inputs
        return index, outputs

    result: dict[int, int] = {}
    for index, inputs in dist_dataset:
        output_index, outputs = mirrored_strategy.run(predict, args=(index, inputs))
        indices = list(mirrored_strategy.experimental_local_results(output_index))
        rindices: list[int] = []
        for a in indices:
            rindices.extend(a)
        routputs: list[int] = []
        for a in mirrored_strategy.experimental_local_results(outputs):
            routputs.extend(a)
        for i, value in zip(rindices, routputs, strict=True):
            result[int(i)] = int(value)
    # A rank has the predictions of its own examples.
    parts = mirrored_strategy.gather_object(result)
    assert sorted(pair for part in parts for pair in part.items()) == [(i, 2 * i) for i in range(dataset_size)]


def test_values_from_a_function(communicator: Communicator) -> None:
    mirrored_strategy = mpidist.MirroredStrategy()

    def value_fn(ctx: Any) -> Any:
        return np.asarray(ctx.replica_id_in_sync_group)

    distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
    for _ in range(4):
        result = mirrored_strategy.run(lambda x: x, args=(distributed_values,))
        assert result == communicator.rank


def test_a_generator_with_types_and_shapes() -> None:
    mirrored_strategy = mpidist.MirroredStrategy()

    def input_gen() -> Iterator[Any]:
        random = np.random.default_rng(0)
        while True:
            yield random.random(4)

    # use Dataset.from_generator
    dataset = mpidist.data.Dataset.from_generator(
        input_gen, output_types=(np.float32), output_shapes=[4])
    dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
    iterator = iter(dist_dataset)
    expected = np.random.default_rng(0).random((4, 4)).astype(np.float32)
    for step in range(4):
        result = mirrored_strategy.run(lambda x: x, args=(next(iterator),))
        # An element is a global batch: its four rows are shared out.
        assert mirrored_strategy.gather(result, axis=0).tolist() == expected[step].tolist()
