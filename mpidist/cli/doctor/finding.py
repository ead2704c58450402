"""One thing that the doctor has found, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field

# In the order of how bad they are.
STATES = ("ok", "note", "wrong")


@dataclass(frozen=True)
class Finding:
    """One thing about this machine or this job.

    Attributes:
        subject: A few words.
        state: "ok"; "note", which costs time, or limits what can be done; or "wrong", with which programs fail.
        text: What was found.
        mend: The line that mends it; empty where there is nothing to mend.
        data: The numbers and names of the text, for programs.
    """

    subject: str
    state: str
    text: str
    mend: str = ""
    data: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.state:5} {self.subject:18} {self.text}"]
        return "\n".join([*lines, *([f"{'':24} fix: {self.mend}"] if self.mend else [])])
