"""The rules that hold in every state of a job, and where nothing moves any more; see `tests/model/world.py`."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.parameter_server.protocol.messages import OWN_WRITE
from mpidist.parameter_server.queue.work import ClosureEnd, End
from tests.model.parties import BrokenError, Coordinator, Server, Worker, changed_by


def attempts_of(closure: int, servers: Sequence[Server]) -> list[list[int]]:
    """By which attempts a closure is applied on each of these servers."""
    return [
        [commit.attempt for commit in server.applied if commit.closure == closure and commit.attempt != OWN_WRITE]
        for server in servers
    ]


def is_fatal(end: ClosureEnd) -> bool:
    """Whether a closure has failed since workers were lost."""
    return end.end is End.ERROR and b"FatalFunctionError" in end.payload


def check_always(coordinator: Coordinator, servers: Sequence[Server]) -> None:
    """Check done, void, write and cut."""
    ended = [end.closure for end in coordinator.ends]
    if len(ended) > len(set(ended)):
        raise BrokenError(f"done: a closure has ended twice: {coordinator.ends}")
    wanted = coordinator.scheduled
    for end in coordinator.ends:
        got = attempts_of(end.closure, servers)
        if end.end is End.RESULT:
            for rank, attempts in enumerate(got, 1):
                if attempts != ([end.payload[0]] if rank in wanted[end.closure].servers else []):
                    raise BrokenError(f"done: {end} is applied by {got}")
        elif any(got):
            raise BrokenError(f"void: {end} is applied by {got}")
    for number, schedule in wanted.items():
        most, times = schedule.rules.max_deaths, coordinator.guilt.get(number, 0)
        fatal = [end for end in coordinator.ends if end.closure == number and is_fatal(end)]
        if times > most or (fatal and times != most):
            raise BrokenError(f"guilt: workers were lost {times} times with closure {number}, {most} may be: {fatal}")
    if coordinator.position and coordinator.program[coordinator.position - 1] == "read":
        for rank, commit in coordinator.sent:
            if commit.attempt == OWN_WRITE and commit not in servers[rank - 1].applied:
                raise BrokenError(f"write: a read of the coordinator does not see its {commit} on server {rank}")
    for cut in coordinator.cuts:
        # A closure that pushes nothing is in no commit.
        pushing = {end.closure for end in coordinator.ends if end.end is End.RESULT and wanted[end.closure].servers}
        missing = {closure for closure in pushing if closure <= cut.scheduled}.difference(cut.held, cut.left)
        if missing or set(cut.held) & set(cut.left):
            raise BrokenError(f"cut: {cut} does not hold, or leave, each of the closures {sorted(pushing)} once")
    for server in servers:
        for kept in server.saved:
            # The updates of a round have one number.
            changes = dict.fromkeys(one.number for one in server.applied if kept.variable in changed_by(one))
            if [*kept.content] != [number for number in changes if number <= kept.number]:
                raise BrokenError(f"cut: a server has saved {kept}, and the changes of the variable are {[*changes]}")


def check_own(worker: Worker, servers: Sequence[Server]) -> None:
    """Check what a worker sees that begins a closure."""
    for closure, attempt, ranks in worker.own:
        for rank in ranks:
            server = servers[rank - 1]
            if (closure, attempt) not in [*(commit[2:4] for commit in server.applied), *server.dropped]:
                raise BrokenError(f"own: worker {worker.rank} does not see its attempt {attempt} of closure {closure}")


def check_rest(coordinator: Coordinator, servers: Sequence[Server], *, can_work: bool) -> None:
    """Check together, result, progress, memory and cut where nothing moves any more."""
    results = {end.closure for end in coordinator.ends if end.end is End.RESULT}
    for closure, schedule in coordinator.scheduled.items():
        got = attempts_of(closure, [servers[rank - 1] for rank in schedule.servers])
        if len(set(map(tuple, got))) > 1:
            raise BrokenError(f"together: closure {closure} is applied by {got}")
        if any(got) and closure not in results:
            raise BrokenError(f"result: closure {closure} is applied by {got} and has none")
    for number, server in enumerate(servers, 1):
        if server.staging.staged:
            raise BrokenError(f"memory: server {number} keeps {server.staging.staged}")
        wanted = [(cut.number, variable) for cut in coordinator.cuts for variable in range(2)]
        if [kept[:2] for kept in server.saved] != wanted:
            raise BrokenError(f"cut: server {number} has saved {server.saved} of {coordinator.cuts}")
    check_progress(coordinator, servers, can_work=can_work)


def check_progress(coordinator: Coordinator, servers: Sequence[Server], *, can_work: bool) -> None:
    """Check that commits have arrived, and that all is done if somebody can work."""
    applied = [(rank, commit) for rank, server in enumerate(servers, 1) for commit in server.applied]
    if sorted(applied) != sorted(coordinator.sent):
        raise BrokenError(f"progress: of the commits {coordinator.sent} only {applied} are applied")
    closures = coordinator.closures
    if closures.commits.saving or any(closures.commits.unwritten(rank) for rank in closures.commits.servers):
        raise BrokenError(f"progress: {closures.commits} still waits")
    if can_work and (coordinator.position < len(coordinator.program) or not closures.is_done):
        raise BrokenError(f"progress: the user waits at operation {coordinator.position}, {closures}")
