"""The compiler of loops over arrays, of the extra `fast`: loaded once there is enough work for it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpidist.comm.cores import own_cores
from mpidist.launch import is_first_rank

logger = logging.getLogger("mpidist")

VARIABLE = "MPIDIST_COMPILE"
# Loading takes a tenth of a second of a core, and the ranks of a node load at the same time: with so many on each core
# the first step waits 1.2 s for it, and half a second for its loops.
MOST_RANKS_PER_CORE = 12
_FUNCTION = "loop"
_MODULE = "mpidist.comm.arithmetic.machine_code"


class Code(Protocol):
    """The owner of the machine code of a loop: calls need it alive.

    Attributes:
        call: The function. Arrays are given as addresses.
    """

    call: Callable[..., None]

    @property
    def assembly(self) -> str:
        """Local. The instructions, for people and tests."""
        ...


def load(rank_count: int = 1) -> bool:
    """Local. Whether loops are compiled. The first call that returns True takes 0.1 s.

    Args:
        rank_count: Number of ranks that share the cores of this machine.
    """
    if os.environ.get(VARIABLE) == "0":
        return False
    return (is_loaded() or not _are_too_many(rank_count)) and _compiler() is not None


def is_loaded() -> bool:
    """Local. Whether the compiler is loaded, by any caller."""
    return _MODULE in sys.modules


def loop_text(
    arguments: str, lines: Sequence[str], *, step: int = 1, carried: Sequence[str] = (), end: Sequence[str] = (),
    last: str = "body",
) -> str:
    """Local. The text of a function over `%count` elements, in LLVM's language.

    Args:
        arguments: The arguments after the count.
        lines: The lines of the loop, for the element `%i`.
        step: The number of elements in one iteration of the loop; the count is a multiple of it.
        carried: Lines that begin the loop, for values of the round before: from `%entry` and from `%body`.
        end: Lines after the loop, which begin with the choice of values from `%entry` and `%body`.
        last: The label of the block in which the lines end.
    """
    return "\n".join([
        f"define void @{_FUNCTION}(i64 %count, {arguments}) {{",
        "entry:", "  %some = icmp sgt i64 %count, 0", "  br i1 %some, label %body, label %done",
        "body:", f"  %i = phi i64 [0, %entry], [%next, %{last}]", *carried, *lines,
        f"  %next = add nuw nsw i64 %i, {step}", "  %more = icmp slt i64 %next, %count",
        "  br i1 %more, label %body, label %done",
        "done:", *end, "  ret void", "}", "",
    ])


def rows_text(arguments: str, outer: Sequence[str], lines: Sequence[str]) -> str:
    """Local. The text of a function over `%count` rows of `%width` elements each, at least one, in LLVM's language.

    Args:
        arguments: The arguments after the count and the width.
        outer: Lines for the row `%i`.
        lines: Lines for the element `%j` of the row.
    """
    inner = [
        "  br label %inner", "inner:", "  %j = phi i64 [0, %body], [%after, %inner]", *lines,
        "  %after = add nuw nsw i64 %j, 1", "  %inside = icmp slt i64 %after, %width",
        "  br i1 %inside, label %inner, label %rest", "rest:",
    ]
    return loop_text(f"i64 %width, {arguments}", [*outer, *inner], last="rest")


def compile_loop(text: str, arguments: Sequence[Any]) -> Code | None:
    """Local. The machine code of a loop, after `load`; None, with a warning, if it could not be compiled.

    Args:
        text: The text of a module with one `loop_text` or `rows_text`.
        arguments: Types of the arguments after the count, those of ctypes.
    """
    try:
        code: Code = _compiler().MachineCode(text, _FUNCTION, [ctypes.c_int64, *arguments])
    except Exception as error:
        # Whatever is wrong with the compiler here: NumPy can do without.
        logger.warning("a loop is left to NumPy, since it could not be compiled: %s", error)
        return None
    return code


@functools.cache
def _are_too_many(rank_count: int) -> bool:
    """Whether the ranks would wait too long for one another. Ranks may be bound: a rank's own cores say little."""
    quota = own_cores().quota
    cores = min(os.cpu_count() or 1, quota.cores if quota is not None else rank_count)
    if rank_count <= MOST_RANKS_PER_CORE * cores:
        return False
    if is_first_rank():
        logger.info(
            "loops over arrays are left to NumPy: %d ranks on %d cores would wait for one another while they load the "
            "compiler", rank_count, cores,
        )
    return True


@functools.cache
def _compiler() -> Any:
    """The module that compiles, None where there is none."""
    try:
        module = importlib.import_module(_MODULE)
    except Exception as error:
        # An OSError if the library cannot be loaded, a RuntimeError if it does not know the processor. NumPy can do
        # without.
        if is_first_rank():
            logger.info(
                "variable updates use NumPy (several passes over memory): %s. pip install 'mpidist[fast]' for compiled "
                "updates", error
            )
        return None
    if is_first_rank():
        logger.info("loops over arrays are compiled by %s; %s=0 leaves them to NumPy", module.version, VARIABLE)
    return module
