"""Jobs with parameter servers that get signals: they save and end by themselves, and every update counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import run_program
from tests.helpers.preempted_training import COUNTED

pytestmark = pytest.mark.timeout_seconds(240)

TRAINING = """
import atexit, os, random, signal, sys
import mpidist
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
from mpidist.failures.watchdog import WATCHDOG
from tests.helpers.waiting import let_pass, until

folder, how, seed, *lives = sys.argv[1:]
chance = random.Random(f"{how} {seed} {lives}")
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
role = f"{resolver.task_type} {resolver.task_id}"

def be_last():
    if role == "chief 0":
        # The others have ended, and must not leave it before this process.
        until(lambda: all(peer.has_ended() for peer in WATCHDOG.peers()), "the others have ended")
        let_pass(1)
        print("the chief's last word", flush=True)

atexit.register(be_last)
try:
    if how == "join" and resolver.task_type != "chief":
        mpidist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22))
except SystemExit as error:
    os.write(1, f"{role} leaves with {error.code}\\n".encode())
    raise
coordinator = mpidist.coordinator.ClusterCoordinator(strategy, prefetch=how == "prefetch")
""" + COUNTED + """
class Ended(Exception):
    pass

def end():
    raise Ended

processes = [one.number for one in strategy.roles.group.processes]
ranks = {"chief": processes[:1], "worker": processes[1:2], "ps": processes[3:], "all": processes}

def train(name, which, exit_fn=None):
    config = TerminationConfig(exit_code=75, exit_fn=exit_fn)
    resolver = strategy.cluster_resolver
    with PreemptionCheckpointHandler(resolver, checkpoint, folder + "/checkpoints", config) as handler:
        begin = handler.total_run_calls
        last = begin + 50 if name == "none" else MOST
        told_at = begin + chance.randrange(1, 60)
        while handler.total_run_calls < last:
            index = handler.total_run_calls
            if how == "join":
                handler.save_checkpoint_if_preempted()
                coordinator.schedule(step, (index, numbers))
            else:
                handler.run(coordinator.schedule, step, (index, numbers))
            if index == told_at and name != "none":
                for process in ranks[which]:
                    os.kill(process, getattr(signal, name))
            if index > told_at:
                # Not so fast that there are no steps left before the chief has heard of it.
                let_pass(0.01)
    return last

for number, life in enumerate(lives):
    try:
        last = train(*life.split(), None if number == len(lives) - 1 else end)
    except Ended:
        print("saved after", life, flush=True)
require_exact(last)
"""
TOLD = ("SIGUSR1 chief", "SIGUSR1 worker", "SIGUSR1 ps", "SIGTERM all")


def run(folder: Path, how: str, seed: int, *lives: str) -> None:
    """Run one program, whose chief saves and goes on after all signals but the last one, which ends it."""
    program = folder / "program.py"
    program.write_text(TRAINING)
    result = run_program(4, program, folder, how, seed, *lives, timeout_seconds=100)
    text = f"{how} {lives}\n{result.stdout}{result.stderr}"
    code = 75 if "SIG" in lives[-1] else 0
    assert result.returncode == code, text
    # No rank was ended by another one's exit.
    assert "the job ends" not in text, text
    assert "the chief's last word" in result.stdout, text
    for role in ("worker 0", "worker 1", "ps 0"):
        assert f"{role} leaves with {code}" in result.stdout, text
    for life in lives:
        name = life.split()[0]
        assert name == "none" or f"the job is about to end ({name}): saved" in result.stderr, text
    assert result.stdout.count("saved after") == len(lives) - 1, text
    assert code or "exact after" in result.stdout, text


def test_whoever_gets_a_signal_every_update_counts_once(tmp_path: Path) -> None:
    run(tmp_path, "constructor", 0, *TOLD)
    run(tmp_path, "join", 0, "none all")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_signals_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Every signal ends a program; the next one goes on."""
    for number, life in enumerate((*TOLD, "none all")):
        run(tmp_path, ("constructor", "join", "prefetch")[(seed + number) % 3], seed, life)


def test_the_launchers_signal_after_a_death_ends_nothing(tmp_path: Path) -> None:
    """Hydra's is SIGUSR1, as that of a cluster that ends the job."""
    program = tmp_path / "program.py"
    program.write_text("""
import os, signal, sys, threading
import mpidist
from tests.helpers.waiting import let_pass
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 20))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = mpidist.Variable(0)
processes = [one.number for one in strategy.roles.group.processes]
config = TerminationConfig(exit_code=75)
checkpoint = mpidist.Checkpoint(count=count)
with PreemptionCheckpointHandler(None, checkpoint, sys.argv[1] + "/checkpoints", config) as handler:
    begin = handler.total_run_calls
    assert begin == int(count), (begin, int(count))
    death_is_old, is_told = threading.Event(), False
    while True:
        handler.run(coordinator.schedule, lambda: count.assign_add(1))
        if handler.total_run_calls == begin + 20:
            os.kill(processes[1], signal.SIGKILL)
            # By then the launcher's signal has come, or comes late and is taken for the second one.
            threading.Timer(3, death_is_old.set).start()
        if death_is_old.is_set() and not is_told:
            is_told = True
            os.write(2, b"lives on\\n")
            os.kill(processes[3], signal.SIGUSR1)
        let_pass(0.01)
""")
    result = run_program(4, program, tmp_path, kills=True, timeout_seconds=100)
    assert "lives on" in result.stderr, result.stdout + result.stderr
    assert "the job is about to end (SIGUSR1): saved" in result.stderr, result.stdout + result.stderr
    # The launcher's code says nothing after a death.
    assert (tmp_path / "checkpoints" / "exit-code").read_text() == "75\n", result.stdout + result.stderr
