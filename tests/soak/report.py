"""What a soak found, as tables. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

#: The operator's account may differ by this share of the whole time, in each category.
GOAL = 0.01


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one disruption led to.

    Attributes:
        kind: Name of its kind.
        notice: Whether the job got a notice.
        steps_lost: How many completed steps were done again.
        seconds: From the disruption until the first step after it.
        counted: How many restarts it made that count towards the JobSet's limit.
    """

    kind: str
    notice: bool
    steps_lost: int
    seconds: float
    counted: int


@dataclasses.dataclass(frozen=True)
class Found:
    """A whole soak.

    Attributes:
        seed: Of its plan.
        outcomes: What the disruptions led to, in their order.
        account: Each category with its seconds by the trainers' records and by the operator's account. Empty if there
            is none.
        problems: What must not be. Empty: the soak has passed.
    """

    seed: int
    outcomes: tuple[Outcome, ...]
    account: tuple[tuple[str, float, float], ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def broken_promises(outcomes: Iterable[Outcome]) -> list[str]:
    """Returns which disruptions cost more than they may."""
    found = []
    for number, outcome in enumerate(outcomes, 1):
        if outcome.notice and outcome.steps_lost:
            found.append(f"disruption {number}, {outcome.kind}: lost {outcome.steps_lost} steps in spite of its notice")
        if outcome.notice and outcome.counted:
            found.append(f"disruption {number}, {outcome.kind}: {outcome.counted} restarts count towards the limit")
    return found


def unlike(account: Sequence[tuple[str, float, float]]) -> list[str]:
    """Returns the categories in which the accounts differ by more than the goal."""
    whole = sum(own for _, own, _ in account)
    return [
        f"account, {category}: {theirs:.1f} s by the operator, {own:.1f} s by the trainers' records; they differ by "
        f"{abs(theirs - own) / whole:.1%} of the whole time, expected at most {GOAL:.0%}"
        for category, own, theirs in account
        if abs(theirs - own) > GOAL * whole
    ]


def rendered(found: Found) -> str:
    """Returns the report."""
    parts = [_kinds(found.outcomes)]
    if found.account:
        parts.append(account_table(found.account))
    parts.append("\n".join(found.problems) if found.problems else "Nothing was found that must not be.")
    return "\n\n".join(parts)


def _kinds(outcomes: Sequence[Outcome]) -> str:
    rows = [["KIND", "COUNT", "STEPS LOST", "MEDIAN S", "LONGEST S", "COUNTED"]]
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.kind == kind]
        seconds = [outcome.seconds for outcome in of]
        rows.append(
            [
                kind if of[0].notice else f"{kind} (no notice)",
                str(len(of)),
                str(sum(outcome.steps_lost for outcome in of)),
                f"{statistics.median(seconds):.1f}",
                f"{max(seconds):.1f}",
                str(sum(outcome.counted for outcome in of)),
            ]
        )
    return _aligned(rows)


def account_table(account: Sequence[tuple[str, float, float]]) -> str:
    whole = sum(own for _, own, _ in account)
    rows = [["CATEGORY", "TRAINERS S", "OPERATOR S", "DIFFERENCE S", "OF ALL"]]
    for category, own, theirs in (*account, ("all", whole, sum(theirs for _, _, theirs in account))):
        rows.append([category, f"{own:.1f}", f"{theirs:.1f}", f"{theirs - own:+.1f}", f"{(theirs - own) / whole:+.1%}"])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
