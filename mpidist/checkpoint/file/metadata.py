"""The program's own notes about a checkpoint, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidist.arguments import described
from mpidist.errors import DamagedCheckpointError


def encode_metadata(metadata: Mapping[str, Any]) -> str:
    """Local. Make the text that a checkpoint keeps.

    Args:
        metadata: Dictionaries with strings as keys, lists, tuples, strings, numbers (NumPy's, too), booleans and None.

    Returns:
        JSON in ASCII; of numbers that JSON lacks it has NaN and Infinity.

    Raises:
        TypeError: `metadata` is no dictionary, or holds a value of another type.
        ValueError: A container in it holds itself.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"`metadata` must be a dictionary, got {described(metadata)}")
    try:
        return json.dumps(_plain(metadata, "metadata"))
    except RecursionError:
        raise ValueError("`metadata` holds itself, or is nested too deeply for JSON") from None


def decode_metadata(text: str) -> dict[str, Any]:
    """Local. Undo `encode_metadata`; tuples come back as lists.

    Raises:
        DamagedCheckpointError: The text is none that `encode_metadata` makes.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"its metadata is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"expected its metadata to be a JSON object, got {text[:200]!r}")
    return content


def _plain(value: object, place: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"`{place}` must have strings as keys, got {key!r}: JSON would make it one")
        return {key: _plain(child, f"{place}[{key!r}]") for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(child, f"{place}[{number}]") for number, child in enumerate(value)]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(
        f"`{place}` must be a dictionary, list, string, number, boolean or None, which JSON can hold, got "
        f"{described(value)}. Save an array as a variable, or as a part of the state of an object"
    )
