"""The file by which workers join a job, and the desk where they ask: who may read it, and what is no file of ours."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mpidist.cli.main import main
from mpidist.comm.windows.sockets.addresses import Address, listen_by_name, place
from mpidist.comm.windows.sockets.handshake import RefusedError
from mpidist.comm.windows.sockets.join_file import NAME, JoinFile, WrittenFile, read
from mpidist.comm.windows.sockets.newcomers import Desk, Introduction, Newcomer, ask
from mpidist.errors import LauncherError
from mpidist.failures.deaths import Process
from mpidist.strategy.parameter_server.invitation import PYTHON, checked_directory
from mpidist.version import __version__

HERE = Address(place(), b"\0nobody", (), 0)
CONTENT = JoinFile(__version__, "n3", 77, 0, HERE, b"s" * 32, 30.0, (50000, 50100))


def test_it_is_read_as_it_was_written_and_goes(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "job"
    file = WrittenFile(directory, CONTENT, HERE)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert read(directory) == CONTENT
    file.remove()
    file.remove()
    assert list(directory.iterdir()) == []


def test_one_of_a_job_that_has_ended_is_written_anew_and_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = WrittenFile(tmp_path, CONTENT, HERE)
    after = WrittenFile(tmp_path, CONTENT._replace(process=78), HERE)
    before.remove()
    assert read(tmp_path).process == 78
    after.remove()
    assert not after.path.exists()


def test_one_of_a_job_that_goes_on_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    listener, name = listen_by_name()
    with listener:
        WrittenFile(tmp_path, CONTENT._replace(address=HERE._replace(name=name)), HERE)
        with pytest.raises(FileExistsError, match="belongs to a running job, whose chief is process 77 on n3"):
            WrittenFile(tmp_path, CONTENT._replace(process=78), HERE)
    assert read(tmp_path).process == 77


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_in_which_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="in which nobody else may write"):
        WrittenFile(tmp_path, CONTENT, HERE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_or_write_is_not_believed(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(0o700)
    WrittenFile(tmp_path, CONTENT, HERE).path.chmod(mode)
    with pytest.raises(LauncherError, match=f"that nobody else may read or write, mode 600.*with mode {mode:o}"):
        read(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_believed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.chown(WrittenFile(tmp_path, CONTENT, HERE).path, 1, -1)
    with pytest.raises(LauncherError, match=r"must be a file of user 0 .*, got one of user 1 with mode 600"):
        read(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    WrittenFile(tmp_path, CONTENT, HERE).path.rename(tmp_path / "other")
    (tmp_path / NAME).symlink_to(tmp_path / "other")
    with pytest.raises(LauncherError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize(("change", "text"), [
    (lambda given: {**given, "format": 2}, "has format 2, and this mpidist reads format 1"),
    (lambda given: {**given, "secret": "no hexadecimal digits"}, "is no file of a job"),
    (lambda given: {**given, "address": None}, "is no file of a job"),
    (lambda given: {**given, "more": 1}, "is no file of a job"),
    (lambda given: {name: given[name] for name in given if name != "rank"}, "is no file of a job"),
    (lambda given: [given], "is no file of a job"),
    (lambda _: "text", "is no file of a job"),
])
def test_a_file_that_is_none_of_ours_is_an_error(tmp_path: Path, change: Callable[[Any], object], text: str) -> None:
    tmp_path.chmod(0o700)
    path = WrittenFile(tmp_path, CONTENT, HERE).path
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(LauncherError, match=text):
        read(tmp_path)


def test_the_command_needs_a_directory_with_a_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["worker"])
    assert (result.exit_code, "Missing option '--join'" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["worker", "--join", str(tmp_path)])
    assert result.exit_code == 1
    assert "no job waits for workers" in result.output


@pytest.mark.parametrize(("given", "error"), [(7, TypeError), (True, TypeError), ("", ValueError), (b"job", TypeError)])
def test_the_directory_of_a_strategy_is_a_path(given: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^`join_directory` must be the path of a directory"):
        checked_directory(given)


def at_desk(desk: Desk, hello: Callable[[socket.socket], object]) -> tuple[object, object]:
    """The outcomes of both ends of a connection to a desk."""
    mine, theirs = socket.socketpair()
    found: list[object] = []

    def serve() -> None:
        try:
            found.append(desk.serve(theirs))
        except RefusedError as error:
            found.append(str(error))
        theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with mine:
        try:
            outcome = hello(mine)
        except RefusedError as error:
            outcome = str(error)
    thread.join()
    return found[0], outcome


NEWCOMER = Newcomer(Process("n4", 88, "pid:[1]"), HERE, __version__, PYTHON)


def test_a_desk_answers_in_the_order_of_the_requests() -> None:
    desk = Desk()
    introduction = Introduction(5, NEWCOMER.process, HERE, (1,))

    def decide() -> None:
        while (request := desk.first()) is None:
            pass
        assert request.newcomer == NEWCOMER
        desk.pop()
        request.welcome(introduction, b"all it needs")

    decider = threading.Thread(target=decide)
    decider.start()
    assert at_desk(desk, lambda link: ask(link, NEWCOMER)) == (introduction, b"all it needs")
    decider.join()
    desk.close()
    assert at_desk(desk, lambda link: ask(link, NEWCOMER)) == (None, "the job is ending")


@pytest.mark.parametrize("said", [
    b"", b"\x05", b"\xff" * 8, b"\x02" + bytes(7) + b"{}", b"\x04" + bytes(7) + b"null",
    b"\x03" + bytes(7) + b"\xff" * 3,
])
def test_who_says_nonsense_at_the_desk_is_refused(said: bytes) -> None:
    def hello(link: socket.socket) -> None:
        link.sendall(said)
        link.shutdown(socket.SHUT_WR)

    desk = Desk()
    refused, _ = at_desk(desk, hello)
    assert isinstance(refused, str), refused
    assert desk.first() is None
