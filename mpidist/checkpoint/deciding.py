"""The arguments of a manager and its decisions: rank 0 decides for all, once all are known to have the same ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from mpidist.arguments import described, flag, whole
from mpidist.checkpoint.background.save import BackgroundSave
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.directory.keeping import checked_metrics
from mpidist.checkpoint.directory.managed import ManagedDirectory
from mpidist.comm.group.agreement import exchange, require_same
from mpidist.comm.group.communicator import Communicator

T = TypeVar("T")


class Given(NamedTuple):
    """The arguments that ranks compare.

    Attributes:
        name: The name of an argument that is True or False.
        value: Its value.
        number: The number of a checkpoint; None where there is none.
        metrics: Its metrics.
    """

    name: str
    value: Any
    number: Any = None
    metrics: Mapping[str, Any] | None = None


def decide_together(
    group: Communicator, files: ManagedDirectory, saving: BackgroundSave | None, decide: Callable[[], T], given: Given
) -> T:
    """Collective. Call `decide` on rank 0 for all; raise on all where directories or numbers differ or are invalid.

    Args:
        group: The ranks.
        files: The directory.
        saving: The save in the background that has begun. It is given up where a rank could not write its share.
        decide: The function that decides; it is called on rank 0.
        given: The arguments of the manager's method.
    """
    decision: T | None = None
    error: Exception | None = None
    noted: dict[str, float] | None = None
    number = given.number
    try:
        number = None if number is None else whole("checkpoint_number", number, least=0)
        files.require_place()
        flag(given.name, given.value)
        noted = checked_metrics(given.metrics)
        decision = decide() if group.rank == 0 else None
    except Exception as caught:
        error = caught
    # As a text: NaN is not equal to itself.
    metrics = None if noted is None else repr(sorted(noted.items()))
    mine = (files.directory, files.name, number), files.rules, metrics
    has_failed = saving is not None and saving.write_error is not None
    everyone = exchange(group, f"looking into {files.directory!r}", (mine, decision, has_failed), error)
    what = (
        "directory, name and number of a CheckpointManager's checkpoint", "`max_to_keep` and the other rules of a "
        "CheckpointManager", "`metrics` of a checkpoint",
    )
    for place, text in enumerate(what):
        require_same([its[place] for its, *_ in everyone], text, "Pass the same ones on every rank.")
    if saving is not None and any(failed for *_, failed in everyone):
        saving.give_up()
    return cast(T, everyone[0][1])


def checked_checkpoint(checkpoint: object) -> Checkpoint:
    """Local. The checkpoint of a manager.

    Raises:
        TypeError: `checkpoint` is no `Checkpoint`.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"`checkpoint` must be a mpidist.Checkpoint, got {described(checkpoint)}. Put the object into one: "
            "CheckpointManager(mpidist.Checkpoint(model=...), ...)"
        )
    return checkpoint


def check_names(checkpoint_name: object, step_counter: object, steps: Mapping[str, object]) -> None:
    """Local. Check arguments of a manager.

    Args:
        checkpoint_name: The argument.
        step_counter: The argument.
        steps: The arguments that need it, by name.

    Raises:
        TypeError, ValueError: An argument has a wrong type or value.
    """
    for argument, value in steps.items():
        if value is not None and step_counter is None:
            raise ValueError(f"`{argument}={value!r}` needs a `step_counter`, got None")
    if step_counter is not None and not callable(getattr(step_counter, "value", None)):
        raise TypeError(f"`step_counter` must be a variable that counts steps, got {described(step_counter)}")
    if not isinstance(checkpoint_name, str):
        raise TypeError(f"`checkpoint_name` must be a string, got {described(checkpoint_name)}")
    if os.sep in checkpoint_name or not checkpoint_name:
        raise ValueError(
            f"`checkpoint_name` must be a plain file name, got {checkpoint_name!r}. A directory is for `directory`"
        )
