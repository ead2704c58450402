"""`InputContext`: what an input function is told about its place among the pipelines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputContext:
    """A pipeline's place; one rank is one pipeline and one replica, so `(n, rank, n)` under every strategy.

    Attributes:
        num_input_pipelines: How many there are.
        input_pipeline_id: Which one this is.
        num_replicas_in_sync: How many replicas share a global batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Local. The part of a global batch that is one replica's.

        Raises:
            ValueError: `global_batch_size` is not divisible by the number of replicas.
        """
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync!r} "
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return f"mpidist.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
