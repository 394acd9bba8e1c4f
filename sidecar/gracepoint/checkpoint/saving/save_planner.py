"""What is worked out once for states of one form: how they are stored, who writes what, and memory for a snapshot.

Belongs to the thread that saves. A form is the leaves' names, shapes, types and shardings, and the arguments that
they are saved with.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gracepoint.checkpoint.format import orbax_metadata, pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, tree_digest
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.chunk_grid import stored_specs
from gracepoint.checkpoint.planning.tree_signature import TreeSignature
from gracepoint.checkpoint.planning.write_plan import WritePlan, make_plan
from gracepoint.checkpoint.transfer.host_snapshot import HostSnapshot, Specs, snapshot_bytes

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class PreparedSave:
    """What holds for all states of one form.

    Attributes:
        form: Of the states.
        save_args: That they are saved with.
        specs: Of what is stored of each leaf.
        digest: Of the arrays' specs.
        metadata: Orbax's metadata files, by name below the item's folder.
        plan: This process's part of a save.
        snapshot: Memory for one; None if it was not needed yet.
    """

    form: TreeSignature
    save_args: Any
    specs: Specs
    digest: str
    metadata: Mapping[str, bytes]
    plan: WritePlan
    snapshot: HostSnapshot | None = None

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The specs of the leaves that are arrays."""
        return tuple(spec for spec in self.specs if spec is not None)


class SavePlanner:
    """Plans saves; a state of the form of the one before is not planned again.

    Args:
        process_index: Of this process among those that save.
        process_count: How many they are.
        options: Of all saves.
        processes: As in ``make_plan``.
    """

    def __init__(
        self,
        process_index: int,
        process_count: int,
        options: WriteOptions,
        *,
        processes: Sequence[int] | None = None,
    ) -> None:
        self._process_index = process_index
        self._process_count = process_count
        self._options = options
        self._processes = processes
        self._prepared: PreparedSave | None = None

    def plan(self, state: Any, save_args: Any = None) -> tuple[list[pytree.Leaf], PreparedSave]:
        """Returns the leaves of ``state``, and what holds for its form.

        Raises:
            CheckpointError: A leaf cannot be saved; names it.
        """
        if self._prepared is not None:
            known = self._prepared.form.leaves_of(state) if self._prepared.save_args == save_args else None
            if known is not None:
                return known, self._prepared
            logger.info("the state has another form than before: planning its saves anew")
        leaves = pytree.flatten(state)
        self._prepared = None  # the old snapshot goes before a new one comes
        self._prepared = self._prepare(leaves, TreeSignature(state, leaves), save_args)
        return leaves, self._prepared

    def needed_bytes(self, leaves: Sequence[pytree.Leaf], prepared: PreparedSave) -> int:
        """Returns how much host memory ``snapshot`` would take now."""
        return 0 if prepared.snapshot is not None else snapshot_bytes(leaves, prepared.plan, self._options)

    def snapshot(self, leaves: Sequence[pytree.Leaf], prepared: PreparedSave) -> HostSnapshot:
        """Returns the memory for a snapshot, reserved when it is asked for first."""
        if prepared.snapshot is None:
            prepared.snapshot = HostSnapshot(leaves, prepared.specs, prepared.plan, self._options)
        return prepared.snapshot

    def _prepare(self, leaves: Sequence[pytree.Leaf], form: TreeSignature, save_args: Any) -> PreparedSave:
        specs = stored_specs(leaves, self._process_count, self._options, save_args, self._processes)
        stored = [dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True)]
        plan = make_plan(
            stored,
            self._process_index,
            self._process_count,
            self._processes,
            max_replicas=self._options.max_replicas,
        )
        metadata = orbax_metadata.metadata_files(stored, store_sharding=self._options.store_sharding)
        return PreparedSave(form, save_args, specs, tree_digest(pytree.specs_of(stored)), metadata, plan)
