"""Run the Python blocks of a Markdown page as one program, in a folder, and note what each block prints.

    python tests/run_page.py docs/input.md FOLDER

The blocks share their names, as if they stood in one file, and a traceback names the page and its lines. What block
prints what on this rank goes to FOLDER/printed-RANK.json, by the number of the block's first line. The info string of a
fence may say more: `python no-run: REASON` is left out, `python requires torch` where torch is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import types
from pathlib import Path

from mpidist import launch
from tests.helpers.markdown import Block, blocks_of

NO_RUN = "no-run:"
REQUIRES = "requires "


def is_run(block: Block) -> bool:
    """Whether the block is part of the program, here."""
    if block.language != "python" or block.words.startswith(NO_RUN):
        return False
    if block.words.startswith(REQUIRES):
        return importlib.util.find_spec(block.words.removeprefix(REQUIRES)) is not None
    return True


def main(page: Path, folder: Path) -> None:
    """Run the page."""
    # A module of its own stands for the program: objects that it defines can be pickled, as in a file.
    program = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = program, [page.name]
    os.chdir(folder)
    printed: dict[int, str] = {}
    for block in filter(is_run, blocks_of(page.read_text())):
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(code, vars(program))
        printed[block.line] = output.getvalue()
    (folder / f"printed-{launch.world_rank()}.json").write_text(json.dumps(printed))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
