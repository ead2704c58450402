"""What does a timeline (`MPIDIST_TRACE`) cost a training: of a step, how much?

Two strategies in one job take turns with the step of `examples/train.py`, 64 digits for all ranks; one of them is
traced. Their times differ by what the timeline costs and by chance, so that is also added up where it arises: the
processor's time in noting the calls of a step, with the writing of lines, less that of what is noted without a
timeline.

mpirun -n 2 python benchmarks/tracing.py --json tracing.json
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
from measure import WORLD, say

import mpidist
from mpidist.observe.trace import TRACE
from mpidist.recorder.calls import PLACE_WORDS, Calls, new_words
from mpidist.recorder.recorder import RECORDER

BATCH, IMAGES = 64, 1437


class NotedTime:
    """The processor's time of a thread in the methods of the traced calls, and how often they were left."""

    def __init__(self, kind: type[Calls]) -> None:
        self.nanoseconds = self.calls = 0
        for name in ("enter", "note_inner", "leave"):
            setattr(kind, name, self._timed(getattr(kind, name), name == "leave"))

    def _timed(self, method: Callable[..., None], is_last: bool) -> Callable[..., None]:
        def timed(*words: Any, **named: Any) -> None:
            begin = time.thread_time_ns()
            method(*words, **named)
            self.nanoseconds += time.thread_time_ns() - begin
            self.calls += is_last

        return timed


def microseconds_plain(calls: int = 20_000) -> float:
    """What noting a call takes without a timeline."""
    plain = Calls(5, (0,), 0, new_words(PLACE_WORDS))
    begin = time.thread_time_ns()
    for _ in range(calls):
        plain.enter("all_reduce")
        plain.leave()
    return (time.thread_time_ns() - begin) / calls / 1e3


def make_step(folder: Path | None) -> Callable[[], object]:
    """The step of a training of its own, traced into a folder or not."""
    digits = importlib.import_module("digits")
    TRACE.folder = folder
    strategy = mpidist.MultiWorkerMirroredStrategy(communicator=WORLD.Dup())
    random = np.random.default_rng(0)
    x = random.random((IMAGES, 64)).astype(np.float32)
    dataset = mpidist.data.Dataset.from_tensor_slices((x, random.integers(0, 10, IMAGES)))
    dataset = dataset.shuffle(IMAGES, seed=1).batch(BATCH, drop_remainder=True).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        network = digits.Network([64, 256, 128, 10], 0)
        optimizer = mpidist.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    gradients = optimizer.gradients(network.variables)

    def train_step(x: Any, y: Any) -> Any:
        losses = network.losses_and_gradients(x, y, BATCH, gradients)
        optimizer.apply_gradients(zip(gradients, network.variables, strict=True))
        return losses

    def step() -> object:
        return strategy.reduce("MEAN", strategy.run(train_step, args=next(batches)), axis=0)

    # It opens communicators, and builds the plan.
    step()
    return step


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--rounds", default=40, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=50, show_default=True, type=click.IntRange(1), help="In a round of each.")
@click.option("--json", "json_path", help="Write the figures.")
def main(rounds: int, steps: int, json_path: str | None) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, traced = make_step(None), make_step(folder)

        def repeat(step: Callable[[], object]) -> None:
            for _ in range(steps):
                step()

        times = measure.interleaved({"plain": lambda: repeat(plain), "traced": lambda: repeat(traced)}, rounds)
        step_ms = {what: {kind: time / steps for kind, time in one.items()} for what, one in times.items()}
        # After the turns, so that these are not measured with it.
        noted = NotedTime(next(type(one) for one in RECORDER.opened() if type(one) is not Calls))
        repeat(traced)
        each = []
        for _ in range(rounds):
            noted.nanoseconds = noted.calls = 0
            repeat(traced)
            each.append(noted.nanoseconds / steps / 1e3)
        calls = noted.calls / steps
        TRACE.write()
        lines = (folder / f"rank-{WORLD.rank}.jsonl").read_text().count("\n")
        # Nothing is left to write at the end, in a folder that is gone.
        TRACE.folder = None
    bare = microseconds_plain()
    more = max(WORLD.allgather(statistics.median(each) - calls * bare))
    shares = {kind: more / 1e3 / step_ms["plain"][kind] for kind in ("min", "median")}
    say(f"{WORLD.size} ranks; a step without a timeline takes {step_ms['plain']['median']:.3f} ms (median)")
    say(f"with one, in turns: {step_ms['traced']['median'] / step_ms['plain']['median'] - 1:+.1%}")
    say(f"{calls:.1f} calls of a step are noted, in {more:.1f} us: {shares['median']:.2%} of it "
        f"({shares['min']:.2%} of the fastest)")
    measure.record(json_path, {
        "step_ms": step_ms, "calls_per_step": calls, "noting_us_per_step": more, "noting_us_without": bare,
        "share": shares, "lines": lines,
    })


if __name__ == "__main__":
    main()
