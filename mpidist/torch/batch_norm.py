"""`SyncBatchNorm`: batch normalization over the rows of all ranks."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mpidist.options import ReduceOp
from mpidist.strategy.base import Strategy
from mpidist.torch.shares import log_of

# Not an attribute of the layers: copies of a model must hold no strategy.
_strategies: weakref.WeakKeyDictionary[torch.nn.Module, Strategy] = weakref.WeakKeyDictionary()
_KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - PyTorch's own derives from it, too
    """Local. Batch normalization whose mean and variance are those of all ranks' rows: the result is one rank's.

    In training each forward pass combines sums over the ranks, and each backward pass does; every rank must make them.
    It does so in models that were given to `distribute`; in others it is as `torch.nn.BatchNorm1d` to `BatchNorm3d`.

    Args and attributes are those of `torch.nn.BatchNorm1d`.
    """

    def join(self, strategy: Strategy) -> None:
        """Local. Combine over these ranks from now on; `distribute` calls it."""
        _strategies[self] = strategy

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in PyTorch
        """Collective in training, else Local. Normalize an array of shape (rows, channels, ...)."""
        self._check_input_dim(input)
        strategy = _strategies.get(self)
        uses_batch = self.training or self.running_mean is None
        if strategy is None or not uses_batch:
            return super().forward(input)
        share = log_of(strategy).current
        # The rows of a rank without rows do not count.
        counts = share is None or share.rows > 0
        result, mean, variance, count = _normalize(input, self.weight, self.bias, self.eps, strategy, counts)
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._note(mean, variance, count)
        return result

    @torch.no_grad()
    def _note(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1, 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1 - (factor or 0.0)).add_(new.to(running.dtype), alpha=factor or 0.0)  # type: ignore[union-attr]

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  # PyTorch's name
        if input.dim() < 2:
            raise ValueError(f"expected an array of shape (rows, channels, ...), got shape {tuple(input.shape)}")

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """Local. Replace the layers of batch normalization in a model; call it before `distribute`.

        Args:
            module: The model.
            process_group: Must be None; the ranks are those of the strategy.

        Returns:
            The model, or the new layer where the model is a layer itself.

        Raises:
            ValueError: `process_group` is given.
        """
        if process_group is not None:
            raise ValueError("`process_group` must be None: the ranks are those of the strategy. Leave it out")
        if isinstance(module, _KINDS):
            return cls._from(module)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child))
        return module

    @classmethod
    def _from(cls, layer: Any) -> SyncBatchNorm:
        new = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        if layer.affine:
            # The same objects, since an optimizer may have them.
            new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked = layer.num_batches_tracked
        new.train(layer.training)
        return new


class _Sums(torch.autograd.Function):
    """The sum over ranks of float64 values, whose gradient is the sum over ranks of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, strategy: Strategy) -> torch.Tensor:
        ctx.strategy = strategy
        return _summed(values, strategy)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.strategy), None


def _summed(values: torch.Tensor, strategy: Strategy) -> torch.Tensor:
    sent = values.detach().contiguous().clone()
    result: torch.Tensor = strategy.extended.all_reduce(ReduceOp.SUM, sent, in_place=True, name="SyncBatchNorm")
    return result


def _normalize(
    value: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, strategy: Strategy,
    counts: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Collective. The normalized array, and mean, variance and number of what was normalized over, of all ranks."""
    dims = [0, *range(2, value.dim())]
    shape = [1, -1] + [1] * (value.dim() - 2)
    double = value.double()
    if not counts:
        double = double * 0
    number = torch.tensor([value.numel() / value.shape[1] if counts else 0.0], dtype=torch.float64)
    # Of float64, so that one sum over ranks of squares is exact enough.
    made: Any = _Sums
    sums = made.apply(torch.cat([double.sum(dims), double.square().sum(dims), number]), strategy)
    channels = value.shape[1]
    count = sums[-1].detach()
    mean = sums[:channels] / count
    variance = (sums[channels : 2 * channels] / count - mean.square()).clamp_min(0)
    result = (value.double() - mean.view(shape)) * (variance + eps).rsqrt().view(shape)
    result = result.to(value.dtype)
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result, mean.detach(), variance.detach(), float(count)
