"""Slurm's host lists: read, written, and compared with Slurm's and ClusterShell's own readers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpidist.cluster.slurm.host_list import MOST_HOSTS, compress, expand
from tests.helpers.amounts import amount

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,4}[0-9]{0,3}", fullmatch=True)
NUMBERS = st.integers(0, 120).flatmap(lambda number: st.integers(1, 4).map(lambda width: str(number).zfill(width)))


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """One number, or a range of up to four that counts up."""
    first = draw(NUMBERS)
    last = str(int(first) + draw(st.integers(0, 3)))
    # ClusterShell takes no range whose ends have different widths, unless the first one has no zeros in front.
    return first if draw(st.booleans()) else f"{first}-{last.zfill(len(first))}"


@st.composite
def lists(draw: st.DrawFn, most_brackets: int = 3) -> str:
    """A list of names with brackets, as Slurm could read it: nothing after the last bracket of a name."""
    names = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["n", "rack", "a-b.c", "x1y"]))
        for _ in range(draw(st.integers(0, most_brackets))):
            name += "[" + ",".join(draw(st.lists(ranges(), min_size=1, max_size=3))) + "]"
            name += draw(st.sampled_from(["b", "-c"]))
        # Without what follows the last bracket.
        names.append(name[: name.rindex("]") + 1] if "]" in name else name)
    return ",".join(names)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-3]", "n1 n2 n3"),
        ("n[001-003,7]", "n001 n002 n003 n7"),
        ("n[8-011]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[2,9-10]", "n2 n9 n10"),
        ("n[3,1-2],n1", "n3 n1 n2 n1"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("a[1-2][3-4]", "a13 a14 a23 a24"),
        # The order is Slurm's: the last bracket counts fastest, then the first.
        ("a[1-2]b[1-2]c[1-2]", "a1b1c1 a1b1c2 a2b1c1 a2b1c2 a1b2c1 a1b2c2 a2b2c1 a2b2c2"),
        ("a[1-2]b[3-4]c[5]", "a1b3c5 a2b3c5 a1b4c5 a2b4c5"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("n[1-2].site.edu,login", "n1.site.edu n2.site.edu login"),
        ("rack1-n[1-2],rack2-n[01-02]", "rack1-n1 rack1-n2 rack2-n01 rack2-n02"),
        ("n[1,[2-3],[[5]]]", "n1 n2 n3 n5"),
        (" n1 ,,n2\nn3,", "n1 n2 n3"),
        ("n[ 1 - 2 , 4 ]", "n1 n2 n4"),
        ("[1-3]", "1 2 3"),
        ("n1-4", "n1-4"),
        ("", ""),
    ],
)
def test_lists_are_read_as_slurm_reads_them(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n[4-1]", r"malformed host list 'n\[4-1\]': expected its smaller number first at character 3, got the range"),
        ("n[]", "expected a number at character 3, got ']'"),
        ("n1,m[1,]", "expected a number at character 8, got ']'"),
        ("n[1", r"expected ',' or '\]' at character 4, got the end, with the bracket at 2 open"),
        ("n[1,", "expected a number at character 5, got the end"),
        ("n1]", "expected an opening one before it at character 3, got a closing bracket"),
        ("n[a-c]", "expected a number at character 3, got 'a'"),
        ("n[1-3:2]", r"expected ',' or '\]' at character 6, got ':'"),
        ("n[1--2]", "expected a number at character 5, got '-'"),
        ("n[1[2]]", r"expected ',' or '\]' at character 4, got '\['"),
        ("n[\u0661]", "expected a number at character 3"),
        ("n[0-999999999]", f"expected at most {MOST_HOSTS} hosts at character 3, got the range 0-999999999"),
        ("x,a[0-999]b[0-999]", f"at character 3, got more than {MOST_HOSTS} hosts"),
        ("[" * 2000, r"' and 1000 more: expected a number at character 9, got a bracket in 8 others"),
        ("n[" + "9" * 5000 + "-" + "9" * 5001 + "]", "expected a number of at most 18 at character 3, got one of 5000"),
        ("n[0-65535],m", f"at character 12, got more than {MOST_HOSTS} hosts"),
    ],
)
def test_a_malformed_list_names_the_position(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        expand(text)


@given(st.lists(NAMES | NUMBERS.map("n{}".format), max_size=12))
@example(["n9", "n10", "n11"])
@example(["n09", "n10", "n99", "n100"])
@example(["n0", "n00", "n1", "n01"])
@example(["n1", "n1", "n3", "n2"])
def test_a_written_list_is_read_back(hosts: list[str]) -> None:
    text = compress(hosts)
    assert expand(text) == hosts
    assert compress(expand(text)) == text


@pytest.mark.parametrize("host", ["", "a,b", "a b", "n[1", "n1]"])
def test_only_names_can_be_written(host: str) -> None:
    with pytest.raises(ValueError, match="expected a host name without commas, blanks and brackets, got"):
        compress(["n1", host])


@given(lists(most_brackets=2))
def test_clustershell_reads_the_same_hosts(text: str) -> None:
    node_set = pytest.importorskip("ClusterShell.NodeSet", reason="ClusterShell is not installed")
    # It sorts, and drops what stands there twice.
    assert sorted(set(expand(text))) == sorted(node_set.NodeSet(text))


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lines, with which Slurm reads lists where no daemon runs."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=names\nSlurmctldHost=localhost\n")
    return path


@settings(max_examples=amount(200, 5000))
@given(text=lists())
@example(text="a[1-2]b[1-3,5]c[1-2]d[7-8]")
@example(text="n[098-101],n[8-011]")
def test_slurm_reads_the_same_hosts_and_writes_the_same_list(text: str, configuration: Path) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("no scontrol: Slurm is not installed")
    assert _scontrol("hostnames", text, configuration).split() == expand(text)
    assert _scontrol("hostlist", ",".join(expand(text)), configuration).strip() == compress(expand(text))


def _scontrol(what: str, text: str, configuration: Path) -> str:
    result = subprocess.run(
        ["scontrol", "show", what, text], env={"PATH": os.environ["PATH"], "SLURM_CONF": str(configuration)},
        capture_output=True, text=True, timeout=60, check=True,
    )
    return result.stdout
