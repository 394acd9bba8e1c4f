"""Compares the states of all processes once, at the first step, so that a difference is not found in an emergency.

Each process plans its part of a save by itself. This is correct only if all processes have the same leaves, with the
same shapes, types and placement, and if leaves that each process has a copy of have the same values. So every process
computes a digest of its state, and the processes compare the digests. If they differ, process 0 publishes what it has,
leaf by leaf, each process reports its differences, and all processes raise the same error. The last process to report
makes the message, so that no process reads the reports of thousands.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, as_bytes
from gracepoint.checkpoint.planning.chunks import WritePlan
from gracepoint.checkpoint.planning.shard_holders import processes_with
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.errors import CheckpointError
from gracepoint.jax_isolation import to_numpy
from gracepoint.process_group import ProcessGroup

# Seconds to wait for the other processes, whose first step may take longer.
_MEETING_TIMEOUT_S = 900.0
#: Largest size in bytes of a leaf whose values are compared here. Values of larger leaves are compared by each save.
SMALL_BYTES = 64 << 10
# Most leaves that a process reports, and that an error names.
_SHOWN = 5
_SHOWN_CHARACTERS = 80

_WHAT_TO_DO = (
    "What each process has of its own belongs into host_state, whose names are those of all processes; the rest must "
    "be made alike, as by the same seed and code in all processes"
)


def meeting_of(key: str) -> str:
    """Returns the key at which the processes exchange digests. A process that fails before that fails this key."""
    return f"{key}/alike"


@dataclasses.dataclass(frozen=True)
class Said:
    """The description of a leaf in one process, as text.

    Attributes:
        form: Kind, shape, type and chunks of the leaf.
        lies: Whether the leaf is one array over processes or a copy in each process, and which processes write it.
        value: Value or checksum of a small leaf that each process has a copy of. Empty for all other leaves.
    """

    form: str
    lies: str
    value: str

    def differing(self, other: Said) -> tuple[str, str]:
        """Returns the first field in which this description differs from ``other``, from both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return next((mine, theirs) for mine, theirs in pairs if mine != theirs)


def describe(
    leaves: Sequence[pytree.Leaf], specs: Sequence[ArraySpec | None], plan: WritePlan, host_state: Iterable[str] = ()
) -> dict[str, Said]:
    """Returns the description of each leaf in this process, by name, and that of the host state's names.

    Args:
        leaves: The leaves of this process's state.
        specs: How each leaf is stored. None for a leaf that is not an array.
        plan: The part of a save that this process does.
        host_state: The names of this process's host state. Their values are its own, the names are those of all.
    """
    found = {
        leaf.name: _said(leaf, spec, plan.owners.get(position, 0))
        for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
    }
    return found | {f"host_state({name!r})": Said("registered", "", "") for name in sorted(host_state)}


def check(mine: Mapping[str, Said], *, gang: ProcessGroup, key: str) -> None:
    """Checks that all processes save the same state. Collective.

    Args:
        mine: What ``describe`` returned in this process.
        gang: The processes that save together.
        key: Prefix of the keys that they use.

    Raises:
        CheckpointError: The states differ; names leaves, what they are, and in which processes. Raised in all
            processes.
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
    mine_of_all = json.dumps(differences[:_SHOWN])
    told = gang.reduce(f"{meeting_of(key)}/differences", mine_of_all, _told, timeout_s=_MEETING_TIMEOUT_S)
    raise CheckpointError(told)


def _said(leaf: pytree.Leaf, spec: ArraySpec | None, owners: int) -> Said:
    if spec is None:
        return Said(leaf.value_type, "", repr(leaf.data) if leaf.value_type == pytree.STRING else "")
    how = json.dumps([spec.kind, spec.key_impl, spec.write_shape, spec.format.to_json()])
    form = f"{leaf.value_type} {spec.dtype}{list(spec.shape)} in chunks of {list(spec.chunk)} ({how})"
    if leaf.is_global:
        return Said(form, f"one array over processes {_processes_of(leaf.data.sharding)} (plan {owners:08x})", "")
    return Said(form, f"a copy in each process (plan {owners:08x})", _value(leaf.data))


@functools.lru_cache(maxsize=256)
def _processes_of(sharding: Any) -> str:
    return _ranges(sorted(processes_with(sharding)))


def _value(data: Any) -> str:
    if data.nbytes > SMALL_BYTES:
        return ""
    values = to_numpy(data)
    shown = str(values[()]) if values.ndim == 0 and not isinstance(data, jax.Array) else ""
    return " ".join(filter(None, [shown, f"values with checksum {crc32(as_bytes(values)):08x}"]))


def _differences(mine: Mapping[str, Said], theirs: Mapping[str, Said]) -> Iterable[tuple[str, str, str]]:
    """Yields the name of each leaf that differs, with the descriptions of this process and of process 0."""
    for name in sorted({*mine, *theirs}):
        if name not in mine:
            yield name, "nothing", theirs[name].form
        elif name not in theirs:
            yield name, mine[name].form, "nothing"
        elif mine[name] != theirs[name]:
            here, there = mine[name].differing(theirs[name])
            yield name, here[:_SHOWN_CHARACTERS], there[:_SHOWN_CHARACTERS]


def _told(answers: Sequence[str]) -> str:
    """Returns the message from the differences that each process found, as JSON."""
    processes_of: dict[tuple[str, ...], list[int]] = {}
    for process, differences in enumerate(answers):
        for difference in json.loads(differences):
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
    """Returns ascending numbers as ranges, for example "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
