"""Build the site of the documentation: a folder for any web server, that also opens from a disk.

    pip install '.[docs]'
    python docs/site/build.py site

The pages are those of the repository as GitHub shows them: README.md, docs/ and the pages that they link to. They are
copied into one folder, with links that fit there, and with a page for each public module. MkDocs makes HTML of that;
a link that leads nowhere, or a heading that is missing, is an error.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = Path(__file__).with_name("mkdocs.yml")
# Pages outside of docs/, and what pages show or link to.
OTHERS = (
    "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "slurm/README.md", "examples/README.md",
    "examples/*.py", "examples/*.ipynb", "examples/coupled/*", "slurm/*.sbatch", "benchmarks/results/*.png",
    ".github/CITATION.cff",
)
# What has a page of the reference: public modules, each with a list of its names.
MODULES = (
    "mpidist", "mpidist.experimental", "mpidist.cluster_resolver", "mpidist.coordinator", "mpidist.data",
    "mpidist.optimizers", "mpidist.metrics", "mpidist.initializers", "mpidist.parallel", "mpidist.summary",
    "mpidist.training", "mpidist.keras", "mpidist.torch", "mpidist.jax", "mpidist.testing",
)
_LINK = re.compile(r"(?P<text>!?\[[^\]]*\]\()(?P<target>[^)\s]+)\)")
_WORKER = "https://unpkg.com/iframe-worker/shim"
_ELSEWHERE = "https://github.com/mpidist/mpidist/blob/main/"


def places() -> dict[str, str]:
    """Each file of the site: its path in the repository, and its path among the pages."""
    found = {"README.md": "index.md"}
    for path in sorted(ROOT.glob("docs/**/*")):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and not name.startswith("docs/site/"):
            found[name] = name.removeprefix("docs/")
    for pattern in OTHERS:
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern) if path.is_file()]
        found |= dict(zip(names, names, strict=True))
    # MkDocs leaves out what begins with a dot.
    return {name: place.lstrip(".") for name, place in found.items()}


def relinked(text: str, name: str, known: dict[str, str]) -> str:
    """A page with links that fit the site.

    Args:
        text: The page.
        name: Its path in the repository.
        known: What the site has; what it does not have is linked on GitHub.
    """
    here = os.path.dirname(known[name])

    def changed(match: re.Match[str]) -> str:
        path, sharp, anchor = match["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        target = os.path.normpath(os.path.join(os.path.dirname(name), path))
        place = os.path.relpath(known[target], here or ".") if target in known else _ELSEWHERE + target
        return f"{match['text']}{place}{sharp}{anchor})"

    lines, is_code = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            is_code = not is_code
            # The words behind a language are for the tests.
            line = re.sub(r"^```(\w+) .*", r"```\1", line)  # noqa: PLW2901
        lines.append(line if is_code else re.sub(r"(`[^`]*`)|" + _LINK.pattern, _outside_code(changed), line))
    return "".join(lines)


def _outside_code(changed: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    return lambda match: match[1] or changed(match)


def stage(folder: Path) -> list[str]:
    """Put all pages into a folder.

    Returns:
        The pages of the reference.
    """
    known = places()
    for name, place in known.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            # It names everything, and would be the first result of each search.
            head = "---\nsearch: {exclude: true}\n---\n" if name == "CHANGELOG.md" else ""
            target.write_text(head + relinked((ROOT / name).read_text(), name, known))
        else:
            shutil.copyfile(ROOT / name, target)
    pages = []
    for module in MODULES:
        page = folder / "api" / f"{module}.md"
        page.parent.mkdir(exist_ok=True)
        names = [f"::: {home}\n" for home in homes(module)]
        page.write_text(f"# {module}\n\n" + "\n".join(names))
        pages.append(f"api/{module}.md")
    return pages


def homes(module: str) -> Iterator[str]:
    """The definitions of the public names of a module, as far as they are classes or functions."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: dict[str, str] = {}
    listed: list[str] = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.setdefault(node.name, f"{module}.{node.name}")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = list(ast.literal_eval(node.value))
    for name in listed:
        home = found.get(name, "")
        is_module = (ROOT / home.replace(".", "/")).is_dir() or (ROOT / (home.replace(".", "/") + ".py")).is_file()
        if home.startswith("mpidist.") and not is_module and not name.isupper():
            yield home


def main(target: Path) -> int:
    """Build the site.

    Returns:
        The exit code of MkDocs.
    """
    with tempfile.TemporaryDirectory() as folder:
        pages = stage(Path(folder, "pages"))
        listed = "".join(f"\n          - {Path(page).stem}: {page}" for page in pages)
        text = CONFIGURATION.read_text().replace("- API: API", f"- API:{listed}")
        settings = Path(folder, "mkdocs.yml")
        paths = f"docs_dir: {folder}/pages\nsite_dir: {target.resolve()}\n"
        settings.write_text(text.replace("        python:\n", f"        python:\n          paths: [{ROOT}]\n") + paths)
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(settings)]
        # Material tells of another program by its authors at each start.
        code = subprocess.run(command, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode
    if code == 0:
        _stay_at_home(target)
    return code


def _stay_at_home(site: Path) -> None:
    """Give the pages the script that a search from a disk needs, which Material would load from another host."""
    shutil.copyfile(Path(__file__).with_name("worker.js"), site / "assets" / "worker.js")
    for page in site.rglob("*.html"):
        own = os.path.relpath(site / "assets" / "worker.js", page.parent)
        page.write_text(page.read_text().replace(_WORKER, own))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
