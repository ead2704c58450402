"""The likeness of a variable to a NumPy array: arithmetic, NumPy's functions, comparison and indexing of its value."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist import arrays
from mpidist.arrays import AnyArray


class ArrayLike(NDArrayOperatorsMixin, ABC):
    """An object that NumPy takes as the array of its value. Its elements cannot be assigned.

    Attributes:
        name: The name in the texts of errors.
        shape: The shape of the value.
        dtype: The dtype of the value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    # CuPy's arrays have priority 100: with a higher one they leave arithmetic with a variable to the variable.
    __array_priority__ = 1000.0

    @abstractmethod
    def value(self) -> AnyArray:
        """Local or Collective, as the subclass says. The value, an array of `shape`."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        if copy is False and (dtype is None or np.dtype(dtype) == self.dtype):
            return arrays.to_host(self.value())
        return np.array(arrays.to_host(self.value()), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `np.add.at` and the like were seen to write even to read-only arrays: a variable must refuse them.
        written = inputs[:1] if method == "at" else kwargs.get("out", ())
        if any(isinstance(target, ArrayLike) for target in written):
            raise TypeError(
                f"variable {self.name!r} cannot be written by `+=` and the like, by `out=` or by `.at`: "
                "use assign, assign_add or assign_sub"
            )
        plain = [x.value() if isinstance(x, ArrayLike) else x for x in inputs]
        # `where=`, too.
        options = {name: x.value() if isinstance(x, ArrayLike) else x for name, x in kwargs.items()}
        return getattr(ufunc, method)(*plain, **options)

    def __getitem__(self, key: Any) -> Any:
        return self.value()[key]

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"variable {self.name!r} cannot be written by `v[...] = value`: all ranks write together. Use "
            "`v.assign(value)` with the whole value, or `v.scatter_update(mpidist.IndexedSlices(rows, indices))`"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __round__(self, digits: int | None = None) -> Any:
        value: Any = self.value()[()]
        return round(value) if digits is None else round(value, digits)

    def __format__(self, spec: str) -> str:
        return format(self.value()[()], spec) if spec else str(self)

    def __reduce__(self) -> NoReturn:
        # A copy would share this variable's memory, which another variable may take once this one is deleted.
        raise TypeError(
            f"variable {self.name!r} cannot be copied or pickled: `mpidist.Variable(v)` in the strategy's scope makes "
            "another one with its value, `v.numpy()` gives the value"
        )

    def __hash__(self) -> int:
        # Variables are distinguished by identity, although `==` compares values element by element.
        return id(self)
