"""The blocks of TensorFlow's guide "Better performance with the tf.data API": the same elements in each of its forms.

What is faster, `benchmarks/input.py` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpidist.data import AUTOTUNE, ArraySpec, Dataset

READS: list[int] = []
CALLS: list[int] = []


# The guide's class has the name of a dataset, and makes another one.
class ArtificialDataset(Dataset):
    @staticmethod
    def _generator(num_samples: int) -> Iterator[tuple[int]]:
        for sample_idx in range(num_samples):
            READS.append(sample_idx)
            yield (sample_idx,)

    def __new__(cls, num_samples: int = 3) -> Any:
        return Dataset.from_generator(
            cls._generator,
            output_signature=(ArraySpec(shape=(), dtype=np.dtype(np.int64)),),
            args=(num_samples,)
        )


def mapped_function(s: Any) -> Any:
    CALLS.append(int(s))
    return s


def increment(x: Any) -> Any:
    return x + 1


def of_two() -> Dataset:
    return Dataset.range(2)


FORMS: dict[str, tuple[Callable[[], Dataset], list[int]]] = {
    "naive": (ArtificialDataset, [0, 1, 2]),
    "prefetch": (lambda: ArtificialDataset().prefetch(AUTOTUNE), [0, 1, 2]),
    "interleave": (lambda: of_two().interleave(lambda _: ArtificialDataset()), [0, 1, 2] * 2),
    "parallel interleave": (
        lambda: of_two().interleave(lambda _: ArtificialDataset(), num_parallel_calls=AUTOTUNE), [0, 1, 2] * 2,
    ),
    "map": (lambda: ArtificialDataset().map(mapped_function), [0, 1, 2]),
    "parallel map": (lambda: ArtificialDataset().map(mapped_function, num_parallel_calls=AUTOTUNE), [0, 1, 2]),
    "cache": (lambda: ArtificialDataset().map(mapped_function).cache(), [0, 1, 2]),
    "scalar map": (lambda: Dataset.range(4).map(increment).batch(2), [1, 2, 3, 4]),
    "vectorized map": (lambda: Dataset.range(4).batch(2).map(increment), [1, 2, 3, 4]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_the_same_elements_in_each_epoch(form: str) -> None:
    make, expected = FORMS[form]
    dataset = make()
    del READS[:], CALLS[:]
    for _ in range(2):
        found = [np.ravel(sample[0] if isinstance(sample, tuple) else sample) for sample in dataset]
        assert np.concatenate(found).tolist() == expected
    if form == "cache":
        # The file is opened, and the function called, in the first epoch alone.
        assert READS == CALLS == [0, 1, 2]
    elif form == "map":
        assert READS == CALLS == [0, 1, 2] * 2
