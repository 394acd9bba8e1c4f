"""Plans saves once for all states of one form: how leaves are stored, which process writes what, and snapshot memory.

The thread that saves owns a planner. The form of a state is the names, shapes, types and shardings of its leaves, and
the arguments that they are saved with.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint import machine
from gracepoint.checkpoint.format import orbax_metadata, pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, tree_digest
from gracepoint.checkpoint.format.host_state import encode
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.memory import host_memory
from gracepoint.checkpoint.options import IN_THREADS, WriteOptions
from gracepoint.checkpoint.planning import chunk_owners
from gracepoint.checkpoint.planning.chunk_grid import stored_specs
from gracepoint.checkpoint.planning.chunks import WritePlan
from gracepoint.checkpoint.planning.tree_signature import TreeSignature
from gracepoint.checkpoint.planning.write_plan import part_of
from gracepoint.checkpoint.saving.operation import state_comparison
from gracepoint.checkpoint.transfer.device_to_host import compile_slices
from gracepoint.checkpoint.transfer.host_snapshot import ask_priorities
from gracepoint.checkpoint.transfer.snapshot_memory import HostSnapshot, Priorities, Specs, snapshot_bytes
from gracepoint.process_group import ProcessGroup, SingleProcess

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


class SavePlanner:
    """Plans saves, and reserves memory for snapshots. A state of the same form as the one before is not planned again.

    Args:
        gang: The processes that save together.
        attempt: Unique for each start of the gang; the same in all its processes.
        options: How arrays are written.
        processes: ``jax.process_index()`` of each process of the gang. None: the index in the gang is the same.
        host_memory_limit_bytes: Largest size of a snapshot in this process. None: the available memory of the host.
        handlers: Handlers of types that are not saved without one. None: there are none.
    """

    def __init__(
        self,
        gang: ProcessGroup,
        attempt: str,
        options: WriteOptions,
        *,
        processes: Sequence[int] | None = None,
        host_memory_limit_bytes: int | None = None,
        handlers: HandlerRegistry | None = None,
    ) -> None:
        self._handlers = handlers
        self._gang = gang
        self._attempt = attempt
        self._options = options
        self._processes = processes
        self._memory_limit_bytes = host_memory_limit_bytes
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
    ) -> int:
        """Plans a save, and compares the plan with those of the other processes. Collective.

        Also compiles the functions that copy slices of shards. With ``in_background``, memory for a snapshot is
        reserved and touched, too.

        Returns:
            Bytes of the state over all processes.

        Raises:
            CheckpointError: The state cannot be saved, or is not the same in all processes; names the leaf. Or there
                is no memory for a snapshot.
            BarrierError: Another process did not come in time, or has failed.
        """
        self._prepares += 1
        key = f"checkpoint/{self._attempt}/prepare/{self._prepares}"
        with host_memory.telling(self._gang, state_comparison.meeting_of(key)):
            leaves, prepared = self.plan(state, save_args)
            compile_slices(leaves, prepared.plan, self._options)
            values = host_state()
            encode(values)  # so that what cannot be saved is not found in an emergency
            several = self._gang.process_count > 1
            mine = state_comparison.describe(leaves, prepared.specs, prepared.plan, values) if several else {}
        state_comparison.check(mine, gang=self._gang, key=key)
        if in_background or self._options.writer not in IN_THREADS:  # a worker needs a snapshot in emergencies, too
            priorities = ask_priorities(leaves, prepared.plan, self._options)
            self._check_fits(self._needed_bytes(prepared, priorities), self._gang, key)
            self._reserve(prepared, priorities)
        return prepared.plan.total_bytes

    def plan(self, state: Any, save_args: Any = None) -> tuple[list[pytree.Leaf], PreparedSave]:
        """Returns the leaves of ``state``, and the plan for all states of its form.

        Raises:
            CheckpointError: A leaf cannot be saved; names it.
        """
        if self._prepared is not None:
            known = self._prepared.form.leaves_of(state) if self._prepared.save_args == save_args else None
            if known is not None:
                return known, self._prepared
            logger.info("the state has another form than before: planning its saves anew")
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

    def _needed_bytes(self, prepared: PreparedSave, priorities: Priorities) -> int:
        return 0 if prepared.snapshot is not None else snapshot_bytes(prepared.plan, priorities)

    def _reserve(self, prepared: PreparedSave, priorities: Priorities) -> HostSnapshot:
        if prepared.snapshot is None:
            prepared.snapshot = HostSnapshot(
                prepared.specs, prepared.plan, priorities, shared=self._options.writer not in IN_THREADS
            )
        return prepared.snapshot

    def _check_fits(self, needed_bytes: int, gang: ProcessGroup, key: str) -> None:
        host_memory.check_fits(needed_bytes, self._memory_limit_bytes, gang=gang, key=key, left=self._left)

    def _prepare(self, leaves: Sequence[pytree.Leaf], form: TreeSignature, save_args: Any) -> PreparedSave:
        index, count = self._gang.process_index, self._gang.process_count
        specs = stored_specs(leaves, count, self._options, save_args, self._processes)
        stored = [dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True)]
        owners = chunk_owners.assign(stored, count, self._processes, max_replicas=self._options.max_replicas)
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
            chunk_writers=chunk_owners.table(owners) if has_many and index == 0 else b"",
        )
