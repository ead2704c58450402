"""Learn word vectors from the sources of Python's standard library, in tables on parameter servers.

    mpirun -n 5 python examples/embeddings.py --plot vectors.png
    mpirun -n 6 python examples/embeddings.py --directory run --evaluator

Skip-gram with negative sampling (Mikolov et al., 2013): the vector of a word learns to tell the words around it from
words drawn at random. The last ranks are two servers and, if asked for, the evaluator; a process without a launcher is
all of them. A step moves the rows of the words in its batch and no others, however large the tables are.
"""

from __future__ import annotations

import collections
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import plots

import mpidist

Array = npt.NDArray[Any]
SERVERS, WORDS, SIZE, WINDOW, NEGATIVES, BATCH, STEPS_PER_EPOCH = 2, 5000, 64, 4, 5, 512, 500
PROBES = ("int", "true", "read", "error", "first", "name")


class Corpus:
    """The words of all modules in one list, by number; the most frequent word is number 0."""

    def __init__(self) -> None:
        files = sorted(Path(collections.__file__).parents[1].glob("*.py"))
        found = re.findall("[a-z]{2,}", " ".join(file.read_text(errors="replace").lower() for file in files))
        counts = collections.Counter(found).most_common(WORDS)
        self.words = [word for word, _ in counts]
        numbers = {word: number for number, word in enumerate(self.words)}
        share = np.array([count for _, count in counts]) / len(found)
        self.noise = np.cumsum(share**0.75)
        known = np.array([numbers[word] for word in found if word in numbers])
        # Most occurrences of the most frequent words are left out: they stand beside everything.
        self.text = known[np.random.default_rng(0).random(len(known)) < np.sqrt(1e-3 / share)[known]]

    def batch(self, number: int) -> tuple[Array, Array]:
        """Draw words, and for each one a neighbour followed by words that are none; the same for the same number."""
        random = np.random.default_rng([1, int(number)])
        places = random.integers(WINDOW, len(self.text) - WINDOW, BATCH)
        beside = places + random.choice([d for d in range(-WINDOW, WINDOW + 1) if d], BATCH)
        noise = np.searchsorted(self.noise, random.random((BATCH, NEGATIVES)) * self.noise[-1])
        return self.text[places], np.column_stack([self.text[beside], noise])


@functools.lru_cache
def corpus() -> Corpus:
    """The corpus, which a process reads once."""
    return Corpus()


def neighbours(table: Array) -> list[str]:
    """For each probe a line with the five words whose vectors have the smallest angles with its own."""
    words = corpus().words
    vectors = table / np.linalg.norm(table, axis=1, keepdims=True)
    numbers = [words.index(probe) for probe in PROBES if probe in words]
    order = np.argsort(-vectors[numbers] @ vectors.T, axis=1)[:, 1:6]
    return [f"{words[n]}: {', '.join(words[one] for one in row)}" for n, row in zip(numbers, order, strict=True)]


def plot(path: str, table: Array) -> None:
    """Draw the 120 most frequent words by the two main directions of their vectors."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    vectors = table[:120] / np.linalg.norm(table[:120], axis=1, keepdims=True)
    places = vectors @ np.linalg.eigh(np.cov(vectors.T))[1][:, -2:]
    figure, axes = pyplot.subplots(figsize=(9, 7), constrained_layout=True)
    axes.scatter(*places.T, s=4)
    for place, word in zip(places, corpus().words, strict=False):
        axes.annotate(word, place, fontsize=7)
    figure.savefig(path, dpi=110)
    click.echo(f"wrote {path}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "), context_settings={"max_content_width": 120})
@click.option("--epochs", default=6, show_default=True, type=click.IntRange(1))
@click.option("--directory", type=click.Path(file_okay=False), help="Where checkpoints go, one per epoch.")
@click.option("--evaluator", is_flag=True, help="The last rank evaluates each checkpoint in the directory.")
@click.option("--plot", "plot_path", callback=plots.in_folder, help="Draw the vectors of frequent words.")
def main(epochs: int, directory: str | None, evaluator: bool, plot_path: str | None) -> None:
    if evaluator and not directory:
        raise click.UsageError("--evaluator evaluates checkpoints: give it their --directory, too")
    resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=SERVERS, num_evaluators=int(evaluator))
    # Workers and servers serve inside this constructor: the lines below are the coordinator's and the evaluator's.
    partitioner = mpidist.experimental.partitioners.FixedShardsPartitioner(SERVERS)
    options = mpidist.ServerOptions(heap_bytes=32 << 20)
    strategy = mpidist.ParameterServerStrategy(resolver, variable_partitioner=partitioner, options=options)
    with strategy.scope():
        start = mpidist.initializers.RandomUniform(-0.5 / SIZE, 0.5 / SIZE), mpidist.initializers.Constant(0)
        table, others = (
            mpidist.Variable(one, shape=(WORDS, SIZE), dtype="float32", sparse_gradient=True) for one in start
        )
        loss = mpidist.metrics.Mean()
    if strategy.roles.task_type == "evaluator":
        saved = mpidist.Checkpoint(table=table)
        for path in mpidist.checkpoints_iterator(directory or ".", restore=saved):
            click.echo(f"evaluator: {Path(path).name}, {neighbours(table.numpy())[0]}")
        return
    optimizer = mpidist.optimizers.Adagrad(0.1)
    optimizer.build([table, others])

    def make_batches(context: mpidist.InputContext) -> mpidist.data.Dataset:
        numbers = mpidist.data.Dataset.range(10**9).shard(context.num_input_pipelines, context.input_pipeline_id)
        return numbers.map(lambda number: corpus().batch(number))

    def step(batches: Any) -> None:
        inner, outer = next(batches)
        vectors, beside = mpidist.embedding_lookup(table, inner), mpidist.embedding_lookup(others, outer)
        logits = np.einsum("bd,bkd->bk", vectors, beside)
        signs = np.array([1, *[-1] * NEGATIVES])
        loss.update_state(np.logaddexp(0, -signs * logits).sum(axis=1).mean())
        delta = -signs / (1 + np.exp(signs * logits))
        optimizer.apply_gradients([
            (mpidist.embedding_gradient(table, inner, np.einsum("bk,bkd->bd", delta, beside)), table),
            (mpidist.embedding_gradient(others, outer, delta[..., None] * vectors[:, None]), others),
        ])

    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    checkpoint = mpidist.Checkpoint(table=table, others=others, optimizer=optimizer, batches=batches)
    manager = mpidist.CheckpointManager(checkpoint, directory, max_to_keep=3) if directory else None
    if manager:
        manager.restore_or_initialize()
    with strategy.scope(), mpidist.observe.Progress(epochs * STEPS_PER_EPOCH, description="training") as progress:
        for epoch in range(epochs):
            for _ in range(STEPS_PER_EPOCH):
                coordinator.schedule(step, args=(batches,))
            coordinator.join()
            progress.update(STEPS_PER_EPOCH, loss=float(loss.result()))
            progress.write(f"epoch {epoch + 1}: loss {float(loss.result()):.4f}")
            loss.reset_state()
            if manager:
                manager.save()
    click.echo("\n".join(neighbours(table.numpy())))
    if plot_path:
        plot(plot_path, table.numpy())


if __name__ == "__main__":
    main()
