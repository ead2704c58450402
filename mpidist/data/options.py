"""Options of a dataset, with tf.data's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpidist.options import AutoShardPolicy, parse_enum


class DistributeOptions:
    """How `experimental_distribute_dataset` shares a dataset out.

    Attributes:
        auto_shard_policy: An `AutoShardPolicy` or its name. DATA: each rank gets its piece of every global batch.
            FILE: its files. HINT: its shard, where the dataset says so, else as OFF. AUTO: FILE where there are
            enough files, else DATA. OFF: each rank reads all data. The table is in `mpidist.data`.
    """

    def __init__(self) -> None:
        self._auto_shard_policy = AutoShardPolicy.AUTO

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Local. Which part of the data a rank reads."""
        return self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, value: AutoShardPolicy | str) -> None:
        self._auto_shard_policy = parse_enum(AutoShardPolicy, value, "auto_shard_policy")


@dataclass
class Options:
    """Options of a `Dataset`, given by `with_options`.

    Attributes:
        experimental_distribute: How the dataset is shared out over ranks.
        deterministic: Kept for code written for tf.data; every pipeline here is deterministic.
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)
    deterministic: bool | None = None
