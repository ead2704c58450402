"""What adapters of frameworks call, with arrays on a GPU: they stay there, and PyTorch's tensors are tensors again."""

from __future__ import annotations

from typing import Any

import pytest

from mpidist.comm.front.front import CollectiveFront
from mpidist.options import ReduceOp
from mpidist.strategy.adapters import nests

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture(params=["staged", "cuda-aware", "nccl"])
def collective(request: pytest.FixtureRequest, open_collective: Any) -> Any:
    return open_collective(request.param)


def reduce(collective: CollectiveFront, nest: Any, *, in_place: bool = False) -> Any:
    return nests.all_reduce(collective, ReduceOp.SUM, nest, in_place=in_place, name="", bytes_per_pack=0)


def test_arrays_stay_on_the_gpu(cupy: Any, collective: CollectiveFront) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size
    total = size * (size + 1) / 2
    given = {"a": cupy.full(3, rank + 1, "float32"), "b": cupy.full((20, 2), rank + 1.0)}
    made = reduce(collective, given)
    assert {type(one) for one in made.values()} == {cupy.ndarray}
    assert [set(one.get().reshape(-1).tolist()) for one in made.values()] == [{total}, {total}]
    part = cupy.full((4, 4), rank + 1.0)[::2]
    assert reduce(collective, [given["a"], part], in_place=True)[1] is part
    assert set(part.get().reshape(-1).tolist()) | set(given["a"].get().tolist()) == {total}
    (sent,) = nests.broadcast(collective, [cupy.full(2, rank + 5.0)])
    assert sent.get().tolist() == [5.0, 5.0]


def test_tensors_on_a_gpu(cupy: Any, collective: CollectiveFront, is_simulated: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if is_simulated or not torch.cuda.is_available():
        pytest.skip("PyTorch needs a real GPU")
    rank, size = collective.communicator.rank, collective.communicator.size
    total, device = size * (size + 1) / 2, f"cuda:{cupy.cuda.Device().id}"
    parameter = torch.nn.Parameter(torch.full((3,), rank + 1.0, device=device))
    (made,) = reduce(collective, [parameter])
    assert (made.device, made.tolist()) == (parameter.device, [total] * 3)
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.full((1_000_000,), rank + 1.0, device=device)
        reduce(collective, [late], in_place=True)
        assert float(late.min()) == float(late.max()) == total
