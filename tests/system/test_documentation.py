"""The documentation keeps its word: programs print what it says; commands, names and links lead somewhere."""

from __future__ import annotations

import configparser
import doctest
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpidist
from mpidist.cli.doctor.settings import GONE
from tests.helpers.launching import run_program
from tests.helpers.markdown import ROOT, all_pages, anchors_of, blocks_of, documentation, links_of
from tests.run_page import NO_RUN, REQUIRES, is_run

# Two busy cores.
pytestmark = pytest.mark.timeout_seconds(240)

README = ROOT / "README.md"
README_LINES = 150
RUNNER = ROOT / "tests" / "run_page.py"
# What a `text` block right after a Python block is; the second holds on two ranks only.
ANY_RANKS, TWO_RANKS = "", "on 2 ranks"
# A few, for what no test machine has.
MOST_BLOCKS_NOT_RUN = 4


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


PROGRAMS = [page for page in documentation() if any(map(is_run, blocks_of(page.read_text())))]
every_page = pytest.mark.parametrize("page", all_pages(), ids=names(all_pages()))
every_guide = pytest.mark.parametrize("page", documentation(), ids=names(documentation()))


@pytest.mark.parametrize("page", PROGRAMS, ids=names(PROGRAMS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_page_is_a_program_that_prints_what_the_page_says(page: Path, ranks: int, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text())
    result = run_program(ranks, RUNNER, page, tmp_path, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    # What is shown is what the first rank prints.
    printed = {int(line): text for line, text in json.loads((tmp_path / "printed-0.json").read_text()).items()}
    for block in blocks:
        if block.language != "text" or block.follows not in printed or (block.words == TWO_RANKS and ranks != 2):
            continue
        got = printed[block.follows]
        assert doctest.OutputChecker().check_output(block.text, got, doctest.ELLIPSIS), (
            f"{page.name}, line {block.line}: expected\n{block.text}got\n{got}"
        )


@every_guide
def test_every_output_shown_is_compared(page: Path) -> None:
    blocks = blocks_of(page.read_text())
    languages = {block.line: block.language for block in blocks}
    for block in blocks:
        place = f"{page.name}, line {block.line}"
        assert block.language in ("python", "text", "bash", "console"), f"{place}: {block.language}"
        if block.language == "text":
            assert block.follows in languages, place
            assert languages[block.follows] == "python", place
            assert block.words in (ANY_RANKS, TWO_RANKS), f"{place}: {block.words!r}"


def test_few_blocks_are_left_out_and_they_say_why() -> None:
    left_out = []
    for page in documentation():
        for block in blocks_of(page.read_text()):
            if block.language != "python" or not block.words:
                continue
            assert block.words.startswith((NO_RUN, REQUIRES)), f"{page.name}, line {block.line}: {block.words!r}"
            if block.words.startswith(NO_RUN):
                assert block.words.removeprefix(NO_RUN).strip(), f"{page.name}, line {block.line}: no reason"
                compile(block.text, str(page), "exec")
                left_out.append(block)
    assert len(left_out) <= MOST_BLOCKS_NOT_RUN


def test_the_readmes_program_prints_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    first = next(filter(is_run, blocks_of(README.read_text())))
    assert len(first.text.splitlines()) <= 25
    program = tmp_path / "program.py"
    program.write_text(first.text)
    outputs = [run_program(ranks, program) for ranks in (1, 4)]
    for output in outputs:
        assert output.returncode == 0, output.stderr
        loss, weight, bias = re.findall(r"[0-9.e+-]+(?=[,\]\s]|$)", output.stdout)[:3]
        assert float(loss.rstrip(",")) < 1e-9
        assert float(weight) == pytest.approx(3, abs=1e-4)
        assert float(bias) == pytest.approx(1, abs=1e-4)


def test_the_readmes_second_run_resumes(tmp_path: Path) -> None:
    """Another number of ranks finds the checkpoint of the last step: no batch is left, and nothing is saved again."""
    saved = []
    for ranks in (2, 1):
        result = run_program(ranks, RUNNER, README, tmp_path, timeout_seconds=100)
        assert result.returncode == 0, result.stderr + result.stdout
        saved.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").glob("*.h5")})
    assert len(saved[0]) == 3
    assert saved[1] == saved[0]


def test_the_readme_is_a_front_page() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= README_LINES
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert headings[0] == "Two commands"
    front = set(links_of(README.read_text()))
    for page in documentation()[1:]:
        if page.parent.name == "docs":
            assert f"docs/{page.name}" in front, f"README.md has no link to {page.name}"
        else:
            guide = page.parent.with_suffix(".md")
            link = f"{page.parent.name}/{page.name}"
            assert link in links_of(guide.read_text()), f"{guide.name} has no link to {link}"


def test_the_readmes_two_commands_are_as_ci_reads_them() -> None:
    """The first block under the heading holds two lines that are no comments; CI runs them letter for letter."""
    after = README.read_text().split("## Two commands\n", 1)[1]
    commands = [line for line in blocks_of(after)[0].text.splitlines() if line.strip() and not line.startswith("#")]
    assert commands == [
        "pip install '.[mpich,examples,fast]' && mpirun -n 8 python examples/train.py",
        "pip install '.[mpich,test,fast]' && python tests/run_all.py",
    ]


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in links_of(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors_of(found.read_text()), f"{page.name}: {target}"


@every_page
def test_commands_name_files_options_and_extras_that_exist(page: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    for line in commands_of(page):
        for listed in re.findall(r"'\.\[([\w,]+)\]'", line):
            assert set(listed.split(",")) <= extras, f"{page.name}: {line}"
        for call in re.split(r"&&|\|\||;", line):
            words = call.split()
            scripts = [word for word in words if word.startswith(("examples/", "benchmarks/", "tests/", ".ci/"))]
            for script in scripts:
                assert (ROOT / script).exists(), f"{page.name}: {line}"
            if scripts and scripts[0].endswith(".py") and "pytest" not in words:
                options = re.findall(r"(?<!\S)--[\w-]+", " ".join(words[words.index(scripts[0]) :]))
                for option in options:
                    # As it is declared, here or in what stands beside it: "--plot", or one of "--sweep/--no-sweep".
                    path = ROOT / scripts[0]
                    imported = re.findall(r"(?m)^import (\w+)$", path.read_text())
                    beside = [path.with_name(f"{name}.py") for name in imported]
                    source = "".join(one.read_text() for one in (path, *beside) if one.exists())
                    assert re.search(rf"""["/]{option}["/]""", source), f"{page.name}: {line}"


def commands_of(page: Path) -> Iterator[str]:
    """Shell lines of a page, without comments; those that a backslash continues are one."""
    for block in blocks_of(page.read_text()):
        if block.language == "bash":
            joined = block.text.replace("\\\n", " ")
            lines = (line.split(" #")[0] for line in joined.splitlines() if not line.startswith("#"))
            yield from filter(str.strip, lines)


@every_page
def test_names_of_the_package_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it, and without a file of settings, Keras asks for TensorFlow.
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for name in set(re.findall(r"(?<![\w./-])mpidist(?:\.[A-Za-z_]\w*)+", page.read_text())):
        assert resolves(name), f"{page.name}: {name}"


# What a package of an adapter imports. Keras may be there without the framework beneath it.
FRAMEWORKS = {"torch": "torch", "keras": "torch", "jax": "jax", "xla": "jax"}


def resolves(name: str) -> bool:
    found: object = mpidist
    way = "mpidist"
    for part in name.split(".")[1:]:
        if found is mpidist and part in FRAMEWORKS and importlib.util.find_spec(FRAMEWORKS[part]) is None:
            # The framework is not installed here.
            return True
        way = f"{way}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(way)
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def test_every_public_name_is_documented() -> None:
    text = "".join(page.read_text() for page in documentation())
    assert [name for name in mpidist.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_environment_variable_is_in_its_table() -> None:
    pattern = re.compile(r"\bMPIDIST_[A-Z_]+[A-Z]\b")
    sources = [*ROOT.glob("mpidist/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / ".ci" / "run"]
    known = {name for path in sources for name in pattern.findall(path.read_text())}
    for page in all_pages():
        assert set(pattern.findall(page.read_text())) <= known, page.name
    read = {name for path in ROOT.glob("mpidist/**/*.py") for name in pattern.findall(path.read_text())}
    listed = set(re.findall(r"^\| `(MPIDIST_[A-Z_]+)", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    # The doctor tells of those that are gone.
    assert listed == read - GONE.keys()
