"""Texts of commands: what is read and written in any locale, and what cannot be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpidist.cli.main import main
from mpidist.cli.texts import read_text, text_of

ROOT = str(Path(__file__).resolve().parents[3])
PROGRAM = "from mpidist.cli.main import main; main(prog_name='mpidist')"
# Python decodes arguments, and would decode files, as ASCII.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(
    *arguments: str | bytes, output: int = subprocess.PIPE, environment: Mapping[str, str] = os.environ
) -> tuple[int, bytes, str]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=output, stderr=subprocess.PIPE, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
    )
    return result.returncode, result.stdout or b"", result.stderr.decode()


def site(tmp_path: Path, text: bytes) -> Path:
    path = tmp_path / "site.toml"
    path.write_bytes(text)
    return path


@pytest.mark.parametrize("environment", [ASCII, {"PYTHONIOENCODING": "ascii"}], ids=["C", "ASCII output"])
def test_a_script_is_utf8_in_any_locale(tmp_path: Path, environment: dict[str, str]) -> None:
    path = site(tmp_path, 'mpi = "pmix"\n[sbatch]\ncomment = "Größe"\n'.encode())
    code, output, errors = run("sbatch", "--site", str(path), "trän.py".encode(), environment=environment)
    assert (code, errors) == (0, "")
    assert {"#SBATCH --comment='Größe'", "#SBATCH --job-name='trän'"} <= set(output.decode().splitlines())


def test_a_finding_is_written_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "jöb.sbatch"
    path.write_text("#!/bin/bash\n# Größe\nsrun -K python träin.py\n", encoding="utf-8")
    code, output, errors = run("lint", os.fsencode(path), environment={"PYTHONIOENCODING": "ascii"})
    assert (code, errors) == (1, "")
    assert output.startswith(os.fsencode(path) + b":3: srun without --mpi")


def test_a_script_in_another_encoding_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_bytes(b"#!/bin/bash\n# Gr\xf6\xdfe\nsrun --mpi=pmix -K python train.py\n")
    result = CliRunner().invoke(main, ["lint", str(path)])
    assert (result.exit_code, result.output) == (0, "")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = site(tmp_path, b'mpi = "\xff"')
    result = CliRunner().invoke(main, ["sbatch", "--site", str(path), "train.py"])
    assert (result.exit_code, f"{path}: expected text in UTF-8" in result.output) == (1, True)
    path.write_text("")

    def fail(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    for arguments in (["lint", str(path)], ["sbatch", "--site", str(path), "train.py"]):
        result = CliRunner().invoke(main, arguments)
        assert (result.exit_code, result.output) == (1, f"Error: {path} cannot be read: Input/output error\n")
    with pytest.raises(ValueError, match="Input/output error"):
        read_text(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["sbatch", "--site", "SITE", "train.py"], ["lint", "JOB"], ["doctor"], ["doctor", "--json"]],
    ids=["sbatch", "lint", "doctor", "doctor --json"],
)
def test_a_full_disk_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "job").write_text("#!/bin/bash\nsrun -K python train.py\n")
    places = {"SITE": str(site(tmp_path, b'mpi = "pmix"')), "JOB": str(tmp_path / "job")}
    full = os.open("/dev/full", os.O_WRONLY)
    code, _, errors = run(*(places.get(word, word) for word in arguments), output=full)
    os.close(full)
    assert (code, errors) == (1, "Error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.h5"), "No such file or directory: 'a.h5'"),
        (FileNotFoundError(errno.ENOENT, "no checkpoint 'a.h5'"), "no checkpoint 'a.h5'"),
        (OSError("it cannot be read"), "it cannot be read"), (KeyError("there is no 'a'"), "there is no 'a'"),
        (ValueError("expected 3"), "expected 3"),
    ],
)
def test_an_error_is_told_without_numbers(error: Exception, text: str) -> None:
    assert text_of(error) == text


def test_a_checkpoint_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    for name in ("show", "verify"):
        result = CliRunner().invoke(main, ["checkpoint", name, str(tmp_path / "a")])
        assert (result.exit_code, "[Errno" in result.output) == (1, False)
        assert "no checkpoint" in result.output
