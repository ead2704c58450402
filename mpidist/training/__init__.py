"""Training by a function that makes one step: `Trainer`, its callbacks, and an evaluator beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.missing import from_homes

if TYPE_CHECKING:
    from mpidist.training.callbacks.callback import Callback
    from mpidist.training.callbacks.csv_logger import CSVLogger
    from mpidist.training.callbacks.early_stopping import EarlyStopping
    from mpidist.training.callbacks.limits import TerminateOnNaN, TrainingTimeLimit
    from mpidist.training.callbacks.model_checkpoint import ModelCheckpoint
    from mpidist.training.callbacks.preemption import Preemption
    from mpidist.training.callbacks.progress_bar import ProgressBar
    from mpidist.training.callbacks.tensorboard import TensorBoard
    from mpidist.training.evaluator import STOP_FILE, SidecarEvaluator, train_and_evaluate
    from mpidist.training.position import History
    from mpidist.training.trainer import Trainer

# Public name -> the module that has it, which is loaded at first use.
_HOMES = {
    "CSVLogger": "mpidist.training.callbacks.csv_logger",
    "Callback": "mpidist.training.callbacks.callback",
    "EarlyStopping": "mpidist.training.callbacks.early_stopping",
    "History": "mpidist.training.position",
    "ModelCheckpoint": "mpidist.training.callbacks.model_checkpoint",
    "Preemption": "mpidist.training.callbacks.preemption",
    "ProgressBar": "mpidist.training.callbacks.progress_bar",
    "STOP_FILE": "mpidist.training.evaluator",
    "SidecarEvaluator": "mpidist.training.evaluator",
    "TensorBoard": "mpidist.training.callbacks.tensorboard",
    "TerminateOnNaN": "mpidist.training.callbacks.limits",
    "TrainingTimeLimit": "mpidist.training.callbacks.limits",
    "Trainer": "mpidist.training.trainer",
    "train_and_evaluate": "mpidist.training.evaluator",
}

__all__ = [
    "STOP_FILE",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "ModelCheckpoint",
    "Preemption",
    "ProgressBar",
    "SidecarEvaluator",
    "TensorBoard",
    "TerminateOnNaN",
    "Trainer",
    "TrainingTimeLimit",
    "train_and_evaluate",
]

if not TYPE_CHECKING:
    __getattr__ = from_homes(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
