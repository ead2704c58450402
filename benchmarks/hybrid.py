"""How much accuracy does it cost that groups exchange increments after so many steps, and with which outer optimizer?

    mpirun -n 2 python benchmarks/hybrid.py --plot hybrid.png --json hybrid.json
    mpirun -n 2 python benchmarks/hybrid.py --task embeddings

The digits of scikit-learn, a network with one hidden layer, AdamW in the groups; or the word vectors of
`examples/embeddings.py`, Adagrad, where an answer is right if a word's neighbour is found among five words drawn at
random. Each rank is a group, which sees its share of the examples in batches of its share of the size, so that all runs
see as many examples in as many steps. A seed is that of the split, of the first parameters and of the order. `behind`
is the mean over seeds of what a run lacks to the synchronous run of the same seed, in points, with the standard error
of that mean.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
from measure import SHARE, WORLD, say
from mpi4py import MPI

import mpidist
from mpidist.optimizers import SGD

Array = Any
_BATCH, _TEST = 64, 360
OUTERS: dict[str, Callable[[], mpidist.optimizers.Optimizer]] = {
    "SGD(1.0)": lambda: SGD(1.0),
    "SGD(0.7)": lambda: SGD(0.7),
    "SGD(0.5, 0.5)": lambda: SGD(0.5, 0.5),
    "Nesterov(0.7, 0.6)": lambda: SGD(0.7, 0.6, nesterov=True),
    "Nesterov(0.7, 0.8)": lambda: SGD(0.7, 0.8, nesterov=True),
    "Nesterov(0.7, 0.3)": lambda: SGD(0.7, 0.3, nesterov=True),
    "Nesterov(0.7, 0.9)": lambda: SGD(0.7, 0.9, nesterov=True),
    "Nesterov(0.4, 0.6)": lambda: SGD(0.4, 0.6, nesterov=True),
    "SGD(1.5)": lambda: SGD(1.5),
}


class Network:
    """A hidden layer of rectified linear units, in the current scope."""

    def __init__(self, random: np.random.Generator) -> None:
        self.variables = [
            mpidist.Variable((random.normal(size=(64, 64)) / 8).astype(np.float32)),
            mpidist.Variable(np.zeros(64, np.float32)),
            mpidist.Variable((random.normal(size=(64, 10)) / 8).astype(np.float32)),
            mpidist.Variable(np.zeros(10, np.float32)),
        ]

    def forward(self, x: Array) -> tuple[Array, Array]:
        """The hidden layer, and the logits."""
        first, first_bias, second, second_bias = (variable.value() for variable in self.variables)
        hidden = np.maximum(x @ first + first_bias, 0)
        return hidden, hidden @ second + second_bias

    def gradients(self, x: Array, y: Array, size: int) -> list[Array]:
        """This rank's share of the gradients of a batch of so many examples."""
        hidden, logits = self.forward(x)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        delta = exponentials / exponentials.sum(axis=1, keepdims=True)
        delta[np.arange(len(y)), y] -= 1
        delta /= np.float32(size)
        back = (delta @ self.variables[2].value().T) * (hidden > 0)
        return [x.T @ back, back.sum(axis=0), hidden.T @ delta, delta.sum(axis=0)]


def accuracy(strategy: Any, seed: int, steps: int) -> float:
    """Train, and give the share of the test that is right."""
    is_hybrid = isinstance(strategy, mpidist.HybridStrategy)
    digits = importlib.import_module("sklearn.datasets").load_digits()
    random = np.random.default_rng(seed)
    order = random.permutation(len(digits.target))
    x, y = digits.data[order].astype(np.float32) / 16, digits.target[order]
    size = _BATCH // len(strategy.groups) if is_hybrid else _BATCH
    train = mpidist.data.Dataset.from_tensor_slices((x[_TEST:], y[_TEST:])).shuffle(len(x), seed=seed)
    batches = iter(strategy.experimental_distribute_dataset(train.batch(size).repeat()))
    with strategy.scope():
        network = Network(random)
        optimizer = mpidist.optimizers.AdamW(3e-3)

    def step(x: Array, y: Array) -> None:
        optimizer.apply_gradients(zip(network.gradients(x, y, size), network.variables, strict=True))

    for _ in range(steps):
        strategy.run(step, next(batches))
    if is_hybrid:
        strategy.finish()
    return float((network.forward(x[:_TEST])[1].argmax(axis=1) == y[:_TEST]).mean())


def embedding_accuracy(strategy: Any, seed: int, steps: int) -> float:
    """Train word vectors, and give the share of unseen places whose neighbour is found."""
    examples = str(Path(__file__).resolve().parents[1] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    example = importlib.import_module("embeddings")
    random = np.random.default_rng(seed)
    with strategy.scope():
        start = (random.random((example.WORDS, example.SIZE), np.float32) - np.float32(0.5)) / example.SIZE
        table = mpidist.Variable(start, sparse_gradient=True)
        others = mpidist.Variable(np.zeros_like(start), sparse_gradient=True)
        optimizer = mpidist.optimizers.Adagrad(0.1)
    signs = np.array([1, *[-1] * example.NEGATIVES], np.float32)

    def step(inner: Array, outer: Array) -> None:
        vectors, beside = table.value()[inner], others.value()[outer]
        logits = np.einsum("bd,bkd->bk", vectors, beside)
        delta = -signs / (1 + np.exp(signs * logits))
        toward = np.einsum("bk,bkd->bd", delta, beside), delta[..., None] * vectors[:, None]
        optimizer.apply_gradients([
            (mpidist.IndexedSlices(values.reshape(-1, example.SIZE), rows.reshape(-1)), variable)
            for values, rows, variable in ((toward[0], inner, table), (toward[1], outer, others))
        ])

    is_hybrid = isinstance(strategy, mpidist.HybridStrategy)
    mine = slice(WORLD.rank, None, WORLD.size) if is_hybrid else slice(None)
    for number in range(steps):
        words, beside = example.corpus().batch(1_000_000 * seed + number)
        strategy.run(step, (words[mine], beside[mine]))
    if is_hybrid:
        strategy.finish()
    right = []
    for number in range(20):
        words, beside = example.corpus().batch(1_000_000_000 + number)
        logits = np.einsum("bd,bkd->bk", table.value()[words], others.value()[beside])
        # A word that was drawn may be the neighbour itself.
        right.append(logits[:, 0] >= logits[:, 1:].max(axis=1))
    return float(np.mean(right))


TASKS = {"digits": (accuracy, 480), "embeddings": (embedding_accuracy, 960)}


def make(
    every: int, outer: Callable[[], mpidist.optimizers.Optimizer], *, synchronous: bool = False
) -> mpidist.Strategy:
    """A strategy whose ranks are groups."""
    return mpidist.HybridStrategy(WORLD.size, every, outer(), synchronous=synchronous)


def alone() -> mpidist.Strategy:
    """A strategy of this rank alone."""
    return mpidist.MultiWorkerMirroredStrategy(communicator=MPI.COMM_SELF)


def measured(
    task: str, open_strategy: Callable[[], mpidist.Strategy], seeds: range, reference: list[float] | None = None
) -> dict[str, Any]:
    """Percent of each seed, their mean, and how far it is behind the reference, in points."""
    train, steps = TASKS[task]
    found = []
    # Synchronous training is the same on any number of ranks, up to rounding: each rank makes that of some seeds.
    for seed in seeds if reference is not None else seeds[WORLD.rank :: WORLD.size]:
        with open_strategy() as strategy:
            found.append(100 * train(strategy, seed, max(1, round(steps * SHARE))))
    if reference is None:
        by_rank = WORLD.allgather(found)
        found = [by_rank[place % WORLD.size][place // WORLD.size] for place in range(len(seeds))]
    behind = np.subtract(found if reference is None else reference, found)
    error = float(np.std(behind, ddof=1) / np.sqrt(len(seeds))) if len(seeds) > 1 else 0.0
    return {"percent": found, "mean": float(np.mean(found)), "behind": float(np.mean(behind)), "error": error}


def draw(path: str, figures: dict[str, dict[str, float]], title: str) -> None:
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    names = [*figures]
    axis.errorbar(
        [figures[name]["behind"] for name in names], range(len(names)),
        xerr=[figures[name]["error"] for name in names], fmt="o", capsize=3,
    )
    axis.axvline(0.5, linewidth=0.8, linestyle="--")
    axis.set(yticks=range(len(names)), yticklabels=names, title=title)
    axis.set_xlabel("points behind synchronous training, mean and its standard error")
    axis.invert_yaxis()
    figure.savefig(path, dpi=110)


@click.command(help=__doc__)
@click.option("--task", default="digits", show_default=True, type=click.Choice([*TASKS]))
@click.option("--outer", "outers", multiple=True, type=click.Choice([*OUTERS]), help="Only these.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--every", default=16, show_default=True, type=click.IntRange(1))
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False))
@click.option("--json", "json_path", type=click.Path(dir_okay=False))
def main(
    task: str, outers: tuple[str, ...], seeds: int, first_seed: int, every: int, plot_path: str | None,
    json_path: str | None,
) -> None:
    wanted, steps = range(first_seed, first_seed + seeds), TASKS[task][1]
    figures = {"synchronous training": measured(task, alone, wanted)}
    reference = figures["synchronous training"]["percent"]
    for name in outers or OUTERS:
        figures[name] = measured(task, partial(make, every, OUTERS[name]), wanted, reference)
    for name in outers or ("SGD(1.0)", "Nesterov(0.7, 0.6)", "Nesterov(0.7, 0.8)"):
        figures[f"synchronous=True, {name}"] = measured(
            task, partial(make, every, OUTERS[name], synchronous=True), wanted, reference
        )
    for name, one in figures.items():
        say(f"{name:36} {one['mean']:6.2f} %   {one['behind']:+.2f} ± {one['error']:.2f} points behind")
    facts = {"task": task, "steps": steps, "every": every, "seeds": [*wanted], "groups": WORLD.size}
    measure.record(json_path, {**facts, "figures": figures})
    if WORLD.rank == 0 and plot_path:
        draw(plot_path, figures, f"{task}, {WORLD.size} groups, {steps} steps, every {every}")


if __name__ == "__main__":
    main()
