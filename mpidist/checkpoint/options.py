"""The options of a save or restore, with tf.train's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpidist.arguments import described, flag


@dataclass(frozen=True)
class CheckpointOptions:
    """Local. The options of `save` and `write`, as tf.train has them; both `enable_async` mean the same.

    Attributes:
        experimental_io_device: Kept for code written for tf.train; it changes nothing.
        experimental_enable_async_checkpoint: The older name of `enable_async`.
        experimental_write_callbacks: Must be None: `sync` says when a checkpoint is complete.
        enable_async: Whether the save is made in the background; see `Checkpoint.save`.
        experimental_skip_slot_variables: Must be False: `restore(partial=True)` leaves out what does not fit.
        experimental_sharding_callback: Must be None: a checkpoint is one file.

    Raises:
        NotImplementedError: An option is given that is not supported.
        TypeError: An option that must be True or False is neither.
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: list[Callable[..., Any]] | None = None
    enable_async: bool = False
    experimental_skip_slot_variables: bool = False
    experimental_sharding_callback: object = None

    def __post_init__(self) -> None:
        for name in (
            "experimental_enable_async_checkpoint", "enable_async", "experimental_skip_slot_variables"
        ):
            flag(name, getattr(self, name))
        ways = {
            "experimental_write_callbacks": "call them after `save`, or after `sync` of a save in the background",
            "experimental_skip_slot_variables": "leave the optimizer out of the Checkpoint, or restore `only` a part",
            "experimental_sharding_callback": "leave it out: all ranks write one file at the same time",
        }
        for name, way in ways.items():
            if getattr(self, name):
                raise NotImplementedError(f"`{name}` of CheckpointOptions is not supported; {way}")


def is_in_background(options: CheckpointOptions | None, background: bool) -> bool:
    """Local. Whether a save with these arguments is made in the background.

    Raises:
        TypeError: An argument has a wrong type.
    """
    if options is not None and not isinstance(options, CheckpointOptions):
        raise TypeError(f"`options` must be a mpidist.CheckpointOptions, or None, got {described(options)}")
    asked = options is not None and (options.enable_async or options.experimental_enable_async_checkpoint)
    return flag("background", background) or asked
