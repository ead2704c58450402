"""The prefetching thread: order, errors, bounds, and its end."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from mpidist.data import Dataset
from mpidist.data.reading import prefetch
from mpidist.data.reading.prefetch import Prefetcher


def ended(thread: threading.Thread) -> bool:
    thread.join(5)
    return not thread.is_alive()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpidist-prefetch"]


@pytest.mark.timeout_seconds(20)
def test_elements_that_are_taken_when_they_are_ready_make_room_for_the_next() -> None:
    prefetcher = Prefetcher(iter(range(20)), 1)
    found: list[int] = []
    while len(found) < 20:
        element = prefetcher.take_ready()
        if element is None:
            # Meanwhile the thread has read the next one, and waits for room.
            time.sleep(0.001)
        else:
            found.append(element)
    assert found == list(range(20))
    assert prefetcher.take_ready() is None
    prefetcher.close()


def test_elements_come_in_order_and_then_the_end() -> None:
    prefetcher = Prefetcher(iter(range(1000)), 3)
    assert list(prefetcher) == list(range(1000))
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_an_error_comes_after_the_elements_before_it() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise KeyError("lost")

    prefetcher = Prefetcher(fails(), 5)
    assert next(prefetcher) == 1
    with pytest.raises(KeyError, match="lost"):
        next(prefetcher)
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_no_more_is_read_than_depth_and_one_in_hand() -> None:
    read = [threading.Event() for _ in range(100)]

    def source() -> Iterator[int]:
        for i, event in enumerate(read):
            event.set()
            yield i

    prefetcher = Prefetcher(source(), 2)
    for taken in range(3):
        assert read[taken + 2].wait(5)
        assert not read[taken + 3].wait(0.1)
        assert next(prefetcher) == taken
    prefetcher.close()


def test_close_ends_the_thread_and_is_safe_twice() -> None:
    before = threads()
    prefetcher = Prefetcher(iter(range(100)), 1)
    (thread,) = [thread for thread in threads() if thread not in before]
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="already closed"):
        next(prefetcher)


def test_a_forgotten_prefetcher_ends_its_thread() -> None:
    before = threads()
    iterator = iter(Dataset.range(10**9).batch(2).prefetch(4))
    next(iterator)
    (thread,) = [thread for thread in threads() if thread not in before]
    del iterator
    gc.collect()
    assert ended(thread)


def test_the_position_counts_what_was_taken_not_what_was_read() -> None:
    is_ahead = threading.Event()

    def remember(x: Any) -> Any:
        if x == 11:
            is_ahead.set()
        return x

    iterator = iter(Dataset.range(100).map(remember).batch(2).prefetch(8))
    next(iterator)
    assert is_ahead.wait(5)
    assert iterator.state() == {"iteration": 0, "batch": 1, "batch_size": 2}
    iterator.load_state({"iteration": 0, "batch": 40})
    assert next(iterator).tolist() == [80, 81]
    iterator.close()
    assert next(iterator).tolist() == [82, 83]


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth"):
        Prefetcher(iter([1]), 0)


def test_an_interrupt_while_waiting_loses_nothing_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    is_waiting, go_on, is_reading, is_handled = (threading.Event() for _ in range(4))
    main = threading.get_ident()
    close = prefetch._Channel.close

    def close_first(channel: prefetch._Channel[Any]) -> None:
        close(channel)
        # The reader waits on until then: its element comes after the interrupt.
        go_on.set()

    def blocks(x: Any) -> Any:
        if x == 3 and not is_waiting.is_set():
            is_waiting.set()
            go_on.wait(30)
        return x

    def handle(number: int, frame: FrameType | None) -> None:
        is_handled.set()
        signal.default_int_handler(number, frame)

    def interrupt() -> None:
        if is_waiting.wait(30) and is_reading.wait(30):
            signal.pthread_kill(main, signal.SIGINT)
            # Python handles a signal that comes just before a thread waits for a lock when that wait ends. Another
            # signal, which does nothing, ends it.
            while not is_handled.wait(0.05):
                signal.pthread_kill(main, signal.SIGUSR1)

    handlers = {signal.SIGINT: handle, signal.SIGUSR1: lambda *_: None}
    before_them = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    request.addfinalizer(lambda: [signal.signal(*one) for one in before_them.items()])
    monkeypatch.setattr(prefetch._Channel, "close", close_first)
    before = threads()
    iterator = iter(Dataset.range(9).map(blocks).prefetch(1))
    found = [int(next(iterator)) for _ in range(3)]
    thread = threading.Thread(target=interrupt)
    thread.start()

    def read() -> Any:
        is_reading.set()
        return next(iterator)

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        read()
    thread.join()
    assert threads() == before
    assert iterator.state() == {"iteration": 0, "batch": 3}
    found += [int(x) for x in iterator]
    assert found == list(range(9))
