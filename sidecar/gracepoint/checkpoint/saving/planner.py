"""Plans saves once for all states of one form: how leaves are stored, which process writes what, and snapshot memory.

The thread that saves owns a planner. The form of a state is the names, shapes, types and shardings of its leaves, and
the arguments that they are saved with.

``check`` compares the states of all processes once, at the first step.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from gracepoint import machine
from gracepoint.checkpoint import memory
from gracepoint.checkpoint.format import orbax_metadata, pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, as_bytes, tree_digest
from gracepoint.checkpoint.format.host_state import encode
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, IN_THREADS, WriteOptions
from gracepoint.checkpoint.planning import chunks
from gracepoint.checkpoint.planning.chunks import WritePlan, part_of
from gracepoint.checkpoint.planning.grid import TreeSignature, processes_with, stored_specs
from gracepoint.checkpoint.saving.device_copy import compile_slices
from gracepoint.checkpoint.saving.host_snapshot import HostSnapshot, Priorities, Specs, ask_priorities, snapshot_bytes
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointError
from gracepoint.jax_isolation import to_numpy
from gracepoint.process_group import ProcessGroup, SingleProcess

# Seconds to wait for the other processes, whose first step may take longer.
_MEETING_TIMEOUT_S = 900.0
#: Largest size in bytes of a leaf whose values are compared here. Values of larger leaves are compared by each save.
SMALL_BYTES = 64 << 10
# Most leaves that a process reports, and that an error names.
_SHOWN = 5
_SHOWN_CHARACTERS = 80

_WHAT_TO_DO = (
    "What differs between processes belongs into host_state, whose names are those of all processes; the rest must "
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
        return next((own, others) for own, others in pairs if own != others)


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
    descriptions = {
        leaf.name: _said(leaf, spec, plan.owners.get(position, 0))
        for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
    }
    return descriptions | {f"host_state({name!r})": Said("registered", "", "") for name in sorted(host_state)}


def check(own: Mapping[str, Said], *, gang: ProcessGroup, key: str) -> None:
    """Checks that all processes save the same state. Collective.

    Compares the states of all processes once, at the first step, so that a difference is not found in an emergency.

    Each process plans its part of a save by itself. This is correct only if all processes have the same leaves, with
    the same shapes, types and placement, and if leaves that each process has a copy of have the same values. So every
    process computes a digest of its state, and the processes compare the digests. If they differ, process 0 publishes
    what it has, leaf by leaf, each process reports its differences, and all processes raise the same error. The last
    process to report makes the message, so that no process reads the reports of thousands.

    Args:
        own: What ``describe`` returned in this process.
        gang: The processes that save together.
        key: Prefix of the keys that they use.

    Raises:
        CheckpointError: The states differ; names leaves, what they are, and in which processes. Raised in all
            processes.
        BarrierError: Another process did not come in time, or has failed.
    """
    if gang.process_count == 1:
        return
    word = json.dumps([[name, *dataclasses.astuple(description)] for name, description in own.items()])
    digest = hashlib.sha256(word.encode()).hexdigest()[:32]
    digests = gang.gather(meeting_of(key), digest, timeout_s=_MEETING_TIMEOUT_S)
    if len(set(digests)) == 1:
        return
    first = gang.broadcast(
        f"{meeting_of(key)}/first", word if gang.process_index == 0 else None, timeout_s=_MEETING_TIMEOUT_S
    )
    other = {name: Said(*description) for name, *description in json.loads(first)}
    differences = list(_differences(own, other))
    mine_of_all = json.dumps(differences[:_SHOWN])
    message = gang.reduce(
        f"{meeting_of(key)}/differences", mine_of_all, _differences_message, timeout_s=_MEETING_TIMEOUT_S
    )
    raise CheckpointError(message)


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


def _differences(own: Mapping[str, Said], other: Mapping[str, Said]) -> Iterable[tuple[str, str, str]]:
    """Yields the name of each leaf that differs, with the descriptions of this process and of process 0."""
    for name in sorted({*own, *other}):
        if name not in own:
            yield name, "nothing", other[name].form
        elif name not in other:
            yield name, own[name].form, "nothing"
        elif own[name] != other[name]:
            here, there = own[name].differing(other[name])
            yield name, here[:_SHOWN_CHARACTERS], there[:_SHOWN_CHARACTERS]


def _differences_message(answers: Sequence[str]) -> str:
    """Returns the message from the differences that each process found, as JSON."""
    processes_of: dict[tuple[str, ...], list[int]] = {}
    for process, differences in enumerate(answers):
        for difference in json.loads(differences):
            processes_of.setdefault(tuple(difference), []).append(process)
    parts = [
        f"leaf {name!r}: {there} in process 0, {here} in process {_ranges(processes)}"
        for (name, here, there), processes in processes_of.items()
    ]
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    if not parts:
        parts = ["the same leaves come in another order"]
    shown = "; ".join(parts[:_SHOWN]) + more
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


logger = logging.getLogger(__name__)

#: From this number of chunks on, each process writes a part of the manifest. Older versions of Gracepoint cannot read
#: a manifest in parts.
MANY_CHUNKS = 4096


@dataclasses.dataclass
class PreparedSave:
    """What holds for all states of one form.

    Attributes:
        form: The form.
        save_args: The arguments that these states are saved with.
        specs: How each leaf is stored. None for a leaf that is not an array.
        digest: Digest of the specs of all arrays.
        metadata: Contents of Orbax's metadata files, by name below the item's folder. Empty in all processes but the
            first.
        plan: The part of a save that this process does.
        handlers: Handlers of types that are not saved without one. None: there are none.
        snapshot: Memory for a snapshot. None if it is not reserved yet.
        has_many_chunks: Whether the manifest of a save is in parts, in a store that can rename.
        chunk_writers: Which process writes each chunk, as bytes. Empty if the manifest is not in parts, and in all
            processes but the first.
    """

    form: TreeSignature
    save_args: Any
    specs: Specs
    digest: str
    metadata: Mapping[str, bytes]
    plan: WritePlan
    handlers: HandlerRegistry | None = None
    snapshot: HostSnapshot | None = None
    has_many_chunks: bool = False
    chunk_writers: bytes = b""

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The specs of the leaves that are arrays."""
        return tuple(spec for spec in self.specs if spec is not None)


@dataclasses.dataclass(frozen=True)
class SaveSettings:
    """What holds for all saves of one checkpointer.

    Attributes:
        options: How arrays are written.
        host_memory_limit_bytes: Largest size of a snapshot in this process. None: the available memory of the host.
        handlers: Handlers of types that are not saved without one, equal in all processes. None: there are none.
        processes: ``jax.process_index()`` of each process of the gang. None: the index in the gang is the same.
        sends: Whether what is planned is sent to the memory of nodes, and not written to storage.
    """

    options: WriteOptions = DEFAULT_OPTIONS
    host_memory_limit_bytes: int | None = None
    handlers: HandlerRegistry | None = None
    processes: Sequence[int] | None = None
    sends: bool = False


DEFAULT_SETTINGS = SaveSettings()


class SavePlanner:
    """Plans saves, and reserves memory for snapshots. A state of the same form as the one before is not planned again.

    Args:
        gang: The processes that save together.
        attempt: Unique for each start of the gang; the same in all its processes.
        settings: What holds for all saves.
    """

    def __init__(self, gang: ProcessGroup, attempt: str, settings: SaveSettings) -> None:
        self._gang = gang
        self._attempt = attempt
        self._options = settings.options
        self._handlers = settings.handlers
        self._processes = settings.processes
        self._memory_limit_bytes = settings.host_memory_limit_bytes
        self._sends = settings.sends
        self._left = machine.left_by_pool
        self._prepares = 0
        self._prepared: PreparedSave | None = None

    def prepare(
        self,
        state: Any,
        *,
        in_background: bool,
        save_args: Any = None,
        host_state: Callable[[], Mapping[str, Any]] = dict,
        held_bytes: int = 0,
    ) -> int:
        """Plans a save, and compares the plan with those of the other processes. Collective.

        Also compiles the functions that copy slices of shards. With ``in_background``, memory for a snapshot is
        reserved and touched, too. ``held_bytes`` of the limit are in use for something else.

        Returns:
            Bytes of the state over all processes.

        Raises:
            CheckpointError: The state cannot be saved, or is not the same in all processes; names the leaf. Or there
                is no memory for a snapshot.
            BarrierError: Another process did not come in time, or has failed.
        """
        self._prepares += 1
        key = f"checkpoint/{self._attempt}/prepare/{self._prepares}"
        with memory.reporting_errors(self._gang, meeting_of(key)):
            leaves, prepared = self.plan(state, save_args)
            compile_slices(leaves, prepared.plan, self._options)
            values = host_state()
            encode(values)  # so that what cannot be saved is not found in an emergency
            several = self._gang.process_count > 1
            description = describe(leaves, prepared.specs, prepared.plan, values) if several else {}
        check(description, gang=self._gang, key=key)
        if in_background or self._options.writer not in IN_THREADS:  # a worker needs a snapshot in emergencies, too
            priorities = ask_priorities(leaves, prepared.plan, self._options)
            self._check_fits(self._needed_bytes(prepared, priorities), self._gang, key, held_bytes)
            self._reserve(prepared, priorities)
        return prepared.plan.total_bytes

    def plan(self, state: Any, save_args: Any = None) -> tuple[list[pytree.Leaf], PreparedSave]:
        """Returns the leaves of ``state``, and the plan for all states of its form.

        Raises:
            CheckpointError: A leaf cannot be saved; names it.
        """
        if self._prepared is not None:
            leaves_there = self._prepared.form.leaves_of(state) if self._prepared.save_args == save_args else None
            if leaves_there is not None:
                return leaves_there, self._prepared
            logger.info("the state has another form than before: planning its saves again")
        leaves = pytree.flatten(state, self._handlers)
        if code := [leaf.name for leaf in leaves if leaf.is_code]:
            logger.info(
                "%d functions, as %r, are not saved: a restore takes them from like or init", len(code), code[0]
            )
        self._prepared = None  # frees the old snapshot before a new one is reserved
        self._prepared = self._prepare(leaves, TreeSignature(state, leaves, self._handlers), save_args)
        return leaves, self._prepared

    def snapshot(self, leaves: Sequence[pytree.Leaf], prepared: PreparedSave, key: str) -> HostSnapshot:
        """Returns the memory for the snapshot of one save, for the priorities that its leaves have in this save.

        It is reserved if ``prepare`` or an earlier save did not reserve it for the same priorities. It is also reserved
        if an interrupted save has left something behind that uses the memory and does not end, which then keeps it.

        Raises:
            CheckpointError: It does not fit into memory; ``key`` names the save.
        """
        priorities = ask_priorities(leaves, prepared.plan, self._options)
        if prepared.snapshot is not None and not prepared.snapshot.is_free():
            logger.warning("an interrupted save still uses the memory of its snapshot: another snapshot is reserved")
            prepared.snapshot = None
        if prepared.snapshot is not None and prepared.snapshot.priorities != priorities:
            prepared.snapshot = None  # frees it before the new one is reserved
        needed_bytes = self._needed_bytes(prepared, priorities)
        if needed_bytes > 0:
            # This state was not prepared. The other processes may have prepared it, so none is waited for.
            self._check_fits(needed_bytes, SingleProcess(), key)
        return self._reserve(prepared, priorities)

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that the snapshot takes. 0 if none is reserved."""
        prepared = self._prepared
        if prepared is None or prepared.snapshot is None:
            return 0
        return snapshot_bytes(prepared.plan, prepared.snapshot.priorities)

    def _needed_bytes(self, prepared: PreparedSave, priorities: Priorities) -> int:
        return 0 if prepared.snapshot is not None else snapshot_bytes(prepared.plan, priorities)

    def _reserve(self, prepared: PreparedSave, priorities: Priorities) -> HostSnapshot:
        if prepared.snapshot is None:
            prepared.snapshot = HostSnapshot(
                prepared.specs, prepared.plan, priorities, shared=self._options.writer not in IN_THREADS
            )
        return prepared.snapshot

    def _check_fits(self, needed_bytes: int, gang: ProcessGroup, key: str, held_bytes: int = 0) -> None:
        memory.check_fits(
            needed_bytes,
            self._memory_limit_bytes,
            gang=gang,
            key=key,
            free_memory=self._left,
            held_bytes=held_bytes,
            sends=self._sends,
        )

    def _prepare(self, leaves: Sequence[pytree.Leaf], form: TreeSignature, save_args: Any) -> PreparedSave:
        index, count = self._gang.process_index, self._gang.process_count
        specs = stored_specs(leaves, count, self._options, save_args, self._processes)
        stored = [dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True)]
        owners = chunks.assign(stored, count, self._processes, max_replicas=self._options.max_replicas)
        plan = part_of(owners, stored, index)
        has_many = plan.total_chunks >= MANY_CHUNKS
        metadata = {}
        if index == 0:  # this process writes them
            metadata = orbax_metadata.metadata_files(
                stored,
                store_sharding=self._options.store_sharding,
                store_array_metadata=self._options.store_array_metadata,
            )
        # A copy, as the caller may change the arguments before the next save.
        return PreparedSave(
            form,
            copy.deepcopy(save_args),
            specs,
            tree_digest(pytree.specs_of(stored)),
            metadata,
            plan,
            self._handlers,
            has_many_chunks=has_many,
            chunk_writers=chunks.table(owners) if has_many and index == 0 else b"",
        )
