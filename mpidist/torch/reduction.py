"""The reduction of a model's gradients at the end of a backward pass."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from mpidist.errors import MismatchError
from mpidist.options import ReduceOp
from mpidist.strategy.base import Strategy
from mpidist.torch import backward_end
from mpidist.torch.backward_end import EndOfBackward
from mpidist.torch.batch_norm import SyncBatchNorm
from mpidist.torch.memory import GradientMemory, Norm, require_kinds
from mpidist.torch.shares import RowShare, log_of, map_tensors, tensors_in
from mpidist.torch.together import require_alike

_RETRY = "Build and change the model in the same way on every rank, or call distribute(model) after a change"


class GradientReduction:
    """Collective. Makes `.grad` of a model's parameters the mean over ranks, at the end of each backward pass.

    Args:
        model: The model.
        strategy: The strategy of the ranks.
        sums: Whether losses add up rows, instead of averaging them.

    Attributes:
        strategy: The constructor's argument.
        sums: The constructor's argument.

    Raises:
        TypeError, ValueError: See `require_kinds`.
    """

    def __init__(self, model: torch.nn.Module, strategy: Strategy, *, sums: bool) -> None:
        self.strategy, self.sums = strategy, sums
        self.name = type(model).__name__
        # The model has hooks that lead here.
        self._model = weakref.ref(model)
        self._log = log_of(strategy)
        self._is_synchronous = True
        self._share: RowShare | None = None
        self._mark, self._has_entered, self._handed = 0, False, 0
        # Weakly, so that memory that ranks share goes with the model, and waits for no collection of garbage.
        finish = weakref.WeakMethod(self._finish)
        self._end = EndOfBackward(lambda: None if (function := finish()) is None else function())
        self._arrivals: list[Any] = []
        self._memory = self._lay_out(model)
        self._hooks = [
            model.register_forward_pre_hook(_ModelHook(self, "enter"), with_kwargs=True),
            model.register_forward_hook(_ModelHook(self, "leave"), with_kwargs=True),
        ]
        closing = weakref.WeakMethod(self._release)
        strategy.on_close(lambda: None if (release := closing()) is None else release())

    def _lay_out(self, model: torch.nn.Module, known: set[int] | None = None) -> GradientMemory:
        """Collective. Give each parameter that is trained its place; of those that are not known compare the values."""
        parameters = _trained(model)

        def line(name: str, parameter: torch.nn.Parameter) -> str:
            is_new = known is not None and id(parameter) not in known
            values = f" with values of checksum {_checksum(parameter):08x}" if is_new else ""
            return f"parameter {name} {tuple(parameter.shape)} {parameter.dtype}{values}"

        def lines() -> list[str]:
            require_kinds(parameters)
            return [line(name, parameter) for name, parameter in parameters.items()]

        require_alike(self.strategy, f"the trained parameters of {self.name}", lines, _RETRY)
        # Those of a SyncBatchNorm are the same on every rank.
        norms = [one for one in model.modules() if isinstance(one, Norm) and not isinstance(one, SyncBatchNorm)]
        memory = GradientMemory(self.strategy, parameters, norms)
        for hook in self._arrivals:
            hook.remove()
        self._arrivals = [
            place.parameter.register_post_accumulate_grad_hook(_Arrival(self, number))
            for number, place in enumerate(memory.places)
        ]
        self._node: tuple[torch.nn.Parameter, Any] | None = None
        self._layout = zlib.crc32(repr([(name, one.shape, one.dtype) for name, one in parameters.items()]).encode())
        return memory

    def parameters(self) -> Iterator[int]:
        """Local. The identities of the parameters whose gradients are combined."""
        return (id(place.parameter) for place in self._memory.places)

    def take_in(self) -> bool:
        """Collective where some parameter is new, else Local. Give new and changed parameters their places.

        Returns:
            Whether there were any.
        """
        model = self._model()
        if model is None or self._memory.fits([one for one in model.parameters() if one.requires_grad]):
            return False
        before = self._memory
        self._memory = self._lay_out(model, {id(place.parameter) for place in before.places})
        before.release()
        return True

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Local. Inside, gradients add up on each rank."""
        before, self._is_synchronous = self._is_synchronous, False
        try:
            yield
        finally:
            self._is_synchronous = before

    def enter(self, arguments: Any) -> Any:
        """Local. Find which rows the model gets; return its arguments, some of which are replaced."""
        share = self._share = self._log.share_of(arguments)
        weight = self._weight(share)
        if share is not None and share.mark:
            self._mark = zlib.crc32(share.mark.to_bytes(4, "little"), self._mark)
        if self._is_exact(share):
            return None

        def leaving(gradient: torch.Tensor) -> torch.Tensor:
            # Inside the model gradients are scaled, outside they are not: another distributed model may be in front.
            return gradient / weight if weight else gradient

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            tensor = tensor.clone()
            tensor.register_hook(leaving)
            return tensor

        return map_tensors(arguments, watched) if any(one.requires_grad for one in tensors_in(arguments)) else None

    def leave(self, output: Any) -> None:
        """Local. Have the gradients that enter at the output scaled."""
        seen = set()
        for tensor in tensors_in(output):
            # A leaf would keep the hook.
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in seen:
                seen.add(id(tensor))
                tensor.register_hook(partial(self._enters, self._share, self._weight(self._share)))

    def _is_exact(self, share: RowShare | None) -> bool:
        """Whether no gradient of these rows needs scaling on any rank."""
        return not self.sums and (share is None or share.is_even)

    def _weight(self, share: RowShare | None) -> float:
        if self.sums:
            has_rows = share is None or share.rows > 0
            return float(self.strategy.num_replicas_in_sync) if has_rows else 0.0
        return 1.0 if share is None else share.weight

    def _enters(self, share: RowShare | None, weight: float, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self._is_exact(share) and torch.is_grad_enabled():
            raise NotImplementedError(
                f"gradients of gradients (create_graph=True) through {self.name} in a batch of which ranks have "
                "unequal numbers of rows, or with reduction='sum': they cannot be weighted by rows. Make all batches "
                "even: DataLoader(..., drop_last=True), and a batch size that the number of ranks divides"
            )
        self._has_entered = True
        if self._is_synchronous:
            # A rank on which no parameter gets a gradient takes part, too.
            self._end.ask(certain=self._accumulates())
        return None if weight == 1 else gradient * weight

    def _accumulates(self) -> bool:
        """Whether the running pass is known to add to `.grad` of a parameter."""
        if self._node is not None and self._node[0].requires_grad and backward_end.accumulates(self._node[1]):
            return True
        model = self._model()
        for parameter in () if model is None else model.parameters():
            if parameter.requires_grad and backward_end.accumulates(node := backward_end.node_of(parameter)):
                self._node = parameter, node
                return True
        return False

    def arrived(self, number: int) -> None:
        """Local. Copy the gradient of a parameter that has just been computed, while it is in the cache."""
        place = self._memory.places[number]
        gradient = place.parameter.grad
        if gradient is None:
            return
        if gradient.requires_grad:
            raise NotImplementedError(
                f"backward(create_graph=True) through {self.name}: gradients that are combined over ranks have no "
                "graph. Take gradients of gradients with torch.autograd.grad(..., create_graph=True)"
            )
        if gradient.layout != torch.strided:
            raise NotImplementedError(
                f"a sparse gradient of a parameter of {self.name} of shape {tuple(place.parameter.shape)}: expected "
                "dense gradients. Make the layer with sparse=False"
            )
        if place.fits():
            place.take(gradient)
        if self._is_synchronous:
            self._end.ask()

    def _finish(self) -> None:
        if self.strategy.is_closed:
            raise RuntimeError(
                f"the strategy of {self.name} is closed, so its gradients cannot be combined. Train before it is "
                "closed, or train a copy: copy.deepcopy(model) has no strategy"
            )
        extended, name = self.strategy.extended, f"the gradients of {self.name}"
        # These raise on every rank alike, before anything has changed.
        self._require_entered()
        self.take_in()
        with extended.step(name), torch.no_grad():
            self._memory.collect(1.0 if self._share is None else self._share.weight, self._mark)
            # Ranks with other parameters raise here.
            call = f"{name}, layout {self._layout:08x}"
            extended.all_reduce(ReduceOp.MEAN, self._memory.arrays(), in_place=True, name=call)
            self._memory.distribute()
        self._mark = 0
        if not self._memory.is_agreed():
            self._memory.forget()
            raise MismatchError(
                f"{name}: the order of rows must be the same on every rank, but ranks have got rows of different "
                "batches since the last step. Every rank must take the same batches of the loader, and a sampler of "
                "your own must give the same order on every rank; a sampler that gives each rank its own rows is not "
                "shared out: call distribute(model) without its loader"
            )

    def _require_entered(self) -> None:
        handed = self._log.handed if self.sums else self._log.handed_unevenly
        is_new, self._handed = handed > self._handed, handed
        has_entered, self._has_entered = self._has_entered, False
        # Without a batch since the last time this is the gradient of a penalty, which is the same on every rank.
        if is_new and not has_entered:
            raise RuntimeError(
                f"the gradients of {self.name} did not enter at the output of a call model(...) of it, and the ranks "
                "have unequal numbers of rows of this batch, or reduction='sum': they would count wrongly. Compute the "
                "loss of what model(...) returns, and call backward() of it before that of other losses"
            )

    def _release(self) -> None:
        self._memory.release()


class _Arrival:
    """The hook of a parameter. It refers to the reduction weakly, since the reduction holds the parameter."""

    def __init__(self, reduction: GradientReduction, number: int) -> None:
        self._reduction, self._number = weakref.ref(reduction), number

    def __call__(self, _: torch.Tensor) -> None:
        reduction = self._reduction()
        if reduction is not None:
            reduction.arrived(self._number)


class _ModelHook:
    """A hook of a model. A copy of the model has one that does nothing, and holds no strategy."""

    def __init__(self, reduction: GradientReduction, way: str) -> None:
        self._reduction, self._way = weakref.ref(reduction), way

    def __call__(self, _: torch.nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        reduction = self._reduction()
        if reduction is None or not torch.is_grad_enabled():
            return None
        if self._way == "leave":
            reduction.leave(output[0])
            return None
        return reduction.enter((args, kwargs))

    def __reduce__(self) -> Any:
        # This takes any arguments and returns None, and a model that was saved loads where mpidist is not installed.
        return getattr, (nullcontext(), "__exit__")


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _checksum(parameter: torch.nn.Parameter) -> int:
    return zlib.crc32(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
