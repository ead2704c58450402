"""`DistributedDataParallel`, for scripts that use PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpidist.strategy.base import Strategy
from mpidist.torch.distribution import distribute, no_sync

# Arguments of PyTorch's class that change nothing here, or only how it works inside.
_TAKEN = frozenset({
    "device_ids", "output_device", "dim", "bucket_cap_mb", "find_unused_parameters", "check_reduction",
    "gradient_as_bucket_view", "static_graph", "broadcast_buffers", "init_sync", "skip_all_reduce_unused_params",
})


class DistributedDataParallel(torch.nn.Module):
    """Collective. A model that all ranks train, with the names of `torch.nn.parallel.DistributedDataParallel`.

    A script for PyTorch's own changes its import, and makes a strategy in place of `init_process_group`. Batches are
    per rank where the script has a `DistributedSampler`; a loader that `distribute` returned has global batches.

    Args:
        module: The model, in host memory.
        device_ids: Must be None or empty.
        strategy: The strategy. Default: that of the scope, else the only open one of this process.
        options: Further arguments of PyTorch's class; those that are accepted change nothing.

    Attributes:
        module: The constructor's argument.
        is_data_parallel: True.

    Raises:
        ValueError: `device_ids` names devices; and as `distribute`.
        TypeError: PyTorch's class has no such argument; and as `distribute`.
        NotImplementedError: An argument of PyTorch's class is not supported.
    """

    is_data_parallel = True

    def __init__(
        self, module: torch.nn.Module, device_ids: Any = None, *, strategy: Strategy | None = None, **options: Any
    ) -> None:
        super().__init__()
        if device_ids:
            raise ValueError(f"`device_ids` must be None for a model in host memory, got {device_ids!r}. Leave it out")
        for name, value in options.items():
            if name in ("process_group", "delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision",
                        "device_mesh"):
                if value is not None:
                    raise NotImplementedError(
                        f"DistributedDataParallel({name}=...) is not supported. Leave it out; which ranks train "
                        "together is said by `strategy`"
                    )
            elif name not in _TAKEN:
                raise TypeError(f"DistributedDataParallel has no argument {name!r}")
        self.module = module
        distribute(module, strategy=strategy)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Local. Call the model."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Local. Inside, gradients add up on each rank; see `mpidist.torch.no_sync`."""
        with no_sync(self.module):
            yield

    def join(self, *_: Any, **__: Any) -> Any:
        """Local. Not supported: give the loader to `distribute`, which makes batches of unequal rows exact.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "DistributedDataParallel.join is not supported. It is for ranks with unequal numbers of batches: pass the "
            "loader to mpidist.torch.distribute(model, loader), which gives every rank its rows of every batch"
        )

    def register_comm_hook(self, *_: Any, **__: Any) -> None:
        """Local. Not supported.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "DistributedDataParallel.register_comm_hook is not supported: mpidist combines the gradients"
        )
