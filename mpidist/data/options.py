"""Options of a dataset, with tf.data's names."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpidist.arguments import flag
from mpidist.options import AutoShardPolicy, parse_enum


# Slots make a misspelt option an error.
@dataclass(slots=True, repr=False)
class DistributeOptions:
    """Options of `experimental_distribute_dataset` for sharing a dataset.

    Attributes:
        auto_shard_policy: An `AutoShardPolicy` or its name. DATA: each rank gets its piece of every global batch.
            FILE: each rank gets its files. HINT: each rank gets its shard where the dataset has a hint, else as OFF.
            AUTO, which holds unless another is set: FILE where there are enough files and nothing else, else DATA. OFF:
            each rank reads all data. The docstring of `mpidist.data` has the table.
    """

    _auto_shard_policy: AutoShardPolicy | None = field(default=None, init=False)
    _is_copy: bool = field(default=False, init=False, compare=False)

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Local. The policy by which ranks share the data."""
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, value: AutoShardPolicy | str) -> None:
        if self._is_copy:
            raise _of_a_dataset("experimental_distribute.auto_shard_policy")
        self._auto_shard_policy = parse_enum(AutoShardPolicy, value, "auto_shard_policy")

    @property
    def is_set(self) -> bool:
        """Local. Whether a policy was set, be it AUTO."""
        return self._auto_shard_policy is not None

    def __repr__(self) -> str:
        return f"DistributeOptions(auto_shard_policy={self.auto_shard_policy.name})"


@dataclass(slots=True)
class Options:
    """Options of a `Dataset`, set by `with_options`.

    Attributes:
        experimental_distribute: Options for sharing the dataset between ranks.
        deterministic: Kept for code written for tf.data; every pipeline here is deterministic.
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)
    deterministic: bool | None = None
    _is_copy: bool = field(default=False, init=False, compare=False, repr=False)

    # Hidden from type checkers, which would take any name for an option.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            # Not there yet while the object is made.
            if getattr(self, "_is_copy", False):
                raise _of_a_dataset(name)
            # `super` would mean the class without slots, which `dataclass` replaces.
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        if self.deterministic is not None:
            flag("deterministic", self.deterministic, owner="Options: ")

    def of_a_dataset(self) -> Options:
        """Local. A copy that cannot be changed, since the dataset would not notice a change."""
        copied = Options().merge(self)
        for one in (copied.experimental_distribute, copied):
            object.__setattr__(one, "_is_copy", True)
        return copied

    def merge(self, options: Options) -> Options:
        """Local. New options: those that are set in `options`, and else these.

        Raises:
            TypeError: `options` are not `Options`, or an option has another type.
        """
        if not isinstance(options, Options):
            raise TypeError(f"expected mpidist.data.Options, got {options!r} of type {type(options).__name__}")
        merged = Options(deterministic=self.deterministic if options.deterministic is None else options.deterministic)
        for one in (self, options):
            distribute = one.experimental_distribute
            if not isinstance(distribute, DistributeOptions):
                raise TypeError(
                    "Options.experimental_distribute: expected mpidist.data.DistributeOptions, got "
                    f"{distribute!r} of type {type(distribute).__name__}. Set a policy with "
                    "options.experimental_distribute.auto_shard_policy = policy"
                )
            if distribute.is_set:
                merged.experimental_distribute.auto_shard_policy = distribute.auto_shard_policy
        return merged


def _of_a_dataset(name: str) -> AttributeError:
    return AttributeError(
        f"{name} cannot be set on what `dataset.options()` returns, which is a copy, and the dataset would not notice: "
        "make new options, `options = mpidist.data.Options()`, set them, and use the dataset that "
        "`dataset.with_options(options)` returns"
    )


def options_of_all(caller: str, given: list[Options]) -> Options:
    """Local. The options of a dataset made of several ones: those that are set in any of them.

    Raises:
        ValueError: Two of them have different policies: a rank's share would depend on which one is taken.
    """
    distributes = [one.experimental_distribute for one in given]
    policies = dict.fromkeys(one.auto_shard_policy.name for one in distributes if one.is_set)
    if len(policies) > 1:
        raise ValueError(
            f"{caller}: expected datasets with one auto_shard_policy, got {' and '.join(policies)}. Call with_options "
            f"on the result of {caller} instead"
        )
    return functools.reduce(Options.merge, given, Options())
