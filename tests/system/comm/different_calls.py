"""A program whose ranks make two different calls after many equal ones; test_different_calls.py runs it.

A rank that gets a number prints "number", one that saves after that "SAVED".
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

import mpidist
from mpidist.comm.group.opening import open_communicator
from tests.parallel.layouts import make_strategy

KINDS = ("reduce", "all_reduce", "gather", "gather_object", "assign", "step", "result", "create", "reduce_along")
# Of all magnitudes: each has other ways.
SIZES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)


class Call(NamedTuple):
    """What some ranks call.

    Attributes:
        kind: Of `KINDS`.
        size: Of its array.
        dtype: Of its array.
        strategy: The number of its strategy.
        option: Bytes of a pack, of `all_reduce`.
    """

    kind: str
    size: int
    dtype: str
    strategy: int
    option: int


class Plan(NamedTuple):
    """What a program does.

    Attributes:
        layout: Of `tests.parallel.layouts`.
        before: So many good calls come before.
        calls: Of the ranks in `odd`, and of all others.
        odd: Some ranks, and not all.
    """

    layout: str
    before: int
    calls: tuple[Call, Call]
    odd: tuple[int, ...]


def plan_of(seed: int, size: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"pair {seed}")
    layout, before = ("node", "pairs", "each")[(seed + seed // 3) % 3], (0, 20, 1_000)[seed % 3]

    def draw() -> Call:
        magnitude = chance.choice(SIZES)
        count = chance.randint(magnitude // 10 + 1, magnitude)
        return Call(
            chance.choice(KINDS), count, chance.choice(("float32", "float64", "int32", "int64")), chance.randrange(2),
            chance.choice((0, 4096)),
        )

    one, other = draw(), draw()
    # In half of all cases the calls are alike but for one thing.
    if chance.random() < 0.5:
        name = chance.choice(("size", "dtype", "strategy", "kind"))
        changed: dict[str, Any] = {name: 1 - one.strategy if name == "strategy" else getattr(other, name)}
        other = one._replace(**changed)
    odd = tuple(sorted(chance.sample(range(size), chance.randint(1, size - 1))))
    return Plan(layout, before, (one, other), odd)


def signature(call: Call) -> tuple[Any, ...]:
    """What tells a call from another one. The size of gathered rows is free, and objects have none."""
    kind, size, dtype, strategy, option = call
    if kind == "reduce":
        # The same sum of the same ranks, without options.
        kind, option = "all_reduce", 0
    if kind in ("gather", "reduce_along"):
        size = 0
    if kind in ("gather_object", "result", "step", "assign"):
        size, dtype = 0, ""
    return kind, size, dtype, strategy, option if kind == "all_reduce" else 0


class Program:
    """Two strategies, and what they call."""

    def __init__(self, layout: str) -> None:
        self.ranks = open_communicator()
        self.strategies = [make_strategy(self.ranks, layout) for _ in range(2)]
        self.variables, self.metrics, self.optimizers = [], [], []
        for strategy in self.strategies:
            with strategy.scope():
                self.variables.append(mpidist.Variable(np.zeros(5, "float32")))
                self.metrics.append(mpidist.metrics.Mean())
            self.optimizers.append(mpidist.optimizers.SGD(1.0))


def call(program: Program, one: Call) -> object:
    """Make a call. All lines that call the library are here: `main` gives them two names."""
    number, array = one.strategy, np.ones(one.size, one.dtype)
    strategy, variable = program.strategies[number], program.variables[number]
    context: Any = mpidist.get_replica_context
    options = mpidist.experimental.CommunicationOptions(bytes_per_pack=one.option)
    made: dict[str, Callable[[], object]] = {
        "reduce": lambda: strategy.reduce("SUM", array, axis=None),
        "reduce_along": lambda: strategy.reduce("MAX", array, axis=0),
        "all_reduce": lambda: strategy.run(lambda: context().all_reduce("SUM", array, options)),
        "gather": lambda: strategy.gather(array, axis=0),
        "gather_object": lambda: strategy.gather_object(one.size),
        "assign": lambda: variable.assign(np.ones(5)),
        "step": lambda: program.optimizers[number].apply_gradients([(np.ones(5, "float32"), variable)]),
        "result": program.metrics[number].result,
        "create": lambda: mpidist.Variable(array),
    }
    if one.kind == "create":
        with strategy.scope():
            return made["create"]()
    return made[one.kind]()


def main(seed: int, folder: str) -> None:
    """Make all calls."""
    ranks = open_communicator()
    plan = plan_of(seed, ranks.size)
    program = Program(plan.layout)
    small = [Call("reduce", 3, "float64", number, 0) for number in range(2)]
    for number in range(plan.before):
        call(program, small[number % 2])
    # The same lines under two names of files: errors and reports name the line that calls the library.
    is_odd = ranks.rank in plan.odd
    names: dict[str, Any] = {}
    exec(compile(inspect.getsource(call), "one.py" if is_odd else "other.py", "exec"), globals(), names)
    cast(Callable[[Program, Call], object], names["call"])(program, plan.calls[not is_odd])
    print("number", flush=True)
    mpidist.Checkpoint(v=program.variables).write(Path(folder, "checkpoint"))
    print("SAVED", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
