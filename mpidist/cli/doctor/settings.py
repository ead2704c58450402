"""The doctor's look at mpidist's own variables of the environment: unknown names, invalid values."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator

from mpidist.cli.doctor.finding import Finding
from mpidist.recorder.time_limits import LIMIT_VARIABLE, WARN_VARIABLE, limit_seconds, warn_seconds

_PREFIX = "MPIDIST_"
_TIMES = {LIMIT_VARIABLE: limit_seconds, WARN_VARIABLE: warn_seconds}
_PLACES = ("MPIDIST_JOB_DIR", "MPIDIST_RUN", "MPIDIST_SHARED_MEMORY", "MPIDIST_TRACE")
_LISTS = ("MPIDIST_SIGNALS",)
# With another value a program ends at its start. Texts: the modules that read these load NumPy.
CHOICES = {
    "MPIDIST_COLLECTIVE": ("AUTO", "MPI", "RING", "NODE", "STAGED", "NCCL"),
    "MPIDIST_DEVICE": ("cpu", "gpu"),
    "MPIDIST_GPU_TRANSPORT": ("auto", "nccl", "cuda-aware", "staged"),
    "MPIDIST_WINDOW": ("AUTO", "RMA", "SOCKETS"),
}
# Another value counts as if the variable were not set; for the first one as 1.
_WORDS = ("1", "true", "yes", "on", "0", "false", "no", "off")
SWITCHES = {
    "MPIDIST_CHECK": ("0", "1"), "MPIDIST_ABORT": ("0", "1"), "MPIDIST_COMPILE": ("0", "1"),
    "MPIDIST_PEER_MEMORY": ("0", "1"), "MPIDIST_PROTECT": ("0", "1"), "MPIDIST_SHARE_GPU": _WORDS,
}
# Variables of earlier versions, and what holds now.
GONE = {"MPIDIST_TUNE": "the sizes at which AUTO changes its backend are constants"}
VARIABLES = tuple(sorted((*_TIMES, *_PLACES, *_LISTS, *CHOICES, *SWITCHES)))


def look_at_settings() -> Iterator[Finding]:
    """Local. Look at the variables of the environment that begin with `MPIDIST_`."""
    yield from look_at_time_limits()
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX)):
        value, words = os.environ[name].strip(), {**CHOICES, **SWITCHES}.get(name)
        if name in GONE:
            yield Finding("settings", "note", f"{name} is gone: {GONE[name]}", f"unset {name}")
        elif name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, 1, 0.85)
            fix = f"export {near[0]}={shlex.quote(value)}, if that is meant" if near else f"unset {name}"
            yield Finding("settings", "note", f"mpidist has no variable {name}: the setting has no effect", fix)
        elif value and words and value.lower().replace("_", "-") not in [word.lower() for word in words]:
            text = f"{name} must be one of {', '.join(words)}, got {value!r}"
            yield Finding("settings", "wrong" if name in CHOICES else "note", text, f"unset {name}")


def look_at_time_limits() -> Iterator[Finding]:
    """Local. Look at the variables without which MPI cannot start if they are wrong."""
    for name, read in _TIMES.items():
        try:
            read()
        except ValueError as error:
            yield Finding("settings", "wrong", str(error), f"unset {name}")
