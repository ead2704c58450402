"""A program of random calls from a seed, with one mischief at a random moment; test_random_calls.py runs it.

Every call checks its result against plain NumPy: the arrays of all ranks come from the seed. A rank whose results were
right to the end prints "right", and one whose result was wrong "WRONG".
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

import mpidist
from mpidist.arrays import AnyArray
from tests.helpers.waiting import let_pass

OPS: dict[str, Callable[..., Any]] = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}
SHAPES = [(), (0,), (0, 3), (1,), (7,), (3, 5), (1000,), (200_000,)]
# Mischief in a call, around it, and from outside.
TWISTS = ["shape", "dtype", "op"]
INSIDE = ["left out", "twice", "raise", "raise and go on", "raise in run", "handler", "exit 0", "_exit 3", "thread"]
OUTSIDE = ["SIGINT", "SIGINT twice", "SIGTERM", "SIGKILL", "SIGSTOP", "SIGSTOP and SIGCONT"]


class Plan(NamedTuple):
    """What a program does.

    Attributes:
        mischief: Of `TWISTS`, `INSIDE` or `OUTSIDE`; empty for none.
        ranks: That do it, or that it is done to.
        length: Number of calls.
        moment: The call in which the mischief is done.
        delay: Seconds from the start to a signal.
        catches: What the program does after an exception: "" (it ends), "save" or "go on".
    """

    mischief: str
    ranks: tuple[int, ...]
    length: int
    moment: int
    delay: float
    catches: str


def plan_of(seed: int, size: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"plan {seed}")
    # Neighbouring seeds take all kinds of mischief in turn.
    kinds = ["", *TWISTS, *INSIDE, *OUTSIDE]
    mischief = kinds[seed % len(kinds)]
    length = chance.randrange(10, 60)
    one = (chance.randrange(size),)
    # Where all ranks are stopped, nobody is left to say so.
    is_one = chance.random() < 0.7 or mischief == "SIGSTOP"
    return Plan(
        mischief, one if is_one else tuple(range(size)), length, chance.randrange(length),
        chance.uniform(0, 1), chance.choice(["", "", "save", "go on"]),
    )


class WrongError(BaseException):
    """A result is wrong. No `except Exception` takes it for an error of the library."""


def same(got: Any, expected: Any, what: str) -> None:
    """Raise if a result is wrong."""
    try:
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-6, err_msg=what)
    except AssertionError as error:
        raise WrongError(str(error)) from None


class State:
    """What a program has, and a NumPy model of it."""

    def __init__(self, strategy: mpidist.Strategy) -> None:
        with strategy.scope():
            self.trained = [mpidist.Variable(np.zeros(size, "float32"), name=f"t{size}") for size in (3, 50_000)]
            # Neighbouring calls use different ones.
            self.means = [mpidist.metrics.Mean() for _ in range(3)]
        self.optimizer = mpidist.optimizers.SGD(0.5, gradient_accumulation_steps=2, clipvalue=1.5)
        self.optimizer.build(self.trained)
        self.weights = [np.zeros(size, "float32") for size in (3, 50_000)]
        self.waiting: list[list[AnyArray]] = []
        self.seen: list[list[float]] = [[], [], []]
        self.others: list[tuple[Any, AnyArray]] = []
        self.saved: tuple[str, list[AnyArray], list[list[AnyArray]]] | None = None


class Program:
    """The calls of one rank. Those of one number are the same on all ranks, but for the mischief."""

    def __init__(self, seed: int, folder: str) -> None:
        self.strategy = mpidist.MultiWorkerMirroredStrategy()
        self.rank, self.size = self.strategy.communicator.rank, self.strategy.num_replicas_in_sync
        self.seed, self.folder = seed, folder
        self.state = State(self.strategy)
        self.number = 0
        # How this call is to differ.
        self.twist = ""
        self.raises = False
        self.calls: list[Callable[[random.Random], None]] = [
            self.reduce, self.reduce, self.gather, self.replica_reduce, self.replica_gather, self.create, self.assign,
            self.drop, self.train, self.train, self.train, self.measure, self.save, self.restore, self.read,
            self.reduce_async, self.broadcast, self.gather_objects, self.another_strategy,
        ]

    def call(self, number: int, twist: str = "") -> None:
        """Make one call."""
        chance = random.Random(f"{self.seed} {number}")
        self.number, self.twist = number, twist
        chance.choice(self.calls)(chance)
        if chance.random() < 0.3:
            let_pass(0.03)

    @property
    def ones(self) -> tuple[int, ...]:
        """The last sizes of this call's arrays, so that it looks unlike its neighbours.

        Where a rank makes one call more or less than the others, calls that look alike are one for them.
        """
        return (1,) * (self.number % 3)

    def shape(self, chance: random.Random, shapes: list[tuple[int, ...]] = SHAPES) -> tuple[int, ...]:
        """A shape."""
        return (*chance.choice(shapes), *self.ones)

    def part(self, rank: int, shape: tuple[int, ...], which: int = 0) -> AnyArray:
        """The array of a rank."""
        return np.random.default_rng([self.seed, self.number, rank, which]).integers(-3, 4, shape).astype("float32")

    def parts(self, shape: tuple[int, ...], which: int = 0) -> list[AnyArray]:
        """The arrays of all ranks."""
        return [self.part(rank, shape, which) for rank in range(self.size)]

    def mine(self, parts: list[AnyArray]) -> AnyArray:
        """This rank's array, twisted if this call is to differ."""
        array = parts[self.rank]
        if self.twist == "shape":
            return np.ones((*array.shape, 2), array.dtype)
        return array.astype("float64") if self.twist == "dtype" else array

    def op(self, chance: random.Random) -> str:
        """An operation."""
        name = chance.choice(sorted(OPS))
        return {"SUM": "MAX", "MAX": "SUM", "MIN": "MEAN", "MEAN": "MIN"}[name] if self.twist == "op" else name

    def check_reduced(self, got: Any, op: str, parts: list[AnyArray], what: str) -> None:
        """Check a reduction. A twist that all ranks share gives another result, which is right, too."""
        if self.twist == "shape":
            parts = [np.ones((*part.shape, 2)) for part in parts]
        same(got, OPS[op](np.stack(parts), axis=0), f"{what} {op} in call {self.number}")

    def reduce(self, chance: random.Random) -> None:
        """Reduce a nest."""
        op, shapes = self.op(chance), [self.shape(chance) for _ in range(chance.choice([1, 1, 3]))]
        parts = [self.parts(shape, which) for which, shape in enumerate(shapes)]
        got = self.strategy.reduce(op, [self.mine(one) for one in parts], axis=None)
        for one, each in zip(got, parts, strict=True):
            self.check_reduced(one, op, each, "reduce")

    def gather(self, chance: random.Random) -> None:
        """Gather rows, of another number on each rank."""
        # As wide as no other call, so that two of them do not look alike.
        rows, columns = chance.randrange(0, 3), 1 + self.number
        parts = [self.part(rank, ((rows + rank) % 3, columns)) for rank in range(self.size)]
        if self.twist == "op":
            self.strategy.reduce("SUM", 1.0, axis=None)
        got = self.strategy.gather(self.mine(parts), axis=0)
        if self.twist != "shape":
            same(got, np.concatenate(parts), f"gather in call {self.number}")

    def replica_reduce(self, chance: random.Random) -> None:
        """Reduce inside `run`."""
        op, shape = self.op(chance), self.shape(chance)
        parts = self.parts(shape)

        def replica() -> Any:
            first = replica_context().all_reduce(op, self.mine(parts))
            if self.raises:
                raise ArithmeticError("raised in a function of run")
            replica_context().all_reduce("SUM", np.ones(3))
            return first

        self.check_reduced(self.strategy.run(replica), op, parts, "all_reduce")

    def replica_gather(self, chance: random.Random) -> None:
        """Gather inside `run`."""
        # As wide as no other call, so that two of them do not look alike.
        parts = self.parts((chance.randrange(0, 4), 1 + self.number))

        def replica() -> Any:
            if self.raises:
                raise ArithmeticError("raised in a function of run")
            return replica_context().all_gather(self.mine(parts), axis=0)

        got = self.strategy.run(replica)
        if self.twist != "shape":
            same(got, np.concatenate(parts), f"all_gather in call {self.number}")

    def create(self, chance: random.Random) -> None:
        """Create a variable."""
        parts = self.parts(chance.choice(SHAPES))
        with self.strategy.scope():
            variable = mpidist.Variable(self.mine(parts))
        expected = variable.numpy() if self.twist == "shape" else parts[0]
        same(variable.numpy(), expected, f"create in call {self.number}")
        self.state.others.append((variable, np.array(expected)))

    def assign(self, chance: random.Random) -> None:
        """Assign to a variable."""
        if not self.state.others:
            return
        number = chance.randrange(len(self.state.others))
        variable, before = self.state.others[number]
        value = self.part(0, before.shape)
        # Neighbouring calls, also of the same variable, do different things; see `ones`.
        way = (self.number + (self.twist == "op")) % 3
        (variable.assign, variable.assign_add, variable.assign_sub)[way](value)
        value = variable.numpy() if self.twist == "op" else (value, before + value, before - value)[way]
        same(variable.numpy(), value, f"assign in call {self.number}")
        self.state.others[number] = variable, np.array(value)

    def drop(self, chance: random.Random) -> None:
        """Drop a variable."""
        if self.state.others:
            self.state.others.pop(chance.randrange(len(self.state.others)))

    def train(self, _: random.Random) -> None:
        """Apply gradients, which are accumulated and clipped."""
        state = self.state
        parts = [self.parts(value.shape, which) for which, value in enumerate(state.weights)]
        gradients = [one[self.rank] for one in parts]
        if self.twist == "shape":
            pairs = list(zip(gradients, state.trained, strict=True))[1:]
        else:
            pairs = list(zip(gradients, state.trained, strict=True))
        # Its own rate tells this call from its neighbours.
        rate = (1 + self.number % 3) / 4
        state.optimizer.learning_rate = rate
        state.optimizer.apply_gradients(pairs)
        if self.twist == "shape":
            raise ArithmeticError("gradients were left out")
        state.waiting.append([np.sum(one, axis=0) for one in parts])
        if len(state.waiting) == 2:
            for weight, first, second in zip(state.weights, *state.waiting, strict=True):
                np.subtract(weight, rate * np.clip((first + second) / 2, -1.5, 1.5), out=weight)
            state.waiting = []
        self.check_weights("train")

    def check_weights(self, what: str) -> None:
        """Check the trained variables."""
        for variable, weight in zip(self.state.trained, self.state.weights, strict=True):
            same(variable.numpy(), weight, f"{what} in call {self.number}")

    def measure(self, chance: random.Random) -> None:
        """Update a metric, and take its result."""
        state = self.state
        values = [float(chance.randrange(9)) for _ in range(self.size)]
        mean, seen = state.means[self.number % 3], state.seen[self.number % 3]
        mean.update_state(values[self.rank])
        seen += values
        same(mean.result(), np.mean(seen), f"metric in call {self.number}")
        if chance.random() < 0.2:
            mean.reset_state()
            seen.clear()

    def checkpoint(self) -> mpidist.Checkpoint:
        """A checkpoint of what is trained."""
        first, second = self.state.trained
        return mpidist.Checkpoint(first=first, second=second, optimizer=self.state.optimizer)

    def save(self, _: random.Random) -> None:
        """Save a checkpoint."""
        path = self.checkpoint().save(f"{self.folder}/ck")
        copies = [weight.copy() for weight in self.state.weights], [list(one) for one in self.state.waiting]
        self.state.saved = str(path), *copies

    def restore(self, _: random.Random) -> None:
        """Restore the last checkpoint."""
        state = self.state
        if state.saved is not None:
            self.checkpoint().restore(state.saved[0])
            state.weights = [weight.copy() for weight in state.saved[1]]
            state.waiting = [list(one) for one in state.saved[2]]
        self.check_weights("restore")

    def read(self, chance: random.Random) -> None:
        """Read a distributed dataset, whose length is known or not."""
        rows, batch = chance.randrange(1, 9), chance.randrange(1, 5)
        data, expected = mpidist.data.Dataset.range(rows), list(range(rows))
        if chance.random() < 0.5:
            data, expected = data.filter(lambda number: number % 3 != 1), [n for n in expected if n % 3 != 1]
        got: list[int] = []
        for piece in self.strategy.experimental_distribute_dataset(data.batch(batch)):
            got += self.strategy.gather(np.reshape(piece, (-1, *self.ones)), axis=0).reshape(-1).tolist()
        same(got, expected, f"dataset in call {self.number}")

    def reduce_async(self, chance: random.Random) -> None:
        """Reduce behind another call."""
        parts = [self.parts(self.shape(chance, SHAPES[3:]), which) for which in range(2)]
        op = self.op(chance)
        handles = [
            self.strategy.extended.all_reduce_async(op, np.array(self.mine(one)), in_place=False) for one in parts
        ]
        same(self.strategy.reduce("SUM", 1.0, axis=None), self.size, f"reduce in call {self.number}")
        for handle, one in zip(handles, parts, strict=True):
            self.check_reduced(handle.wait(), op, one, "all_reduce_async")

    def broadcast(self, chance: random.Random) -> None:
        """Broadcast, or reduce where the call is to differ."""
        parts = self.parts(self.shape(chance))
        if self.twist == "op":
            self.check_reduced(self.strategy.reduce("SUM", parts[self.rank], axis=None), "SUM", parts, "reduce")
            return
        got = self.strategy.extended.broadcast_to(self.mine(parts))
        if self.twist != "shape":
            same(got, parts[0], f"broadcast in call {self.number}")

    def gather_objects(self, _: random.Random) -> None:
        """Gather objects."""
        got = self.strategy.gather_object((self.rank, self.number))
        # Ranks that are one call apart may be in two calls of this kind, and get right what the others gave.
        is_apart = plan_of(self.seed, self.size).mischief in ("left out", "twice")
        numbers = {number for _, number in got}
        if [rank for rank, _ in got] != list(range(self.size)) or (numbers != {self.number} and not is_apart):
            raise WrongError(f"gather_object in call {self.number}: {got}")

    def another_strategy(self, _: random.Random) -> None:
        """Make a strategy, use and close it."""
        parts = self.parts((5, *self.ones))
        with mpidist.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                variable = mpidist.Variable(parts[0])
            got = strategy.reduce("SUM", self.mine(parts), axis=None)
            same(variable.numpy(), parts[0], f"variable of another strategy in call {self.number}")
        self.check_reduced(got, "SUM", parts, "another strategy")

    def finish(self) -> None:
        """Compare the end: numbers of calls, and all values."""
        for got, expected in self.state.others:
            same(got.numpy(), expected, "a variable at the end")
        self.check_weights("the end")
        self.number = 1000
        self.gather_objects(random.Random(0))
        values = [variable.numpy().tobytes() for variable in self.state.trained]
        if len({tuple(one) for one in self.strategy.gather_object(values)}) != 1:
            raise WrongError("ranks have other values at the end")


def replica_context() -> mpidist.ReplicaContext:
    """The replica context that there is inside `run`."""
    context = mpidist.get_replica_context()
    assert context is not None
    return context


def raise_in_handler(_: int, __: object) -> NoReturn:
    """Handle a signal."""
    raise ArithmeticError("raised by a handler of the program's own")


def make_mischief(program: Program, plan: Plan, number: int) -> None:
    """Make the call in which the mischief is done."""
    kind = plan.mischief
    if kind in TWISTS:
        program.call(number, kind)
    elif kind == "left out":
        pass
    elif kind == "twice":
        program.call(number)
        program.call(number)
    elif kind.startswith("raise"):
        if kind != "raise in run":
            raise ArithmeticError("raised between two calls")
        program.raises = True
        program.call(number)
        program.raises = False
    elif kind == "handler":
        signal.signal(signal.SIGALRM, raise_in_handler)
        signal.setitimer(signal.ITIMER_REAL, plan.delay / 10)
        program.call(number)
    elif kind == "exit 0":
        print("left", flush=True)
        sys.exit(0)
    elif kind == "_exit 3":
        os._exit(3)
    else:
        thread = threading.Thread(target=lambda: [program.strategy.reduce("SUM", 1.0, axis=None) for _ in range(5)])
        thread.start()
        program.call(number)
        thread.join()


def main(seed: int, folder: str) -> None:
    """Make all calls."""
    program = Program(seed, folder)
    plan = plan_of(seed, program.size)
    Path(folder, f"pid.{program.rank}").write_text(str(os.getpid()))
    number = 0
    while number < plan.length:
        try:
            if plan.mischief in (*TWISTS, *INSIDE) and number == plan.moment and program.rank in plan.ranks:
                make_mischief(program, plan, number)
            else:
                program.call(number)
        except (Exception, KeyboardInterrupt) as error:
            if not plan.catches and plan.mischief != "raise and go on":
                raise
            print(f"caught {type(error).__name__}: {error}"[:300], flush=True)
            program.raises = False
            if plan.catches == "save":
                program.checkpoint().save(f"{folder}/caught")
            # What was in the middle is not known to the model: everything is new.
            program.state = State(program.strategy)
        number += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    program.finish()
    print("right", flush=True)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except WrongError as error:
        print(f"WRONG: {error}", flush=True)
        raise
