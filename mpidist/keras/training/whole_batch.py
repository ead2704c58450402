"""`train_on_batch` and its kin: one global batch, of which each replica takes its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from mpidist.keras.binding import ModelBinding
from mpidist.keras.derive import binding_of
from mpidist.keras.input.rows import cut
from mpidist.keras.step import wrap
from mpidist.keras.training.results import in_order

if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object


def _part(binding: ModelBinding, what: str, *parts: Any) -> Any:
    def take() -> Any:
        arrays = keras.tree.map_structure(lambda one: None if one is None else keras.ops.convert_to_tensor(one), parts)
        return cut(binding, tuple(arrays))

    rows, batch = binding.together(what, take)
    return rows, wrap(np.int32(rows) if keras.backend.backend() == "jax" else rows, batch)


class WholeBatches(_Model):  # type: ignore[misc]
    """The methods of a model that take one batch."""

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False,
    ) -> Any:
        """Collective. As in Keras; the batch is global, and the results are over all replicas.

        Raises:
            ValueError: `class_weight`, which is not taken here.
        """
        binding = binding_of(self)
        if binding is None or binding.size == 1:
            return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)
        if class_weight is not None:
            raise ValueError("train_on_batch of a distributed model takes no `class_weight`. Give `sample_weight`")
        _, batch = _part(binding, "train_on_batch", x, y, sample_weight)
        logs = super().train_on_batch(batch, return_dict=True)
        return self._over_replicas(logs, return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Collective. As in Keras; the batch is global, and the results are over all replicas."""
        binding = binding_of(self)
        if binding is None or binding.size == 1:
            return super().test_on_batch(x, y, sample_weight, return_dict)
        _, batch = _part(binding, "test_on_batch", x, y, sample_weight)
        logs = super().test_on_batch(batch, return_dict=True)
        return self._over_replicas(logs, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Collective. As in Keras; the batch is global, and every rank gets all rows."""
        binding = binding_of(self)
        if binding is None or binding.size == 1:
            return super().predict_on_batch(x)
        rows, batch = _part(binding, "predict_on_batch", x)
        return in_order(binding, super().predict_on_batch(batch), [rows])

    def _over_replicas(self, logs: Any, return_dict: bool) -> Any:
        logs = {name: float(value) for name, value in self._get_metrics_result_or_logs(logs).items()}
        return logs if return_dict else self._flatten_metrics_in_order(logs)
