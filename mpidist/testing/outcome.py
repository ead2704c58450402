"""The outcome of a test on all ranks, and its report in pytest. Nothing here communicates."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import pytest

from mpidist.comm.group.agreement import name_ranks

# So the report of a test begins that was to fail, with strict=True, and has passed.
_STRICT = "[XPASS(strict)]"


class Outcome(NamedTuple):
    """The outcome of a phase of a test on one rank.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        text: The traceback of a failure, or the reason of a skip.
        summary: The last line of the text.
        wasxfail: The reason of an expected failure, also of one that did not come; None for other tests.
    """

    outcome: str
    text: str = ""
    summary: str = ""
    wasxfail: str | None = None


class RankFailure:
    """A failure of other ranks, in the form that pytest prints and sums up in a line."""

    def __init__(self, text: str, summary: str) -> None:
        self.text = text
        self.reprcrash = self
        self.message = summary

    def toterminal(self, writer: object) -> None:
        """Local. Write the text to pytest's terminal."""
        writer.line(self.text)  # type: ignore[attr-defined]  # pytest gives its class no public name

    def __str__(self) -> str:
        return self.text


def outcome_of(report: pytest.TestReport) -> Outcome:
    """Local. This rank's outcome of a phase of a test."""
    wasxfail: str | None = getattr(report, "wasxfail", None)
    if report.passed:
        return Outcome("passed", wasxfail=wasxfail)
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return Outcome("skipped", reason, reason, wasxfail)
    if isinstance(report.longrepr, str) and report.longrepr.startswith(_STRICT):
        wasxfail = report.longrepr[len(_STRICT):].strip()
    crash = getattr(report.longrepr, "reprcrash", None)
    summary = report.longreprtext.strip().rpartition("\n")[2] if crash is None else str(crash.message)
    captured = "".join(f"\n----- {name} -----\n{text}" for name, text in report.sections)
    return Outcome("failed", report.longreprtext + captured, summary, wasxfail)


def combine(report: pytest.TestReport, outcomes: list[Outcome], rank: int) -> None:
    """Local. Change this rank's report to the common outcome of all ranks.

    A failure on any rank is a failure, and so is a test that some ranks skip and others run. A test that is expected to
    fail has to do so on some rank only.

    Args:
        report: This rank's report; it is changed.
        outcomes: The outcomes of all ranks.
        rank: This rank.
    """
    skipped = [other for other, outcome in enumerate(outcomes) if outcome.outcome == "skipped"]
    is_expected = any(outcomes[other].wasxfail is not None for other in skipped)
    failed = [
        other for other, outcome in enumerate(outcomes)
        if outcome.outcome == "failed" and not (is_expected and outcome.wasxfail is not None)
    ]
    if failed:
        _tell_failures(report, outcomes, failed, rank)
    elif skipped and len(skipped) < len(outcomes):
        first = outcomes[skipped[0]]
        if first.wasxfail is not None:
            if not report.skipped:
                report.outcome, report.longrepr = "skipped", None
            report.wasxfail = first.wasxfail
            return
        text = (
            f"either all ranks must skip a test, or none: skipped on {name_ranks(skipped)} ({first.text}), run on the "
            "others. Let a condition decide that is the same on all ranks, for example the number of ranks"
        )
        report.outcome = "failed"
        report.longrepr = RankFailure(text, text)  # type: ignore[assignment]  # pytest needs these attributes only


def _tell_failures(report: pytest.TestReport, outcomes: list[Outcome], failed: list[int], rank: int) -> None:
    # Ranks with the same failure are reported together.
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
    """Local. The error text for ranks that collected different tests.

    Args:
        names: The tests of each rank, in their order.
        errors: The tracebacks of each rank's collection.
    """
    ranks = range(len(names))
    different = [rank for rank in ranks if (names[rank], len(errors[rank])) != (names[0], len(errors[0]))]
    text = (
        f"the tests collected must be the same on all ranks, in the same order; on {name_ranks(different)} they are "
        f"not the {len(names[0])} tests of rank 0"
    )
    for rank in different[:1]:
        pairs = zip_longest(names[0], names[rank], fillvalue="nothing")
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if first is not None:
            text += f". First difference: {first[0]!r} on rank 0, {first[1]!r} on rank {rank}"
    text += ". Do not make the parameters of tests from a set, a random number or the rank"
    return text + "".join(f"\n\nrank {rank}: {error}" for rank in ranks for error in errors[rank])
