"""The end of a backward pass: PyTorch calls a function there, by a private name that is tested here first."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch


class EndOfBackward:
    """Calls a function at the end of the backward pass that is running, once for a pass.

    A pass may run inside another one, where layers are computed again (`torch.utils.checkpoint`): the call is that of
    the pass that has asked first.

    Args:
        function: A function that is called on the thread that runs the pass; an exception in it comes out of
            `backward`.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._pending: weakref.ref[_Call] | None = None

    def ask(self, *, certain: bool = True) -> None:
        """Local. Have the function called at the end of this pass, which must be running.

        Args:
            certain: False asks for the call only if something else in this pass is certain.
        """
        # A pass that ended with an error drops its calls, so the reference says whether one is pending still.
        call = None if self._pending is None else self._pending()
        if call is None:
            call = _Call(self)
            self._pending = weakref.ref(call)
            _queue(call)
        call.is_certain |= certain

    def run(self, *, certain: bool) -> None:
        """Local. Call the function; the next pass must ask again."""
        self._pending = None
        if certain:
            self._function()


class _Call:
    def __init__(self, end: EndOfBackward) -> None:
        self._end, self.is_certain = end, False

    def __call__(self) -> None:
        self._end.run(certain=self.is_certain)


def _queue(call: Callable[[], None]) -> None:
    # Private in PyTorch; its own FSDP uses it.
    torch.autograd.Variable._execution_engine.queue_callback(call)  # noqa: SLF001  # PyTorch has no public name


def node_of(parameter: torch.nn.Parameter) -> Any:
    """Local. The node of the graph that adds gradients to `parameter.grad`."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def accumulates(node: Any) -> bool:
    """Local. Whether the running pass is known to add to the `.grad` of this node's parameter.

    It does not add where `autograd.grad` runs the pass, or where only a pass inside it reaches the parameter.
    """
    ask = _question()
    if ask is None:
        return False
    try:
        return bool(ask(node))
    except RuntimeError:
        # So it answers where `autograd.grad` takes the gradient of this very parameter.
        return False


@functools.cache
def _question() -> Callable[[Any], bool] | None:
    """PyTorch's private function that says whether a pass reaches a node; None where it answers wrongly."""
    ask: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)  # noqa: SLF001  # likewise
    if ask is None:
        return None
    answers: list[bool] = []

    def hook(_: torch.Tensor) -> None:
        try:
            answers.append(bool(ask(node)))
        except RuntimeError:
            answers.append(False)

    with torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(1))
        node = node_of(parameter)
        output = parameter * 2
        output.register_hook(hook)
        output.backward(retain_graph=True)
        torch.autograd.grad(output, parameter)
    return ask if answers == [True, False] else None


@functools.cache
def problem() -> str:
    """Local. Test that PyTorch calls a function once at the end of a pass, behind all gradients; empty if it does."""
    seen: list[str] = []
    with torch.enable_grad():
        first, last = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        end = EndOfBackward(lambda: seen.append("end" if first.grad is not None else "too early"))

        def arrived(_: torch.Tensor) -> None:
            seen.append("gradient")
            end.ask()

        try:
            for parameter in (first, last):
                parameter.register_post_accumulate_grad_hook(arrived)
            ((first * 2).sin() * last).backward()
            (first * last).backward()
        except (AttributeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    expected = ["gradient", "gradient", "end"] * 2
    return "" if seen == expected else f"expected the calls {expected}, got {seen}"


def require() -> None:
    """Local. Raise where PyTorch does not call functions at the end of a backward pass.

    Raises:
        RuntimeError: This version of PyTorch does not call them; the text names it.
    """
    if text := problem():
        raise RuntimeError(
            f"PyTorch {torch.__version__} does not call a function at the end of a backward pass as expected ({text}), "
            "and mpidist.torch needs that to combine gradients. Install one of the versions from 2.4 to 2.13, with "
            "which it was tested"
        )
