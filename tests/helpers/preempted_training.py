"""A training with parameter servers that says whether each of its updates counts once, in however many lives it ran."""

from __future__ import annotations

# Goes on from `strategy` and `coordinator`. Each step makes one element, and reads the next one of its worker's data.
COUNTED = """
import numpy as np

MOST = 20_000
with strategy.scope():
    made = mpidist.Variable(np.zeros(MOST, "int64"), name="made")
    read = mpidist.Variable(np.zeros(MOST, "int64"), name="read", sparse_gradient=True)

def data(context):
    return mpidist.data.Dataset.range(context.input_pipeline_id, MOST, context.num_input_pipelines)

numbers = iter(coordinator.create_per_worker_dataset(data))
checkpoint = mpidist.Checkpoint(made=made, seen=read, numbers=numbers)

def step(index, numbers):
    update = np.zeros(MOST, "int64")
    update[index] = 1
    made.assign_add(update)
    read.scatter_add(mpidist.IndexedSlices(np.ones(1, "int64"), np.array([next(numbers)]), (MOST,)))

def require_exact(last):
    coordinator.join()
    once, found = np.arange(MOST) < last, read.numpy()
    assert np.array_equal(made.numpy(), once), np.flatnonzero(made.numpy() != once)
    # All workers have read them, each in its order.
    workers = len(strategy.cluster_resolver.cluster_spec().as_dict()["worker"])
    assert (found.sum(), found.max()) == (last, 1), (found.sum(), found.max(), last)
    assert all(np.all(np.diff(found[one::workers]) <= 0) for one in range(workers))
    print("exact after", last, flush=True)
"""
