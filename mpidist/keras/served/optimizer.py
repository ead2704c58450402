"""The optimizer on the servers: mpidist's of the same name as Keras's, with the learning rate of Keras's object."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from mpidist import optimizers
from mpidist.keras.derive import plain_class
from mpidist.keras.private import excluded_from_decay, schedule_of

# Keras's names, and ours where they differ.
_NAMES = {
    "SGD": "SGD", "RMSprop": "RMSprop", "Adam": "Adam", "AdamW": "AdamW", "Adagrad": "Adagrad", "Adadelta": "Adadelta",
    "Adamax": "Adamax", "Nadam": "Nadam", "Ftrl": "Ftrl", "Lion": "Lion", "Lamb": "LAMB",
}
_NOT_OURS = ("name", "learning_rate", "loss_scale_factor", "gradient_accumulation_steps")
# Fields of our kernels that say where epsilon is added; Keras adds it elsewhere than ours do.
_FORMS = ("has_epsilon_hat", "is_under_root")
_FORMAT = "mpidist"


def served_optimizer(optimizer: Any) -> Any:
    """Local. The optimizer of mpidist for one of Keras.

    Raises:
        ValueError: No optimizer of mpidist computes the same.
    """
    name = plain_class(optimizer).__name__
    # Keras with PyTorch makes optimizers of classes of its own, under the same names.
    if name not in _NAMES or not plain_class(optimizer).__module__.startswith("keras.src."):
        raise ValueError(
            f"optimizer {optimizer.name!r} ({name}) cannot run on parameter servers, expected one of Keras's "
            f"{', '.join(_NAMES)}"
        )
    config = optimizer.get_config()
    wrong = [key for key in ("loss_scale_factor", "gradient_accumulation_steps") if config.get(key) is not None]
    if excluded_from_decay(optimizer):
        wrong.append("exclude_from_weight_decay")
    if wrong:
        raise ValueError(
            f"optimizer {optimizer.name!r} ({name}): `{wrong[0]}` has no meaning under ParameterServerStrategy, where "
            "each worker's gradients are an update of their own. Leave it out"
        )
    if not config["use_ema"]:
        del config["ema_momentum"], config["ema_overwrite_frequency"]
    given = {key: value for key, value in config.items() if key not in _NOT_OURS and value is not None}
    made = getattr(optimizers, _NAMES[name])(**given)
    forms = {field: True for field in _FORMS if hasattr(made.kernel, field)}
    kernel = dataclasses.replace(made.kernel, **forms)
    return optimizers.Optimizer(kernel, Rate(optimizer), name=optimizer.name, **dataclasses.asdict(made.options))


class Rate:
    """The learning rate of Keras's optimizer: its schedule, or its variable, which callbacks may set.

    Args:
        optimizer: The optimizer of Keras.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, step: int) -> float:
        """Local. The rate of a step."""
        schedule = schedule_of(self._optimizer)
        rate = self._optimizer.learning_rate if schedule is None else schedule(step)
        return float(keras.ops.convert_to_numpy(rate))


class StateOfServers:
    """The methods by which Keras saves and loads an optimizer, for the one on the servers.

    Args:
        plain: The optimizer of Keras.
        served: The optimizer of mpidist, which is built.
    """

    def __init__(self, plain: Any, served: Any) -> None:
        self._plain, self._served = plain, served

    def save_own_variables(self, store: Any) -> None:
        """Local. Write the state."""
        store[_FORMAT] = np.int64(1)
        store["iterations"] = np.int64(self._served.iterations)
        store["learning_rate"] = np.float64(Rate(self._plain)(self._served.iterations))
        for number, variable in enumerate(self._served.variables):
            store[f"slot_{number}"] = np.asarray(variable.numpy())

    def load_own_variables(self, store: Any) -> None:
        """Local. Read the state; that of another optimizer is ignored, and the present state stays.

        Raises:
            ValueError: The state is of other variables.
        """
        if _FORMAT not in store.keys():  # noqa: SIM118 - a store of Keras is no mapping
            return
        variables = self._served.variables
        if f"slot_{len(variables)}" in store.keys() or (  # noqa: SIM118 - as above
            variables and f"slot_{len(variables) - 1}" not in store.keys()  # noqa: SIM118 - as above
        ):
            raise ValueError(
                f"optimizer {self._plain.name!r}: expected the state of {len(variables)} variables in the file. Make "
                "the model and its optimizer as they were when it was saved"
            )
        self._served.iterations = int(np.asarray(store["iterations"]))
        self._plain.iterations.assign(self._served.iterations)
        if schedule_of(self._plain) is None:
            self._plain.learning_rate = float(np.asarray(store["learning_rate"]))
        for number, variable in enumerate(variables):
            variable.assign(np.asarray(store[f"slot_{number}"]))
