"""TensorFlow's side of parameter_servers.py and tables.py: a local cluster of gRPC, and the same closures.

    python benchmarks/parameter_servers_peer.py WORKERS CLOSURES ROUNDS BYTES... [--rows=COUNTxWIDTHxATONCExQUEUED]

With `--rows` it reads and changes so many rows of tables of so many bytes, once in a closure and ATONCE times in one,
and has QUEUED closures scheduled before it waits for them. Prints its figures as a line of JSON.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def serve(cluster: dict[str, list[str]], job: str, task: int) -> None:
    """A worker or a server, until it is killed."""
    tf = importlib.import_module("tensorflow")
    tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=task, protocol="grpc").join()


def free_ports(count: int) -> list[str]:
    """Addresses that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return found


def timed(call: Callable[[], object], rounds: int, warm: int = 3) -> float:
    """Median microseconds."""
    times = []
    for _ in range(rounds + warm):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[warm:]) * 1e6


def functions(tf: Any, weight: Any) -> tuple[Any, Any]:
    """What workers do with a variable."""
    def fetch() -> Any:
        # TensorFlow would leave the work to the server, where the value is.
        with tf.device("/job:worker/task:0"):
            return tf.identity(weight.read_value())

    def pull() -> Any:
        # One element of it, so that the value goes to the worker and not to the coordinator.
        return fetch()[0]

    def add() -> None:
        weight.assign_add(fetch(), read_value=False)

    return tf.function(pull), tf.function(add)


def row_functions(tf: Any, table: Any, count: int, at_once: int) -> tuple[Any, Any, Any]:
    """What workers do with rows of a table; the last one does it several times, unrolled."""
    def fetch(ids: Any) -> Any:
        # TensorFlow gathers them on the server, where the table is.
        with tf.device("/job:worker/task:0"):
            return tf.identity(tf.nn.embedding_lookup(table, ids))

    def pull(ids: Any) -> Any:
        return fetch(ids)[0, 0]

    def add(ids: Any) -> None:
        table.scatter_add(tf.IndexedSlices(tf.ones_like(fetch(ids)), ids))

    def add_often(ids: Any) -> None:
        for number in range(at_once):
            add(ids[number])

    signature = [tf.TensorSpec((count,), tf.int32)]
    often = [tf.TensorSpec((at_once, count), tf.int32)]
    return (
        tf.function(pull, input_signature=signature), tf.function(add, input_signature=signature),
        tf.function(add_often, input_signature=often),
    )


def cluster_of(cluster: dict[str, list[str]]) -> tuple[Any, Any, Any]:
    """TensorFlow, its strategy and its coordinator."""
    tf = importlib.import_module("tensorflow")
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return tf, strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def measure_rows(
    cluster: dict[str, list[str]], rows: tuple[int, int, int, int], rounds: int, sizes: list[int]
) -> dict[str, Any]:
    """Figures of tables, with the names that mpidist's have."""
    count, width, at_once, queued = rows
    tf, strategy, coordinator = cluster_of(cluster)
    found = {}
    for size in sizes:
        length = size // (4 * width)
        with strategy.scope():
            table = tf.Variable(tf.zeros((length, width)))
        draws = itertools.cycle([tf.constant(random.Random(seed).sample(range(length), count)) for seed in range(50)])

        some = itertools.repeat(tf.stack([next(draws) for _ in range(at_once)]))

        def run(function: Any, given: Any, times: int = 1) -> None:
            for _ in range(times):
                coordinator.schedule(function, (next(given),))
            coordinator.join()

        pull, add, often = row_functions(tf, table, count, at_once)
        found[f"{size >> 20} MB"] = {
            "pull": timed(functools.partial(run, pull, draws), rounds),
            "pull and add": timed(functools.partial(run, add, draws), rounds),
            "pull and add within a function": timed(functools.partial(run, often, some), rounds) / at_once,
            "pull and add, queued": timed(functools.partial(run, add, draws, queued), 1) / queued,
            "within a function, queued": timed(functools.partial(run, often, some, queued), 1, 0) / queued / at_once,
        }
    return found


def measure(cluster: dict[str, list[str]], closures: int, rounds: int, sizes: list[int]) -> dict[str, Any]:
    """The figures, with the names that mpidist's have."""
    tf, strategy, coordinator = cluster_of(cluster)
    nothing = tf.function(lambda: tf.constant(0))
    found: dict[str, Any] = {"null closure, us": timed(lambda: coordinator.schedule(nothing).fetch(), closures, 50)}
    begin = time.perf_counter()
    for _ in range(4 * closures):
        coordinator.schedule(nothing)
    coordinator.join()
    found["closures per second"] = 4 * closures / (time.perf_counter() - begin)
    for size in sizes:
        with strategy.scope():
            weight = tf.Variable(tf.zeros(size // 4))

        pull, add = functions(tf, weight)

        def run(function: Any) -> None:
            coordinator.schedule(function)
            coordinator.join()

        found[f"{size >> 20} MB"] = {
            "pull": timed(functools.partial(run, pull), rounds),
            "pull and add": timed(functools.partial(run, add), rounds),
        }
    return found


def main() -> None:
    """Start the cluster, measure, end it."""
    rows = [word.removeprefix("--rows=") for word in sys.argv if word.startswith("--rows=")]
    workers, closures, rounds, *sizes = (int(word) for word in sys.argv[1:] if not word.startswith("--"))
    addresses = free_ports(workers + 2)
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    processes = multiprocessing.get_context("spawn")
    tasks = [("ps", 0), *(("worker", task) for task in range(workers))]
    started = [processes.Process(target=serve, args=(cluster, *task), daemon=True) for task in tasks]
    for one in started:
        one.start()
    code = 1
    try:
        if rows:
            count, width, at_once, queued = map(int, rows[0].split("x"))
            print(json.dumps(measure_rows(cluster, (count, width, at_once, queued), rounds, sizes)), flush=True)
        else:
            print(json.dumps(measure(cluster, closures, rounds, sizes)), flush=True)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        for one in started:
            one.kill()
        # TensorFlow's own threads would go on.
        os._exit(code)


if __name__ == "__main__":
    main()
