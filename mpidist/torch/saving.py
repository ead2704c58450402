"""The state of PyTorch's modules, optimizers, schedules and scalers, and of a distributed loader, in checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import torch

from mpidist.checkpoint import PerReplica, register
from mpidist.torch.distribution import strategy_of
from mpidist.torch.loader import DistributedLoader
from mpidist.torch.starting import rank_of, seed_of

_STRUCTURE, _TENSORS, _SHAPES = "structure", "tensors", "shapes"


def register_all() -> None:
    """Local. Tell `mpidist.Checkpoint` of these classes; the import of `mpidist.torch` does it."""
    register(torch.nn.Module, _module_state, _load_module, group=strategy_of)
    register(torch.optim.Optimizer, _optimizer_state, _load_optimizer)
    for kind in (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler):
        register(kind, _state, _load)
    register(DistributedLoader, _loader_state, _load_loader, group=lambda loader: loader.strategy)


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    """The tensors by the names of their modules: `layers/0/weight`."""
    nest: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        at = nest
        *path, last = name.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value.detach() if isinstance(value, torch.Tensor) else split(value)
    return nest


def _load_module(module: torch.nn.Module, saved: dict[str, Any]) -> None:
    values: dict[str, Any] = {}
    for name, like in module.state_dict().items():
        found: Any = saved
        for part in name.split("."):
            if not isinstance(found, dict) or part not in found:
                raise ValueError(
                    f"the checkpoint has no value of {name!r} of {type(module).__name__}. Build the model as it was "
                    "when the checkpoint was saved"
                )
            found = found[part]
        values[name] = tensor(found, like.dtype) if isinstance(like, torch.Tensor) else joined(found)
    # In place: the parameters keep their memory, and the optimizer its parameters.
    module.load_state_dict(values)


def _state(value: Any) -> dict[str, Any]:
    return split(value.state_dict())


def _load(value: Any, saved: dict[str, Any]) -> None:
    value.load_state_dict(joined(saved))


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {**_state(optimizer), _SHAPES: json.dumps(_shapes_of(optimizer))}


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """PyTorch numbers the parameters, and does not look at the shapes of their state before the next step."""
    text, own = saved.get(_SHAPES), _shapes_of(optimizer)
    its = own if text is None else json.loads(str(text))
    if its != own:
        at = next((number for number, (one, other) in enumerate(zip(its, own, strict=False)) if one != other), None)
        what = f"{len(its)} parameters" if at is None else f"shape {tuple(its[at])} of parameter {at}"
        expected = f"{len(own)}" if at is None else f"{tuple(own[at])}"
        raise ValueError(f"expected the state of an optimizer of the same parameters, got {what}, not {expected}")
    _load(optimizer, saved)


def _shapes_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]


def _loader_state(loader: DistributedLoader) -> dict[str, Any]:
    state = loader.state()
    order = state.pop("order")
    # For dropout: each rank continues with its own numbers.
    state |= {"random": PerReplica(torch.get_rng_state().numpy()), "replicas": loader.strategy.num_replicas_in_sync}
    return state if order is None else {**state, "order": np.frombuffer(order, np.uint8)}


def _load_loader(loader: DistributedLoader, saved: dict[str, Any]) -> None:
    order = saved.get("order")
    loader.load_state({**saved, "order": None if order is None else np.asarray(order, np.uint8).tobytes()})
    if int(saved["replicas"]) == loader.strategy.num_replicas_in_sync:
        torch.set_rng_state(torch.from_numpy(np.array(saved["random"].value, np.uint8)))
    else:
        # Other ranks than those that saved: all get new numbers.
        at = (int(saved["epoch"]) << 32) + int(saved["done"])
        torch.manual_seed(seed_of(seed_of(int(saved["seed"]), at), rank_of(loader.strategy) + 1))


def split(nest: Any) -> dict[str, Any]:
    """Local. A nest of tensors and plain values, as a text of its structure and its tensors by number.

    >>> split({"lr": 0.1, "betas": (0.9, 0.99)})["structure"]
    '{"dict": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.99]}]]}'

    Raises:
        TypeError: A value is neither a tensor, a plain value nor a container of these.
    """
    tensors: dict[str, torch.Tensor] = {}

    def described(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[str(len(tensors))] = value.detach()
            return {"tensor": len(tensors) - 1, "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, dict):
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[name, described(one, f"{path}/{name}")] for name, one in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [described(one, f"{path}/{number}") for number, one in enumerate(value)]}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(
            f"{path or 'the state'}: expected tensors, numbers, strings, lists and dicts, got "
            f"{type(value).__name__}: {value!r}, which a checkpoint does not save. Leave it out of `state_dict`"
        )

    text = json.dumps(described(nest, ""))
    return {_STRUCTURE: text, _TENSORS: tensors}


def joined(saved: dict[str, Any]) -> Any:
    """Local. The nest that `split` has taken apart."""
    tensors = saved.get(_TENSORS, {})

    def made(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return tensor(tensors[str(value["tensor"])], getattr(torch, value["dtype"]))
        (kind, parts), *_ = value.items()
        if kind in ("dict", "counter"):
            nest = {name: made(one) for name, one in parts}
            return Counter(nest) if kind == "counter" else nest
        ones = [made(one) for one in parts]
        return tuple(ones) if kind == "tuple" else ones

    return made(json.loads(str(saved[_STRUCTURE])))


def tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Local. A saved array as a tensor of its own memory."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    array = np.array(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(array).to(dtype)
