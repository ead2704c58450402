"""Checkpoints of models, optimizers and loaders: a job that resumes continues as if nothing had happened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="PyTorch is in the extra 'torch'")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import mpidist.torch  # noqa: E402
from mpidist.cli.checkpoints.look import content_of  # noqa: E402
from mpidist.torch.saving import joined, split  # noqa: E402

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = pytest.mark.mpi


class Training:
    """A program of four epochs with two steps each, which may be saved behind any step; with dropout, or without."""

    def __init__(self, strategy: Strategy, seed: int, dropout: float = 0.3) -> None:
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(8) if dropout else nn.LayerNorm(8)
        last = nn.Linear(8, 2).bfloat16() if dropout else nn.Linear(8, 2)
        model: Any = nn.Sequential(nn.Linear(4, 8), norm, nn.Dropout(dropout), last)
        model[2].register_forward_hook(lambda *arguments: arguments[-1].to(last.weight.dtype))
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.8, 0.9))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        data: Any = DataLoader(TensorDataset(x), 8, shuffle=True)
        self.model, self.loader = mpidist.torch.distribute(model, data, strategy=strategy)
        self.checkpoint = mpidist.Checkpoint(
            model=self.model, optimizer=self.optimizer, loader=self.loader, scheduler=self.scheduler
        )

    def run(self, steps: int, epochs: int = 4, save: str | None = None) -> Any:
        while self.loader.epoch < epochs:
            for (x,) in self.loader:
                self.model(x).float().square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                steps -= 1
                if not steps:
                    return None if save is None else self.checkpoint.save(save)
        return torch.cat([one.detach().double().reshape(-1) for one in self.model.state_dict().values()])


def test_a_resumed_job_ends_with_the_same_bits(strategy: Strategy, mpi_tmp_path: Path) -> None:
    undisturbed = Training(strategy, 1).run(-1)
    path = Training(strategy, 1).run(3, save=str(mpi_tmp_path / "ckpt"))
    other = Training(strategy, 2)
    other.checkpoint.restore(path).assert_consumed()
    assert other.loader.epoch == 1
    torch.testing.assert_close(other.run(-1), undisturbed, atol=0, rtol=0)
    with h5py.File(path) as file:
        assert file["model/0/weight"].shape == (8, 4)
        assert file["model/1/running_mean"].shape == (8,)


def test_a_job_resumes_on_another_number_of_ranks(strategy: Strategy, mpi_tmp_path: Path) -> None:
    undisturbed = Training(strategy, 1, 0.0).run(-1)
    path = Training(strategy, 1, 0.0).run(3, save=str(mpi_tmp_path / "ckpt"))
    with mpidist.MultiWorkerMirroredStrategy(communicator=MPI.COMM_SELF) as alone, alone.scope():
        other = Training(alone, 2, 0.0)
        other.checkpoint.restore(path).assert_consumed()
        found = other.run(-1)
    torch.testing.assert_close(found, undisturbed, atol=5e-6, rtol=0)


def test_structures_of_optimizers_and_schedules() -> None:
    nest = {
        "state": {0: {"step": torch.tensor(3.0), "old": [torch.ones(2), None]}}, "lr": 0.1,
        "betas": (0.9, float("inf")), "milestones": Counter({4: 1}), "name": "a", "flag": True, "empty": {},
    }
    found = joined(split(nest))
    assert repr(found) == repr(nest)
    assert type(found["milestones"]) is Counter
    with pytest.raises(TypeError, match="/a: expected tensors, numbers, strings, lists and dicts, got object"):
        split({"a": object()})


def test_a_model_that_lacks_what_was_not_saved(strategy: Strategy, mpi_tmp_path: Path) -> None:
    saved = mpidist.torch.distribute(nn.Linear(2, 2), strategy=strategy)
    path = mpidist.Checkpoint(model=saved).save(str(mpi_tmp_path / "ckpt"))
    with pytest.raises(ValueError, match=r"no value of '0.weight' of Sequential"):
        mpidist.Checkpoint(model=nn.Sequential(nn.Linear(2, 2))).restore(path)


def test_the_scaler_of_gradients(strategy: Strategy, mpi_tmp_path: Path) -> None:
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    for one in (scaler, other):
        one.scale(torch.ones(1))
    path = mpidist.Checkpoint(scaler=scaler).save(str(mpi_tmp_path / "ckpt"))
    mpidist.Checkpoint(scaler=other).restore(path)
    assert other.get_scale() == 8.0


def test_models_are_shown_verified_and_restored_in_part(strategy: Strategy, mpi_tmp_path: Path) -> None:
    path = Training(strategy, 1).run(3, save=str(mpi_tmp_path / "ckpt"))
    shown = {one["path"]: one for one in content_of(path)["arrays"]}
    assert shown["model/0/weight"]["shape"] == [8, 4]
    assert shown["model/3/weight"]["dtype"] == "bfloat16"
    assert shown["loader/random"]["replicas"] == strategy.num_replicas_in_sync
    assert mpidist.checkpoint.verify(path) > 0
    saved = mpidist.load_checkpoint(path)
    # The last layer is another one, and so are two of the optimizer's parameters.
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    last = model[3].weight.detach().clone()
    status = mpidist.Checkpoint(model=model, optimizer=optimizer).restore(path, partial=True)
    with pytest.raises(AssertionError, match=r"'model/3/weight': it has shape \(5, 8\).*shape \(2, 8\) of parameter 4"):
        status.assert_existing_objects_matched()
    assert model[0].weight.tolist() == saved.get_tensor("model/0/weight").tolist()
    assert torch.equal(model[3].weight, last)
    assert not optimizer.state
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(mpidist.errors.CheckpointError, match="got 6 parameters, not 1"):
        mpidist.Checkpoint(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(8, 4))])).restore(path)
