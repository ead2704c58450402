"""The notebook of the examples runs from top to end in a kernel, and prints what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.markdown import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def printed(cells: Any) -> list[str]:
    return [
        "".join("".join(one.get("text", "")) for one in cell["outputs"] if one["output_type"] == "stream")
        for cell in cells if cell["cell_type"] == "code"
    ]


@pytest.mark.timeout_seconds(200)
# Its own pieces: sockets that a kernel leaves to the collector, and a loop that asyncio sets up for it.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_a_notebook_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shown = printed(json.loads(NOTEBOOK.read_text())["cells"])
    assert any(shown)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(notebook["cells"]) == shown
