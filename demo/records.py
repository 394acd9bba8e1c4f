"""What the processes of a training run wrote down, and whether two runs did the same, bit for bit.

The files are those of ``examples/transformer/record.py``: one of losses a process and attempt, one result a
process. Pure reading; starts nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path

_LOSSES = re.compile(r"losses\.process_(\d+)\.attempt_(\d+)\.jsonl")
_TAIL_BYTES = 4096  # holds many lines
_RESULT = re.compile(r"result\.process_(\d+)\.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step as one process recorded it.

    Attributes:
        loss: The exact value, as ``float.hex`` writes it.
        batch: Digest of which rows of the text the process's share of the batch was.
        unix_s: When the loss was there.
    """

    process: int
    attempt: int
    step: int
    loss: str
    batch: str
    unix_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a run compares with an undisturbed one; ``differences`` says in words what is not equal."""

    losses_equal: bool
    data_equal: bool
    parameters_equal: bool
    differences: tuple[str, ...]


def read(folder: Path) -> list[Step]:
    """Returns every step that the processes of a run have recorded, also those recorded twice.

    A last line without its end is one that is being written, and is left out.
    """
    files = sorted(folder.glob("losses.*.jsonl"))
    return [_step(path, line) for path in files for line in path.read_bytes().split(b"\n")[:-1]]


def newest(folder: Path) -> Step | None:
    """Returns the step recorded last by any process, from the ends of the files; None before the first."""
    last = []
    for path in folder.glob("losses.*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            whole_lines = file.read().split(b"\n")[:-1]
        if whole_lines:
            last.append(_step(path, whole_lines[-1]))
    return max(last, key=lambda step: step.unix_s, default=None)


def final_digests(folder: Path) -> dict[int, str]:
    """Returns each process's digest of its shards of the final state; only processes that have finished."""
    digests = {}
    for path in folder.glob("result.*.json"):
        if match := _RESULT.fullmatch(path.name):
            digests[int(match[1])] = str(json.loads(path.read_text())["digest"])
    return digests


def compare(reference: Path, disturbed: Path, *, steps: int, processes: int, most: int = 5) -> Comparison:
    """Says whether a run and its undisturbed reference did the same.

    Every process of both must have recorded every step from 1 to ``steps``; a step recorded more than once
    must be the same each time. At most ``most`` differences of a kind are named.
    """
    losses: list[str] = []
    data: list[str] = []
    expected = [(process, step) for process in range(processes) for step in range(1, steps + 1)]
    tables = {name: _by_step(read(folder)) for name, folder in (("undisturbed", reference), ("disturbed", disturbed))}
    for what, found, key in (("loss", losses, 0), ("batch", data, 1)):
        for run, table in tables.items():
            for process, step in expected:
                values = {pair[key] for pair in table.get((process, step), ())}
                if len(values) != 1:
                    told = "was not recorded" if not values else f"was recorded as {sorted(values)}"
                    found.append(f"{run} run, process {process}, step {step}: the {what} {told}")
        for at in expected:
            pairs = [table.get(at) for table in tables.values()]
            if all(pairs) and {p[key] for p in pairs[0] or ()} != {p[key] for p in pairs[1] or ()}:
                found.append(f"process {at[0]}, step {at[1]}: the {what} is not that of the undisturbed run")
    parameters = _parameter_differences(final_digests(reference), final_digests(disturbed), processes)
    return Comparison(
        losses_equal=not losses,
        data_equal=not data,
        parameters_equal=not parameters,
        differences=(*_shortened(losses, most), *_shortened(data, most), *parameters),
    )


def _step(path: Path, line: bytes) -> Step:
    match = _LOSSES.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: expected a name like losses.process_0.attempt_0.jsonl")
    return Step(process=int(match[1]), attempt=int(match[2]), **json.loads(line))


def _by_step(steps: Iterable[Step]) -> dict[tuple[int, int], set[tuple[str, str]]]:
    table: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for step in steps:
        table.setdefault((step.process, step.step), set()).add((step.loss, step.batch))
    return table


def _parameter_differences(reference: dict[int, str], disturbed: dict[int, str], processes: int) -> list[str]:
    differences = []
    for process in range(processes):
        if process not in reference or process not in disturbed:
            missing = [name for name, d in (("undisturbed", reference), ("disturbed", disturbed)) if process not in d]
            differences.append(f"process {process} left no final digest in the {' and the '.join(missing)} run")
        elif reference[process] != disturbed[process]:
            differences.append(f"process {process}: its shards of the final state are not those of the undisturbed run")
    return differences


def _shortened(differences: list[str], limit: int) -> list[str]:
    more = len(differences) - limit
    return differences if more <= 0 else [*differences[:limit], f"... and {more} more of this kind"]
