"""The list of deliberate faults fits the package and the tests, and the script tells found ones from others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import mutation
from tests.faults import FAULTS, Fault

PACKAGE = mutation.ROOT / "mpidist"


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_old_text_is_there_once_and_the_tests_exist(fault: Fault) -> None:
    changed = fault.put_into((PACKAGE / fault.file).read_text())
    assert fault.new != fault.old
    # A fault that is no Python would be found by every test.
    compile(changed, fault.file, "exec")
    for test in fault.tests.split():
        assert test.startswith(f"{fault.folder}/")
        path, *names = test.split("::")
        text = (mutation.ROOT / "tests" / path).read_text()
        defined = text if "CollectiveContract" not in text else text + (PACKAGE / "testing/contract.py").read_text()
        for name in names:
            assert re.search(rf"(def|class) {name}\b", defined), f"{path} has no {name}"


def test_there_are_enough_and_each_has_its_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_a_text_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'wrong': expected the old text once in mpidist/a.py, got it 2 times"):
        Fault("wrong", "a.py", "one", "two", "").put_into("one and one")


@pytest.mark.timeout_seconds(120)
def test_what_the_tests_do_not_notice_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test = "unit/comm/test_tree_order.py::test_the_order_shows_in_the_bits"
    file, old = "comm/arithmetic/tree_order.py", "    return pairs\n"
    monkeypatch.setattr(mutation, "FAULTS", [
        Fault("harmless", file, old, "    return [*pairs]\n", test),
        Fault("loud", file, old, "    return pairs[::-1]\n", test),
    ])
    before = (PACKAGE / file).read_text()
    assert mutation.main(["--jobs", "2"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"harmless +NOT FOUND\nloud +exit code 1 after", out)
    assert out.endswith("1 of 2 faults were found: not harmless\n")
    assert mutation.main(["loud"]) == 0
    assert (PACKAGE / file).read_text() == before, "the faults are put into a copy"
    monkeypatch.setattr(mutation, "FAULTS", [Fault("any", file, old, "    return []\n", f"{test}_at_all")])
    assert mutation.main([]) == 1, "tests that fail without a fault find nothing"


def test_a_run_that_does_not_end_has_found_something(tmp_path: Path) -> None:
    mutation.copy(mutation.ROOT, tmp_path)
    assert mutation.run_tests(tmp_path, "unit/helpers/test_amounts.py", 1, 0.01) == "not done after 0 s"
