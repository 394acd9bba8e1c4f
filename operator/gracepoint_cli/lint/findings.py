"""What a finding is. Pure data."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # the workload is refused, or loses its work
    WARNING = "warning"  # a preemption may cost more than it must
    INFO = "info"  # good to know


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        rule: Name of the rule, which does not change between versions.
        path: The field, as a path from the object's top. Empty if it is about the whole object.
        message: What was found, why that matters, and what to do.
    """

    severity: Severity
    rule: str
    path: str
    message: str

    def to_json(self) -> dict[str, str]:
        """Returns the finding as JSON."""
        return {"severity": str(self.severity), "rule": self.rule, "path": self.path, "message": self.message}
