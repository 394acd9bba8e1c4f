"""Whether all processes would save the same: compared once, at the first step, and not found out in the emergency.

Each process plans its part of a save by itself. That works only if all have the same leaves, in the same form, lying
in the same way, and if what each has a copy of is the same everywhere. So every process makes a digest of all that and
they compare it. Where digests differ, process 0 tells what it has, leaf by leaf, and each process says what is
different in it; then all raise the same error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, as_bytes
from gracepoint.checkpoint.planning.write_plan import WritePlan
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.errors import CheckpointError
from gracepoint.process_group import ProcessGroup

# For the other processes to come: as long as their first step may take them longer.
_MEETING_TIMEOUT_S = 900.0
#: Values of larger leaves are compared by the saves alone.
SMALL_BYTES = 64 << 10
# Leaves that a process tells of, and an error names.
_SHOWN = 5
_SHOWN_CHARACTERS = 80

_WHAT_TO_DO = (
    "What each process has of its own belongs into host_state; the rest must be made alike, as by the same seed and "
    "code in all processes"
)


def meeting_of(key: str) -> str:
    """Returns where the processes meet first; one that does not come fails it."""
    return f"{key}/alike"


@dataclasses.dataclass(frozen=True)
class Said:
    """What one process has of a leaf, in words.

    Attributes:
        form: Its kind, shape, type and chunks.
        lies: Whether it is one array over processes, or a copy in each, and who writes it.
        value: Of a small leaf that each process has a copy of; empty for all others.
    """

    form: str
    lies: str
    value: str

    def differing(self, other: Said) -> tuple[str, str]:
        """Returns what this one and ``other`` say of the first thing that they differ in."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return next((mine, theirs) for mine, theirs in pairs if mine != theirs)


def describe(leaves: Sequence[pytree.Leaf], specs: Sequence[ArraySpec | None], plan: WritePlan) -> dict[str, Said]:
    """Returns what this process has of each leaf, by name.

    Args:
        leaves: Of this process's state.
        specs: What is stored of each; None for what is no array.
        plan: Of this process.
    """
    return {
        leaf.name: _said(leaf, spec, plan.owners.get(position, 0))
        for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
    }


def check(mine: Mapping[str, Said], *, gang: ProcessGroup, key: str) -> None:
    """Makes sure that all processes save the same state. Collective.

    Args:
        mine: What ``describe`` returned in this process.
        gang: The processes that save.
        key: Below which they meet.

    Raises:
        CheckpointError: They do not, in all of them; names leaves, what they are, and in which processes.
        BarrierError: Another process did not come in time, or has failed.
    """
    if gang.process_count == 1:
        return
    word = json.dumps([[name, *dataclasses.astuple(said)] for name, said in mine.items()])
    digest = hashlib.sha256(word.encode()).hexdigest()[:32]
    digests = gang.gather(meeting_of(key), digest, timeout_s=_MEETING_TIMEOUT_S)
    if len(set(digests)) == 1:
        return
    first = gang.broadcast(
        f"{meeting_of(key)}/first", word if gang.process_index == 0 else None, timeout_s=_MEETING_TIMEOUT_S
    )
    theirs = {name: Said(*said) for name, *said in json.loads(first)}
    differences = list(_differences(mine, theirs))
    answers = gang.gather(
        f"{meeting_of(key)}/differences", json.dumps(differences[:_SHOWN]), timeout_s=_MEETING_TIMEOUT_S
    )
    raise CheckpointError(_told([json.loads(answer) for answer in answers]))


def _said(leaf: pytree.Leaf, spec: ArraySpec | None, owners: int) -> Said:
    if spec is None:
        return Said(leaf.value_type, "", repr(leaf.data) if leaf.value_type == pytree.STRING else "")
    how = json.dumps([spec.kind, spec.key_impl, spec.write_shape, spec.format.to_json()])
    form = f"{leaf.value_type} {spec.dtype}{list(spec.shape)} in chunks of {list(spec.chunk)} ({how})"
    if leaf.is_global:
        processes = sorted({device.process_index for device in leaf.data.sharding.device_set})
        return Said(form, f"one array over processes {_ranges(processes)} (plan {owners:08x})", "")
    return Said(form, f"a copy in each process (plan {owners:08x})", _value(leaf.data))


def _value(data: Any) -> str:
    if data.nbytes > SMALL_BYTES:
        return ""
    values = np.asarray(data)
    shown = str(values[()]) if values.ndim == 0 and not isinstance(data, jax.Array) else ""
    return " ".join(filter(None, [shown, f"values with checksum {crc32(as_bytes(values)):08x}"]))


def _differences(mine: Mapping[str, Said], theirs: Mapping[str, Said]) -> Iterable[tuple[str, str, str]]:
    """Yields leaves with what this process and process 0 have of them."""
    for name in sorted({*mine, *theirs}):
        if name not in mine:
            yield name, "nothing", theirs[name].form
        elif name not in theirs:
            yield name, mine[name].form, "nothing"
        elif mine[name] != theirs[name]:
            here, there = mine[name].differing(theirs[name])
            yield name, here[:_SHOWN_CHARACTERS], there[:_SHOWN_CHARACTERS]


def _told(answers: Sequence[Sequence[Sequence[str]]]) -> str:
    processes_of: dict[tuple[str, ...], list[int]] = {}
    for process, differences in enumerate(answers):
        for difference in differences:
            processes_of.setdefault(tuple(difference), []).append(process)
    found = [
        f"leaf {name!r}: {there} in process 0, {here} in process {_ranges(processes)}"
        for (name, here, there), processes in processes_of.items()
    ]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    if not found:
        found = ["the same leaves come in another order"]
    shown = "; ".join(found[:_SHOWN]) + more
    return f"the state is not the same in all processes, and cannot be saved: {shown}. {_WHAT_TO_DO}"


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in words: "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
