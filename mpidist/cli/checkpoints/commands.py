"""The commands of `mpidist checkpoint`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from mpidist.cli.texts import AS_JSON, list_commands, text_of, write
from mpidist.errors import MpidistError


class _UnreadableError(click.ClickException):
    """Nothing could be compared: an exit code that is not that of a difference."""

    exit_code = 2


@click.group(
    "checkpoint", short_help="Look at checkpoints, compare, verify and convert them.", invoke_without_command=True,
)
def checkpoint() -> None:
    """Look at checkpoints, compare, verify and convert them, without the program that wrote them.

    FILE is a checkpoint, or a directory, of which the latest one is taken.
    """
    list_commands()


@checkpoint.command("ls", short_help="List the checkpoints of a directory.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
@AS_JSON
def list_directory(directory: str, as_json: bool) -> None:
    """List the checkpoints of DIRECTORY, the oldest first; the exit code is 1 where one is damaged."""
    rows = _call("look", "rows_of", directory)
    _show(rows, as_json, _look().text_of_rows)
    if any("error" in row for row in rows):
        raise click.exceptions.Exit(1)


@checkpoint.command("show", short_help="Show what a checkpoint holds.")
@click.argument("file", type=click.Path())
@AS_JSON
def show(file: str, as_json: bool) -> None:
    """Show the paths, shapes and dtypes of FILE, and its metadata; the arrays themselves are not read."""
    _show(_call("look", "content_of", file), as_json, _look().text_of_content)


@checkpoint.command("diff", short_help="Compare two checkpoints.")
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@AS_JSON
def compare(first: str, second: str, as_json: bool) -> None:
    """Compare FIRST and SECOND: paths, shapes, dtypes, metadata, and values by their checksums, which reads no array.

    The exit code is 0 where they are the same, 1 where they differ, and 2 where one cannot be read.
    """
    try:
        found = _call("look", "differences", first, second)
    except click.ClickException as error:
        raise _UnreadableError(error.message) from None
    _show(found, as_json, _look().text_of_differences)
    if found:
        raise click.exceptions.Exit(1)


@checkpoint.command("verify", short_help="Read checkpoints and compare them with their checksums.")
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@AS_JSON
def verify(paths: tuple[str, ...], as_json: bool) -> None:
    """Read all of PATHS, files or directories with all their checkpoints; the exit code is 1 where one is damaged."""
    rows = _call("look", "verified", paths)
    _show(rows, as_json, _look().text_of_verified)
    if any("error" in row for row in rows):
        raise click.exceptions.Exit(1)


@checkpoint.command("convert", short_help="Convert from and to .npz, .safetensors, .pt and .weights.h5.")
@click.argument("source", type=click.Path(exists=True))
@click.argument("target", type=click.Path())
@click.option("--below", default="", metavar="PATH", help="Path in the checkpoint; without it all of it.")
@click.option("--force", is_flag=True, help="Replace an existing TARGET.")
@AS_JSON
def convert(source: str, target: str, below: str, force: bool, as_json: bool) -> None:
    """Convert SOURCE to TARGET; one of them is a checkpoint of mpidist (.h5), the suffix says what the other one is.

    .npz (NumPy), .safetensors, .pt or .pth (a state_dict of PyTorch), .weights.h5 (Keras). A path of a checkpoint,
    `layers/0/kernel`, has dots in safetensors and PyTorch: `layers.0.kernel`. --below=model takes the arrays below
    `model` alone out of a checkpoint, without that part of their paths; into a checkpoint it puts them there.
    """
    done = _call("convert", "convert", source, target, below, force=force)
    _show(done, as_json, _text_of_conversion)


def _text_of_conversion(done: Mapping[str, Any]) -> str:
    notes = "".join(f"{name}: {why}\n" for name, why in done["notes"].items())
    return f"{done['arrays']} arrays, {done['bytes']} bytes\n{notes}"


def _look() -> Any:
    return importlib.import_module("mpidist.cli.checkpoints.look")


def _call(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    # By name: it loads NumPy.
    function = getattr(importlib.import_module(f"mpidist.cli.checkpoints.{module}"), name)
    try:
        return function(*arguments, **options)
    except (MpidistError, OSError, ValueError, TypeError, KeyError) as error:
        raise click.ClickException(text_of(error)) from None


def _show(result: Any, as_json: bool, as_text: Callable[..., str]) -> None:
    if as_json:
        write(json.dumps(result, indent=1) + "\n")
    else:
        write(as_text(result))
