"""Options of a dataset, with tf.data's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpidist.options import AutoShardPolicy, parse_enum


class DistributeOptions:
    """Options of `experimental_distribute_dataset` for sharing a dataset.

    Attributes:
        auto_shard_policy: An `AutoShardPolicy` or its name. DATA: each rank gets its piece of every global batch.
            FILE: each rank gets its files. HINT: each rank gets its shard where the dataset has a hint, else as OFF.
            AUTO: FILE where there are enough files, else DATA. OFF: each rank reads all data. The docstring of
            `mpidist.data` has the table.
    """

    def __init__(self) -> None:
        self._auto_shard_policy = AutoShardPolicy.AUTO

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Local. The policy by which ranks share the data."""
        return self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, value: AutoShardPolicy | str) -> None:
        self._auto_shard_policy = parse_enum(AutoShardPolicy, value, "auto_shard_policy")


@dataclass
class Options:
    """Options of a `Dataset`, set by `with_options`.

    Attributes:
        experimental_distribute: Options for sharing the dataset between ranks.
        deterministic: Kept for code written for tf.data; every pipeline here is deterministic.
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)
    deterministic: bool | None = None
