"""Programs of one job that learn from one another's samples: the example in C, and what senders may do wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import find_mpirun, finish, is_open_mpi, launch_environment, run_program, start_command
from tests.helpers.markdown import ROOT

pytestmark = pytest.mark.timeout_seconds(120)

EXAMPLE = ROOT / "examples" / "coupled"


def test_a_simulation_in_c_and_a_program_that_learns(tmp_path: Path) -> None:
    mpirun = find_mpirun()
    compiler = Path(mpirun).with_name("mpicc")
    if not compiler.exists() or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip(f"there is no C compiler, or no mpicc beside {mpirun}")
    simulate = tmp_path / "simulate"
    subprocess.run(
        [compiler, "-Wall", "-Werror", EXAMPLE / "simulate.c", "-o", simulate, "-lm"],
        env=launch_environment(), check=True, timeout=60,
    )
    options = ["--oversubscribe"] if is_open_mpi(mpirun) else []
    command = [mpirun, *options, "-n", "3", str(simulate), "200", ":", "-n", "2", sys.executable]
    command += [str(EXAMPLE / "learn.py"), "--batch", "10", "--plot", str(tmp_path / "a.png")]
    result = finish(start_command(command), "the job", 100)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    # One rank has the samples of two simulations, the other one those of one.
    assert "600 samples of 3 ranks on 2 ranks" in text, text
    first, last = re.findall(r"([0-9.]+) at (?:first|last)", text)
    assert float(first) > 0.5, text
    assert float(last) < 0.1, text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


BEGIN = """
import numpy as np
from mpi4py import MPI
import mpidist, mpidist.errors
world = MPI.COMM_WORLD
rank = world.rank
Dataset = mpidist.data.Dataset

def send(data, to=0, tag=0):
    world.Ssend([np.frombuffer(data, "u1"), MPI.BYTE], to, tag)

def fails(what, read):
    try:
        read()
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}", flush=True)
    else:
        print(f"{what}: no error", flush=True)
"""

# Each with a tag of its own: what rank 1 sends, and what rank 0 says.
WRONG = {
    "no header": ([b"\x00\x01\x02\xff" * 8], r'ValueError: from_ranks: the first message of rank 1 must be a header'),
    "unknown dtype": ([b"real4 3"], r"must be a header, .*got 'real4 3'"),
    "object": ([b"object 3"], "object is no dtype of numbers"),
    "no size": ([b"float32 0"], r"the sizes \(0,\) must be 1 or more"),
    "words": ([b"float32 x"], "must be a header, .*invalid literal"),
    "long header": ([b"float32 1" * 1000], "expected from rank 1 a text .*at most 4096 bytes, got 9000 bytes after 0"),
    "short sample": (
        [b"float32 4; int64", bytes(24), bytes(20)],
        'expected from rank 1 a sample of the header "float32 4; int64", 24 bytes without gaps.*got 20 bytes after 1',
    ),
    "long sample": ([b"float32 4; int64", bytes(32)], "24 bytes without gaps.*got 32 bytes after 0 samples"),
    "after the end": ([b"int8", b"", b"a"], "expected nothing from rank 1 after its empty message"),
}

ERRORS = BEGIN + """
import sys
from tests.system.data.test_coupled import WRONG
for tag, (what, (messages, _)) in enumerate(WRONG.items(), 1):
    if rank == 1:
        requests = [world.Isend([np.frombuffer(one, "u1"), MPI.BYTE], 0, tag) for one in messages]
        world.barrier()
        world.barrier()
        # What nobody takes stays with MPI: the job ends in `os._exit`.
    else:
        # All have been sent: what comes behind the end is there before the end is read.
        world.barrier()
        fails(what, lambda: list(Dataset.from_ranks([1], tag=tag)))
        world.barrier()
if rank == 0:
    fails("itself", lambda: Dataset.from_ranks([0], tag=50))
    fails("too large", lambda: Dataset.from_ranks([2], tag=50))
    fails("twice", lambda: Dataset.from_ranks([1, 1], tag=50))
    fails("a tag again", lambda: Dataset.from_ranks([1], tag=1))
    fails("communicator", lambda: Dataset.from_ranks([1], 3, tag=50))
    read_once = Dataset.from_ranks([1], tag=51)
    print("sum", sum(int(x) for x in read_once), flush=True)
    fails("second pass", lambda: list(read_once))
    fails("thread", lambda: list(Dataset.from_ranks([1], tag=52).prefetch(1)))
else:
    send(b"int64\\0", tag=51)
    for number in range(10):
        send(np.int64(number).tobytes(), tag=51)
    send(b"", tag=51)
world.barrier()
import os
sys.stdout.flush()
os._exit(0)
"""


def test_messages_that_are_no_samples_are_errors(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ERRORS)
    result = run_program(2, program)
    text = result.stdout
    assert "thread: " in text, text + result.stderr
    for what, (_, expected) in WRONG.items():
        said = re.search(rf"{what}: (.*)", text)
        assert said, (what, text)
        assert re.search(expected, said[1]), (expected, said[1])
    for what, expected in {
        "itself": r"must be different ranks of 0 to 1 without 0, which is this rank itself, got \[0\]",
        "too large": r"got \[2\]", "twice": r"got \[1, 1\]",
        "a tag again": "rank 1 sends its samples with the tag 1 to another dataset",
        "communicator": "TypeError: from_ranks: `communicator` must be an mpi4py intracommunicator, got 3",
        "second pass": "RuntimeError: .* got a second pass. Keep them with cache",
        "thread": "RuntimeError: .*expected to be read by the thread that has made the dataset",
    }.items():
        assert re.search(rf"{what}: .*{expected}", text), (what, text)
    assert "sum 45" in text


TRAFFIC = BEGIN + """
if rank == 0:
    data = Dataset.from_ranks([1, 2], receives=3)
    spec, alike = data.element_spec, iter(data)
    # Rank 2 sends its first sample when rank 1 has begun to send all of its own.
    first, second = next(alike), next(alike)
    # Rank 1 says how much of that has been received.
    world.Send(b"", 1, 9)
    taken = bytearray(1)
    world.Recv(taken, 1, 9)
    rest = [element[1].item() for element in alike]
    begin = first[0].tolist(), first[1].item(), second[1].item()
    print("spec", spec, "first", *begin, "ahead", taken[0], "rest", rest, flush=True)
    numbers = Dataset.from_ranks([1], tag=5).batch(4).take(2)
    print("batches", [x.tolist() for x in numbers], flush=True)
else:
    send(b"float32 2; int64")
    values = [np.full(2, rank, "f4").tobytes() + np.int64(10 * rank + number).tobytes() for number in range(6)]
    if rank == 1:
        sent = [world.Issend([np.frombuffer(one, "u1"), MPI.BYTE], 0, 0) for one in values]
        world.Send(b"", 2, 9)
        # One was taken, and three may have been received ahead.
        sent[0].Wait()
        world.Recv(bytearray(1), 0, 9)
        world.Send(bytes([1 + sum(one.Test() for one in sent[1:])]), 0, 9)
        MPI.Request.Waitall(sent)
    else:
        world.Recv(bytearray(1), 1, 9)
        for one in values[:2]:
            send(one)
    send(b"")
    if rank == 1:
        # More than anybody reads: it ends all the same.
        send(b"float64", tag=5)
        for number in range(40):
            send(np.float64(number).tobytes(), tag=5)
        send(b"", tag=5)
print(f"rank {rank} ends", flush=True)
"""


def test_samples_come_in_turns_and_the_sender_is_held_back(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TRAFFIC)
    result = run_program(3, program)
    text = result.stdout
    assert result.returncode == 0, text + result.stderr
    assert "ArraySpec(shape=(2,), dtype=dtype('float32')), ArraySpec(shape=(), dtype=dtype('int64'))" in text, text
    assert re.search(r"first \[1.0, 1.0\] 10 20 ahead [1-4] rest \[11, 21, 12, 13, 14, 15\]", text), text
    assert "batches [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]" in text, text
    assert len(re.findall(r"rank \d ends", text)) == 3, text


SILENT = BEGIN + """
import os
from tests.helpers import marks
if rank == 0:
    strategy = mpidist.MultiWorkerMirroredStrategy(communicator=world.Split(0))
    next(iter(Dataset.from_ranks([1])))
    # Not before: the start may take longer.
    os.environ.update(MPIDIST_WARN_SECONDS="0.5", MPIDIST_TIMEOUT="2")
    next(iter(Dataset.from_ranks([1], tag=1)))
else:
    world.Split(1)
    send(b"int8")
    send(b"a")
    marks.stay()
"""


def test_a_wait_for_a_silent_rank_is_reported_and_limited(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SILENT)
    result = run_program(2, program)
    text = result.stdout + result.stderr
    assert result.returncode != 0
    told = r"rank 0 of 2 has waited \d+ s for rank 1 to send the header of its samples with the tag 1, after 0 samples"
    assert re.search(rf"mpidist: {told}\n  rank 1 is process \d+: .*program.py\n", text), text
    assert re.search(rf"TimeoutError: {told}", text), text
    assert "The limit is 2 s (MPIDIST_TIMEOUT)" in text, text
    # The rank that reads is alone in its strategy, and its error ends the job all the same.
    assert re.search(r"rank 0 of 2 on \S+ failed, the job ends", text), text


SHARED = BEGIN + """
if rank < 2:
    strategy = mpidist.MultiWorkerMirroredStrategy(communicator=world.Split(0))
    data = Dataset.from_ranks([2 + rank]).batch(2)
    if rank == 0:
        fails("shared", lambda: strategy.experimental_distribute_dataset(data))
    else:
        try:
            strategy.experimental_distribute_dataset(data)
        except mpidist.errors.MismatchError:
            pass
    own = strategy.distribute_datasets_from_function(lambda context: data)
    sums = [int(strategy.reduce("SUM", x, axis=0)) for x in own]
    # The launcher mixes what two ranks print.
    if strategy.reduce("SUM", int(sums == [2, 10, 9]), axis=None) == 2 and rank == 0:
        print("all sums are right", flush=True)
else:
    world.Split(1)
    send(b"int64", rank - 2)
    for number in range(2 * rank):
        send(np.int64(number).tobytes(), rank - 2)
    send(b"", rank - 2)
"""


def test_ranks_that_have_samples_of_their_own_say_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARED)
    result = run_program(4, program)
    text = result.stdout
    assert result.returncode == 0, text + result.stderr
    wrong = r"shared: MismatchError: .*where ranks have data of their own use distribute_datasets_from_function"
    assert re.search(wrong, text), text
    # Four samples and six, in batches of two of each rank: the first one has none left for the last step.
    assert "all sums are right" in text, text
