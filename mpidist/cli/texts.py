"""Texts of commands: files and output are UTF-8 in any locale, and errors of reading and writing are one line."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import click

# Of every command whose output a program may read.
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs and tickets.")


def list_commands() -> None:
    """Local. List the commands of a group where none is named; the exit code of click's own list differs by version."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def text_of(error: Exception) -> str:
    """Local. The text of an error for people: without the number that Python puts in front of those of the system."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename!r}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def is_colored() -> bool:
    """Local. Whether output may have colors: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def read_text(path: Path, errors: str = "strict") -> str:
    """Local. The text of a file.

    Args:
        path: The file.
        errors: The treatment of bytes that are no UTF-8, as in `bytes.decode`.

    Raises:
        ValueError: It cannot be read, or is no UTF-8; the text names the file.
    """
    try:
        return path.read_bytes().decode("utf-8", errors)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got another encoding: {error}. Write it as UTF-8") from None


def write(text: str) -> None:
    """Local. Write lines to the output of a command.

    Args:
        text: The lines; what Python could not decode in an argument is written as it came.

    Raises:
        click.ClickException: They cannot be written, as on a full disk.
        OSError: The reader of the pipe has ended; click then ends the command without a message.
    """
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        encoded = text.encode("utf-8", "backslashreplace")
    try:
        click.echo(encoded, nl=False)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # Python would try to write what is left at its end, and fail once more.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
        raise click.ClickException(f"the output cannot be written: {error.strerror or error}") from None
