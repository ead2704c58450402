"""PyTorch's models, trained by all ranks: two lines of a program change.

    strategy = mpidist.MultiWorkerMirroredStrategy()
    model, loader = mpidist.torch.distribute(model, loader)

`torch.distributed` is not used, and no module of PyTorch is changed. The guide is `docs/frameworks/torch.md`.
"""

from __future__ import annotations

from mpidist.torch.batch_norm import SyncBatchNorm
from mpidist.torch.data_parallel import DistributedDataParallel
from mpidist.torch.distribution import distribute, no_sync
from mpidist.torch.loader import DistributedLoader
from mpidist.torch.saving import register_all

__all__ = ["DistributedDataParallel", "DistributedLoader", "SyncBatchNorm", "distribute", "no_sync"]

register_all()
