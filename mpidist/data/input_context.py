"""`InputContext`: the place of one input pipeline among all of them, as an input function gets it."""

from __future__ import annotations

from dataclasses import dataclass

from mpidist.arguments import whole


@dataclass(frozen=True)
class InputContext:
    """The place of an input pipeline. One rank is one pipeline and one replica, so it is `(n, rank, n)`.

    Attributes:
        num_input_pipelines: Number of pipelines.
        input_pipeline_id: Number of this pipeline, from 0 on.
        num_replicas_in_sync: Number of replicas that share a global batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        whole("num_input_pipelines", self.num_input_pipelines, least=1)
        whole("input_pipeline_id", self.input_pipeline_id, least=0)
        whole("num_replicas_in_sync", self.num_replicas_in_sync, least=1)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Local. The number of examples of a global batch that one replica gets.

        Raises:
            ValueError: `global_batch_size` is not divisible by the number of replicas.
        """
        if whole("global_batch_size", global_batch_size) % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync!r} "
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return f"mpidist.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
