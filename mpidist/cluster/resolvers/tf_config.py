"""The resolver that reads the environment variable TF_CONFIG."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mpidist.cluster.resolvers.resolver import ClusterResolver, checked_id, find_master
from mpidist.cluster.spec import ClusterSpec

_FORM = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'


# The number of characters of an invalid text that errors show.
_MOST_SHOWN = 1000


@dataclass(frozen=True)
class TFConfig:
    """The content of TF_CONFIG.

    Attributes:
        cluster: The cluster; empty where TF_CONFIG has none.
        task_type: This process's job; None where TF_CONFIG does not say.
        task_id: This process's index in its job; None where TF_CONFIG does not say.
        rpc_layer: Prefix of addresses.
        session_master: An address that replaces the task's.
    """

    cluster: ClusterSpec
    task_type: str | None
    task_id: int | None
    rpc_layer: str | None
    session_master: str | None


def read_tf_config(environment: Mapping[str, str] | None = None) -> TFConfig:
    """Local. Read TF_CONFIG; a missing or blank value and `{}` give an empty cluster.

    Args:
        environment: Defaults to `os.environ`.

    Raises:
        ValueError: The value is not JSON, or has another form.
    """
    environment = os.environ if environment is None else environment
    text = environment.get("TF_CONFIG", "").strip() or "{}"
    try:
        config = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"TF_CONFIG must be JSON of the form {_FORM}, got {_cut(text)}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG must be a JSON object of the form {_FORM}, got {_cut(text)}")
    _check_keys(config, ("cluster", "task", "rpc_layer", "session_master"))
    task = config.get("task") or {}
    # Some systems add keys of their own.
    if not isinstance(task, dict) or (task and not {"type", "index"} & set(task)):
        raise ValueError(f'"task" in TF_CONFIG must be {{"type": "worker", "index": 0}}, got {task!r}')
    _check_keys(task, ("type", "index"))
    try:
        cluster = ClusterSpec(config.get("cluster") or {})
    except (TypeError, ValueError) as error:
        raise ValueError(f'"cluster" in TF_CONFIG must have the form {_FORM}: {error}') from error
    return TFConfig(
        cluster=cluster,
        task_type=_text(task.get("type")),
        task_id=_index(task.get("index")),
        rpc_layer=_text(config.get("rpc_layer")),
        session_master=_text(config.get("session_master")),
    )


def _check_keys(given: Mapping[str, Any], names: Sequence[str]) -> None:
    """A key that is read but for its capital letters, or a letter, would be ignored without a message."""
    for key in given:
        if key in names:
            continue
        if key.strip().lower() in names:
            raise ValueError(f"TF_CONFIG must have the form {_FORM}, with keys in small letters, got the key {key!r}")
        near = get_close_matches(key.lower(), names, 1, 0.8)
        if near and near[0] not in given:
            raise ValueError(f"TF_CONFIG must have the form {_FORM}, got the key {key!r}. Did you mean {near[0]!r}?")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which Python's reader would take the last of two values with one key."""
    read: dict[str, Any] = {}
    for name, value in pairs:
        if name in read:
            raise ValueError(f"expected each key of an object once, got {name!r} twice")
        read[name] = value
    return read


def _cut(text: str) -> str:
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r} and {len(text) - _MOST_SHOWN} more"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _index(value: Any) -> int | None:
    if value is None:
        return None
    if _is_spelled(value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'"index" of "task" in TF_CONFIG must be an integer from 0, got {value!r}')
    return value


def _is_spelled(value: Any) -> bool:
    # A text is taken as the number that it spells, as in tf.distribute; 1.7 and true are no index of a task.
    return isinstance(value, str) and re.fullmatch("[0-9]+", value.strip()) is not None


class TFConfigClusterResolver(ClusterResolver):
    """Local. Reads TF_CONFIG at each call, as in tf.distribute, so that a program may set the variable late.

    Args:
        task_type: Replaces the job in TF_CONFIG.
        task_id: Replaces the index in TF_CONFIG.
        rpc_layer: Replaces the prefix in TF_CONFIG.
        environment: A name for the environment in which the cluster runs.

    Raises:
        TypeError, ValueError: `task_id` is neither an integer from 0 on nor a string with one.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self.task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Local. The cluster in TF_CONFIG, empty where there is none.

        Raises:
            ValueError: TF_CONFIG is malformed.
        """
        return read_tf_config().cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Local. `session_master` where TF_CONFIG has it, else the address of a task, by default of this process's.

        Raises:
            ValueError: There is no such task, or TF_CONFIG is malformed.
        """
        config = read_tf_config()
        if config.session_master is not None:
            return config.session_master
        return find_master(
            config.cluster,
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
            rpc_layer or self.rpc_layer,
        )

    @property
    def task_type(self) -> str | None:
        """Local. This process's job."""
        return read_tf_config().task_type if self._task_type is None else str(self._task_type)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Local. This process's index in its job."""
        return read_tf_config().task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        given: Any = task_id
        self._task_id = checked_id(int(given) if _is_spelled(given) else given)

    @property
    def rpc_layer(self) -> str | None:
        """Local. Prefix of the addresses."""
        return read_tf_config().rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer
