"""The example of PyTorch, as a user starts it: killed and started again; and jobs that end with an error."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import run_code, run_program, start_program
from tests.helpers.markdown import ROOT
from tests.system.test_example import kill_all_ranks, until_saved

# An import would take each process that runs programs a second.
pytestmark = [
    pytest.mark.timeout_seconds(240),
    pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is in the extra 'torch'"),
]

EXAMPLE = ROOT / "examples" / "torch_train.py"


def train(ranks: int, *options: object) -> str:
    """The output of the example, which must end well."""
    result = run_program(ranks, EXAMPLE, *options, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout + result.stderr


def parameters(path: Path) -> Any:
    torch: Any = importlib.import_module("torch")
    return torch.cat([one.reshape(-1) for one in torch.load(path).values()])


def test_a_killed_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    output = train(2, "--epochs", 4, "--weights", tmp_path / "undisturbed", "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert float(re.findall("test accuracy ([0-9.]+)", output)[-1]) > 0.9
    # In the middle of the first epoch of 60: the run is killed long before its end.
    folder = tmp_path / "checkpoints"
    process = start_program(2, EXAMPLE, "--epochs", 40, "--checkpoint-dir", folder, "--save-every", 5)
    until_saved(folder, 2, process)
    kill_all_ranks(process)
    output = train(2, "--epochs", 4, "--checkpoint-dir", folder, "--save-every", 500, "--weights", tmp_path / "resumed")
    assert "resumed in epoch" in output
    assert parameters(tmp_path / "resumed").equal(parameters(tmp_path / "undisturbed"))


HEAD = """
import torch, mpidist, mpidist.torch
from torch.utils.data import DataLoader, TensorDataset
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
model = torch.nn.Linear(2, 2)
"""


@pytest.mark.long
@pytest.mark.parametrize(("program", "said"), [
    ("mpidist.torch.distribute(model)\nif rank: model(torch.ones(1, 2)).sum().backward()\n"
     "else: strategy.reduce('SUM', 1., None)", "gradients of Linear"),
    ("mpidist.torch.distribute(model) if rank else strategy.reduce('SUM', 1., None)", "distribute"),
    ("mpidist.torch.distribute(model)\nif rank: model(torch.ones(1, 2)).sum().backward()", "gradients of Linear"),
], ids=["backward", "distribute", "the other ends"])
def test_torch_on_one_rank_only(tmp_path: Path, program: str, said: str) -> None:
    result, text = run_code(tmp_path, HEAD + program, ranks=2)
    assert result.returncode != 0
    assert said in text


TRAINING = """
import os, signal
from torch.utils.data import default_collate

def collate(rows):
    note("collate")
    return default_collate(rows)

def note(place):
    if rank == 1 and place == PLACE and steps == 3:
        FAULT

steps = 0
data = TensorDataset(torch.ones(4000, 2))
model, loader = mpidist.torch.distribute(model, DataLoader(data, 8, collate_fn=collate))
model.weight.register_hook(lambda _: note("backward"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, in loader:
    loss = model(x).square().mean()
    note("loss")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
"""


@pytest.mark.long
@pytest.mark.parametrize("place", ["collate", "loss", "backward"])
@pytest.mark.parametrize(("fault", "said"), [
    ("raise ValueError('rank 1 cannot continue')", "ValueError: rank 1 cannot continue"),
    ("os.kill(os.getpid(), signal.SIGINT)", "mpidist: interrupted"), ("os.kill(os.getpid(), signal.SIGTERM)", ""),
], ids=["raise", "interrupt", "terminate"])
def test_a_step_that_one_rank_breaks_off_ends_the_job(tmp_path: Path, place: str, fault: str, said: str) -> None:
    program = TRAINING.replace("PLACE", repr(place)).replace("FAULT", fault)
    result, text = run_code(tmp_path, HEAD + program, ranks=2)
    assert result.returncode != 0
    assert said in text


@pytest.mark.long
@pytest.mark.parametrize("way", ["raise ValueError('row 3 is bad')", "os.kill(os.getpid(), 9)"], ids=["raises", "dies"])
def test_a_worker_of_a_torch_loader_that_fails_ends_the_job(tmp_path: Path, way: str) -> None:
    program = f"""
import os
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, number):
        if number == 3: {way}
        return torch.ones(2)
model, loader = mpidist.torch.distribute(model, DataLoader(Rows(), 4, num_workers=1))
for x in loader:
    model(x).sum().backward()
"""
    result, text = run_code(tmp_path, HEAD + program, ranks=2)
    assert result.returncode != 0
    assert "row 3 is bad" in text or "exited unexpectedly" in text or "killed by signal" in text
