"""What a check says. Pure data."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # it works, and somebody should look at it
    FAILED = "FAILED"
    UNKNOWN = "unknown"  # this user may not see what the check needs


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One check.

    Attributes:
        name: What was checked.
        message: What was found, and what to do.
    """

    name: str
    state: CheckState
    message: str

    def to_json(self) -> dict[str, str]:
        """Returns the check as JSON."""
        return {"name": self.name, "state": str(self.state), "message": self.message}
