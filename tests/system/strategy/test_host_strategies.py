"""Tests of every strategy that spans hosts, on ranks of two and three of them; and the strategy that refuses to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.virtual_hosts import ROOT, VirtualHosts

pytestmark = pytest.mark.timeout_seconds(240)

PROGRAM = '''
import json, sys
import pytest

class Counter:
    passed, other = [], []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            (self.passed if report.passed else self.other).append(report.nodeid)

counter = Counter()
code = pytest.main(sys.argv[2:], plugins=[counter])

# Not before: pytest rewrites what it imports.
import mpidist
from mpidist.comm.group.opening import open_communicator

ranks = open_communicator()
everyone = ranks.all_gather_object((int(code), counter.passed, counter.other))
try:
    mpidist.MirroredStrategy()
except ValueError as error:
    refused = str(error)
with open(f"{sys.argv[1]}.{ranks.rank}", "w") as file:
    json.dump((everyone, refused, ranks.node_sizes), file)
'''
FOLDER = "tests/parallel/documented_examples"
TESTS = [
    f"{FOLDER}/{name}" for name in
    ("test_from_function.py", "test_loop.py", "test_parameter_servers.py", "test_strategies.py")
]
# Mirrored variables want one host; what it does there is the first's business.
CHOSEN = (
    "not mirrored_strategy_on and not test_mirrored and not cross_device and not [mirrored] and not mirrored_var "
    "and not central_storage"
)


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2, 1)], ids=["two hosts", "three hosts"])
def test_strategies_pass_their_tests_on_several_hosts(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM)
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "--with-mpi", "--rootdir", ROOT, "-k", CHOSEN]
    result = virtual_hosts(len(ranks)).run(
        ranks, program, out, *options, *(ROOT / name for name in TESTS), timeout_seconds=200
    )
    text = result.stdout + result.stderr
    for rank in range(sum(ranks)):
        path = Path(f"{out}.{rank}")
        assert path.exists(), text
        everyone, refused, sizes = json.loads(path.read_text())
        assert [(code, other) for code, _, other in everyone] == [(0, [])] * sum(ranks), text
        assert sizes == list(ranks)
        passed = everyone[rank][1]
        for one in ("multi-worker", "one_device", "parameter_servers", "from_function"):
            assert any(one in name for name in passed), (one, passed)
        assert len(passed) > 15, passed
        hosts = len(ranks)
        assert f"on {hosts} nodes with {list(ranks)} ranks. Use MultiWorkerMirroredStrategy()" in refused
