"""Type handler of arrays that one replica reads for all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gracepoint.checkpoint.checkpointers.group_factory import GroupFactory, JoinedGroup
from gracepoint.checkpoint.handler_registry import ParamInfo
from gracepoint.checkpoint.handlers.array_handler import ArrayHandler
from gracepoint.checkpoint.handlers.call_checks import folder_of, leaf_args
from gracepoint.checkpoint.loading.leaves.leaf_target import target_of
from gracepoint.checkpoint.loading.replicas.replica_agreement import ReplicaAgreement
from gracepoint.checkpoint.loading.restore_tree import in_time, read_leaves
from gracepoint.checkpoint.options import RestoreArgs, RestoreOptions, SingleReplica, SingleReplicaArrayRestoreArgs
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointRefused
from gracepoint.process_group import ProcessGroup


class SingleReplicaArrayHandler(ArrayHandler):
    """Saves and restores ``jax.Array`` leaves that are replicated along an axis of their mesh.

    They are saved as by ``ArrayHandler``. One replica restores them, and sends them to the others.

    ``deserialize`` is collective: every process of the mesh makes the same calls. The first call brings the processes
    together. Every process must create its handlers in the same order.

    Args:
        replica_axis_index: Index of the axis of the mesh along which arrays are replicated.
        primary_replica_id: Index along that axis of the replica that reads.
        broadcast_memory_limit_bytes: Most bytes of each device's part that are sent at once. An array that is larger
            is sent alone. None: computed from the free memory of the devices.
        broadcast_memory_scaling_factor: Fraction of the free memory of the devices that is used if the limit is
            computed. Above 0 and at most 1.
        gang: The processes of the mesh. None: all processes of the JAX cluster.
        options: The arguments of ``ArrayHandler``.
    """

    def __init__(
        self,
        replica_axis_index: int = 0,
        primary_replica_id: int = 0,
        broadcast_memory_limit_bytes: int | None = None,
        broadcast_memory_scaling_factor: float = 0.75,
        *,
        gang: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.replica_axis_index = replica_axis_index
        self.primary_replica_id = primary_replica_id
        self.broadcast_memory_limit_bytes = broadcast_memory_limit_bytes
        self.broadcast_memory_scaling_factor = broadcast_memory_scaling_factor
        self._replica()  # raises if an argument is wrong
        self._joining = GroupFactory(gang=gang)
        self._joined: JoinedGroup | None = None
        self._calls = 0

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> list[Any]:
        """Returns the arrays, which the primary replica has read.

        Args:
            infos: One ``ParamInfo`` for each array.
            args: One ``SingleReplicaArrayRestoreArgs`` with a sharding for each array.

        Raises:
            InvalidSharding: One replica cannot read for the others with the sharding of an array.
            CheckpointCorrupt: An array is missing or damaged; names it.
            CheckpointMismatch: An array does not have the shape or type that is asked for.
            CheckpointError: An array was not read in time, or cannot be restored as asked.
            BarrierTimeout: Another process did not report in time whether it has read its part.
        """
        folder = folder_of(infos, args)
        asked = leaf_args(infos, args)
        for info, arg in zip(infos, asked, strict=True):
            if not isinstance(arg, SingleReplicaArrayRestoreArgs):
                raise CheckpointRefused(
                    f"leaf {info.name!r}: expected SingleReplicaArrayRestoreArgs, found {type(arg).__name__}"
                )
        deadline = Deadline.after(self._timeout_s, self._clock)
        together = self._together(deadline)
        replica = self._replica()
        options = RestoreOptions(limit_bytes=self._read_limit_bytes, single_replica=replica)

        def read(_: Sequence[Any]) -> list[Any]:
            with in_time(folder, deadline), together.telling_failure(deadline):
                stored = self._open(infos, deadline)
                targets = [
                    target_of(stored.leaves[info.name], None, arg, replica)
                    for info, arg in zip(infos, asked, strict=True)
                ]
                return read_leaves(stored, targets, options, deadline, together)

        if self._dispatcher is None:  # in this thread, as JAX's settings may hold for it alone
            return read([])
        return self._dispatcher.dispatch("reading arrays of one replica", read, []).result()

    def _replica(self) -> SingleReplica:
        return SingleReplica(
            self.replica_axis_index,
            self.primary_replica_id,
            self.broadcast_memory_limit_bytes,
            self.broadcast_memory_scaling_factor,
        )

    def _together(self, deadline: Deadline) -> ReplicaAgreement:
        if self._joined is None:
            self._joined = self._joining.join(timeout_s=deadline.remaining_s())
        self._calls += 1
        return ReplicaAgreement(self._joined.gang, f"handler/{self._joined.attempt}/{self._calls}")
