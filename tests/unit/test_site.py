"""The site of the documentation, its recipes for centres, and pages that repeat what the package has."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import mpidist
from tests.helpers.markdown import ROOT, blocks_of, documentation, links_of
from tests.unit.test_words import texts

RECIPES = ROOT / "docs" / "recipes"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def load_build() -> ModuleType:
    specification = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "site" / "build.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


BUILD = load_build()


def test_links_of_a_page_fit_the_site() -> None:
    known = {"README.md": "index.md", "docs/a.md": "a.md", "docs/b/c.md": "b/c.md"}
    page = (
        "[one](docs/a.md#x) and `[code](docs/a.md)` ![two](docs/b/c.md)\n"
        "```python no-run: so\n[three](docs/a.md)\n```\n"
        "[here](#y) [there](https://a.b/docs/a.md) [folder](benchmarks/results)\n"
    )
    assert BUILD.relinked(page, "README.md", known) == (
        "[one](a.md#x) and `[code](docs/a.md)` ![two](b/c.md)\n```python\n[three](docs/a.md)\n```\n"
        "[here](#y) [there](https://a.b/docs/a.md) "
        "[folder](https://github.com/mpidist/mpidist/blob/main/benchmarks/results)\n"
    )
    assert BUILD.relinked("[up](../a.md) [front](../../README.md)", "docs/b/c.md", known) == (
        "[up](../a.md) [front](../index.md)"
    )


def test_the_site_has_every_page_and_every_public_class_and_function(tmp_path: Path) -> None:
    pages = BUILD.stage(tmp_path)
    menu = (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    for page in documentation()[1:]:
        assert f"{page.relative_to(ROOT / 'docs')}\n" in menu, f"{page} is not in the menu of the site"
    for page in tmp_path.rglob("*.md"):
        for target in links_of(page.read_text()):
            path = target.partition("#")[0]
            assert ":" in target or not path or (page.parent / path).exists(), f"{page.name}: {target}"
    shown = "".join((tmp_path / page).read_text() for page in pages)
    for name in mpidist.__all__:
        if name[0].isupper() and name != "DistributedValues":
            assert re.search(rf"^::: mpidist\..*\.{name}$", shown, re.MULTILINE), name


@pytest.mark.long
@pytest.mark.timeout_seconds(280)
def test_the_site_is_whole_and_its_search_finds_without_a_server(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    assert BUILD.main(tmp_path / "site") == 0
    for path in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)', path.read_text())
        assert [one for one in loaded if "mpidist" not in one] == [], path
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        page = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"]).new_page()
        page.on("request", lambda request: asked.append(request.url))
        for name, words in (
            ("tutorial", "restored: True"), ("api/mpidist.optimizers", "learning_rate"),
            ("which-strategy", "shard_optimizer=True"),
        ):
            page.goto(f"file://{tmp_path}/site/{name}.html")
            assert words in page.inner_text("article"), name
            picture = page.screenshot(path=tmp_path / f"{name.replace('/', '-')}.png")
            assert len(picture) > 20_000, "an empty page"
        # The key that opens the search.
        page.keyboard.press("s")
        page.keyboard.type("watchdog")
        page.wait_for_selector(".md-search-result__link")
        found = page.inner_text(".md-search-result__list")
        page.screenshot(path=tmp_path / "search.png")
        page.context.browser.close()
    assert "Failures" in found
    assert [one for one in asked if not one.startswith(("file:", "data:", "blob:"))] == []


# What is put together from parts, with the words in braces between them.
PUT_TOGETHER = {"is deadlocked, the job ends": "is deadlocked, "}


def test_errors_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    told = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(told) > 25
    known = [text for _, text in texts()]
    assert [text for text in told if not any(PUT_TOGETHER.get(text, text).strip() in one for one in known)] == []


def test_the_costs_of_strategies_are_those_that_were_measured() -> None:
    page = (ROOT / "docs" / "which-strategy.md").read_text()
    told = re.findall(r"^\| `(.+)` \| ([\d+]+) \| (\d+) \| ([\d.]+) \| (\d+) \|$", page, re.MULTILINE)
    measured = json.loads((ROOT / "benchmarks" / "results" / "strategies_mpich.json").read_text())["rows"]
    assert told == [
        (
            row["strategy"], row["layout"], f"{row['memory'] / 1e6:.0f}", f"{row['sent'] / 1e6:.1f}", f"{row['ms']:.0f}"
        )
        for row in measured
    ]


def requirements() -> dict[str, str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    return dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(lines), re.MULTILINE))


def test_the_recipe_of_spack_has_the_requirements_and_the_version() -> None:
    text = (RECIPES / "spack" / "packages" / "py-mpidist" / "package.py").read_text()
    asked = dict(re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):', text))
    assert {name: asked.get(name) for name in requirements()} == requirements()
    assert f'version("{mpidist.__version__}"' in text


def test_the_recipe_of_easybuild_has_the_requirements_and_the_version() -> None:
    (path,) = (RECIPES / "easybuild").glob("*.eb")
    found: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    assert found["version"] == mpidist.__version__ == path.name.split("-")[1]
    listed = {one[0].lower(): one[1] for one in (*found["dependencies"], *found["exts_list"])}  # type: ignore[misc]
    missing = set(requirements()) - set(listed)
    # NumPy is in EasyBuild's bundle, and Python 3.13 reads TOML itself.
    assert missing == {"numpy", "tomli"}
    for name, least in requirements().items():
        if name in listed:
            assert [*map(int, listed[name].split("."))] >= [*map(int, least.split("."))], name


def test_recipes_are_linked_and_name_what_is_there() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    for path in RECIPES.rglob("*"):
        if path.suffix in (".lua", ".def", ".eb") or path.name == "package.py":
            assert str(path.relative_to(ROOT)) in page
    for line in "".join(block.text for block in blocks_of(page)).splitlines():
        for word in re.findall(r"(?:docs|slurm)/[\w./-]+", line):
            assert (ROOT / word).exists(), line
    assert f"/apps/mpidist/{mpidist.__version__}" in (RECIPES / "mpidist.lua").read_text()
    ast.parse((ROOT / "docs" / "site" / "build.py").read_text())
