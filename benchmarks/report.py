"""How every benchmark tells its figures: a table for people, and with ``--json FILE`` the same for programs.

The file holds ``{"figures": [{"name", "value", "unit", "goal", "met"}], "machine": {...}}``. A figure without
a goal has null for ``goal`` and ``met``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any


class Better(Enum):
    """Which values of a figure meet its goal."""

    LESS = "<="
    MORE = ">="


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: What it is.
        value: The measured value, or None where it could not be measured.
        unit: Its unit, such as ``s``.
        goal: What it should be; None where it is only told.
        better: On which side of the goal it should be.
        not_judged: Why the goal says nothing here, such as "on cpu". Empty: it is judged.
    """

    name: str
    value: float | None
    unit: str
    goal: float | None = None
    better: Better = Better.LESS
    not_judged: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal, or if it is not judged. What was not measured meets none."""
        if self.goal is None or self.not_judged:
            return None
        if self.value is None:
            return False
        return self.value <= self.goal if self.better is Better.LESS else self.value >= self.goal


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return made


def publish(figures: Sequence[Figure], json_path: Path | None, **conditions: Any) -> None:
    """Prints the table, and writes the file if there is to be one.

    Args:
        figures: In the order of the table.
        json_path: The file.
        conditions: Told with the machine in the file.
    """
    print(table(figures), flush=True)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(as_json(figures, {**machine(), **conditions}), indent=2) + "\n")


def table(figures: Sequence[Figure]) -> str:
    """The figures as aligned lines."""
    verdicts = {None: "", True: "met", False: "MISSED"}
    rows = [("figure", "value", "unit", "goal", "")]
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:.4g}"
        goal = "" if figure.goal is None else f"{figure.better.value} {figure.goal:g}"
        verdict = f"not judged {figure.not_judged}" if goal and figure.not_judged else verdicts[figure.met]
        rows.append((figure.name, value, figure.unit, goal, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            (name.ljust(widths[0]), value.rjust(widths[1]), unit.ljust(widths[2]), goal.ljust(widths[3]), met)
        ).rstrip()
        for name, value, unit, goal, met in rows
    )


def as_json(figures: Sequence[Figure], machine: dict[str, Any]) -> dict[str, Any]:
    """The figures as the file holds them."""
    listed = [{"name": f.name, "value": f.value, "unit": f.unit, "goal": f.goal, "met": f.met} for f in figures]
    return {"figures": listed, "machine": machine}


def machine() -> dict[str, Any]:
    """What figures of this machine depend on."""
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "architecture": platform.machine(),
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "tensorstore")},
    }
