"""The outcome of a test on all ranks, and how pytest reports it; the part of `mpidist.testing` that does not talk."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import pytest

from mpidist.comm.agreement import name_ranks


class Outcome(NamedTuple):
    """What one rank tells the others about a phase of a test.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        text: The traceback of a failure, the reason of a skip.
        summary: The last line of it.
        wasxfail: The reason of an expected failure, None for other tests.
    """

    outcome: str
    text: str = ""
    summary: str = ""
    wasxfail: str | None = None


class RankFailure:
    """How pytest prints a failure of other ranks, and sums it up in a line."""

    def __init__(self, text: str, summary: str) -> None:
        self.text = text
        self.reprcrash = self
        self.message = summary

    def toterminal(self, writer: object) -> None:
        """Local. Write the text, as pytest's own representations do."""
        writer.line(self.text)  # type: ignore[attr-defined]  # pytest gives its class no public name

    def __str__(self) -> str:
        return self.text


def outcome_of(report: pytest.TestReport) -> Outcome:
    """Local. What this rank has to tell about a phase of a test."""
    wasxfail: str | None = getattr(report, "wasxfail", None)
    if report.passed:
        return Outcome("passed", wasxfail=wasxfail)
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return Outcome("skipped", reason, reason, wasxfail)
    crash = getattr(report.longrepr, "reprcrash", None)
    summary = report.longreprtext.strip().rpartition("\n")[2] if crash is None else str(crash.message)
    captured = "".join(f"\n----- {name} -----\n{text}" for name, text in report.sections)
    return Outcome("failed", report.longreprtext + captured, summary, wasxfail)


def combine(report: pytest.TestReport, outcomes: list[Outcome], rank: int) -> None:
    """Local. Make this rank's report say what all ranks' outcomes come to.

    A failure anywhere is a failure. Ranks that skip while others run are a failure too; of a test that is expected to
    fail, it is enough that some rank did.

    Args:
        report: This rank's, is changed.
        outcomes: Each rank's `Outcome`.
        rank: This rank.
    """
    failed = [other for other, outcome in enumerate(outcomes) if outcome.outcome == "failed"]
    skipped = [other for other, outcome in enumerate(outcomes) if outcome.outcome == "skipped"]
    if failed:
        _tell_failures(report, outcomes, failed, rank)
    elif skipped and len(skipped) < len(outcomes):
        first = outcomes[skipped[0]]
        if first.wasxfail is not None:
            report.outcome = "skipped"
            report.wasxfail = first.wasxfail
            return
        text = (
            f"all ranks must skip a test, or none: skipped on {name_ranks(skipped)} ({first.text}), run on the others. "
            "Skip on what all ranks know, as the number of ranks"
        )
        report.outcome = "failed"
        report.longrepr = RankFailure(text, text)  # type: ignore[assignment]  # pytest needs these attributes only


def _tell_failures(report: pytest.TestReport, outcomes: list[Outcome], failed: list[int], rank: int) -> None:
    # Ranks that failed alike are told about once.
    alike: dict[str, list[int]] = {}
    for other in failed:
        if outcomes[other].summary != outcomes[rank].summary or rank not in failed:
            alike.setdefault(outcomes[other].summary, []).append(other)
    texts = {
        f"failed on {name_ranks(ranks)} of {len(outcomes)}": outcomes[ranks[0]].text for ranks in alike.values()
    }
    if report.failed:
        report.sections.extend(texts.items())
        return
    report.outcome = "failed"
    text = "\n".join(f"----- {title} -----\n{text}" for title, text in texts.items())
    summary = "; ".join(f"{name_ranks(ranks)}: {line}" for line, ranks in alike.items())
    report.longrepr = RankFailure(text, summary)  # type: ignore[assignment]  # pytest needs these attributes only


def collection_difference(names: list[list[str]], errors: list[list[str]]) -> str:
    """Local. What to say when ranks collected different tests.

    Args:
        names: Each rank's tests, in their order.
        errors: Each rank's tracebacks of what could not be collected.
    """
    ranks = range(len(names))
    different = [rank for rank in ranks if (names[rank], len(errors[rank])) != (names[0], len(errors[0]))]
    text = (
        f"the tests collected must be the same on all ranks, in the same order; on {name_ranks(different)} they are "
        f"not the {len(names[0])} of rank 0"
    )
    for rank in different[:1]:
        pairs = zip_longest(names[0], names[rank], fillvalue="nothing")
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if first is not None:
            text += f". First difference: {first[0]!r} on rank 0, {first[1]!r} on rank {rank}"
    text += ". Parameters made from a set, a random number or the rank do this"
    return text + "".join(f"\n\nrank {rank}: {error}" for rank in ranks for error in errors[rank])
