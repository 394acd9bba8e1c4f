"""Type handlers: they save and restore leaves by type, with Orbax's interface, for code with its own tree and commit.

There are handlers of JAX arrays (also for arrays that one replica reads for all replicas), numpy arrays, numbers and
strings; all strings of a folder are in one file, in Orbax's format. They use the same chunk grid, plan, copies, writer
and reader as the checkpointers, without a commit and without a manifest.

In single-controller JAX the devices of an array belong to other processes than the one that calls. Work on arrays must
then run in those processes, and a ``Dispatcher`` for remote arrays sends it there. The dispatcher of this module runs
it in a thread of this process. The thread ends with the work. It is a daemon: storage that hangs keeps no process from
ending.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gracepoint.arguments import shown
from gracepoint.checkpoint import metrics, orbax
from gracepoint.checkpoint.format import layout, ocdbt, orbax_metadata, pytree
from gracepoint.checkpoint.groups import GroupFactory, JoinedGroup
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ParamInfo
from gracepoint.checkpoint.metadata import LeafMetadata, metadata_of_leaf
from gracepoint.checkpoint.options import (
    DEFAULT_OPTIONS,
    READ_LIMIT_BYTES,
    RestoreArgs,
    RestoreOptions,
    SaveArgs,
    SingleReplica,
    SingleReplicaArrayRestoreArgs,
    TransferPriority,
    WriteOptions,
)
from gracepoint.checkpoint.orbax import is_orbax, restore_args_of, save_args_of
from gracepoint.checkpoint.planning.chunks import WritePlan, local_shards, make_plan
from gracepoint.checkpoint.planning.grid import stored_specs
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, StoredTree, open_leaves, text_of
from gracepoint.checkpoint.restoring.leaves import target_of
from gracepoint.checkpoint.restoring.placement import ReplicaAgreement
from gracepoint.checkpoint.restoring.restore_tree import in_time, read_leaves
from gracepoint.checkpoint.saving.host_snapshot import HostSnapshot, Transfer, ask_priorities
from gracepoint.checkpoint.storage.locations import UserPath, storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.pool import WriteJob
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointRefused, SettingsError
from gracepoint.jax_isolation import isolated
from gracepoint.process_group import ProcessGroup

Result = TypeVar("Result")


class Dispatcher(Protocol):
    """Copies arrays to host memory, and runs work where their shards are."""

    def device_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Copies ``arrays`` to the host memory of the processes that have their shards. Returns the copies, in order.

        When this returns, the originals may be donated. The copies have the shapes, types and shardings of the
        originals, except for the memory kind. They are passed to ``dispatch`` later.
        """

    def dispatch(self, name: str, function: Callable[[Sequence[Any]], Result], arrays: Sequence[Any]) -> Future[Result]:
        """Calls ``function`` where the shards of ``arrays`` are addressable. Returns at once.

        Args:
            name: Name of the work, for the name of a thread.
            function: Called with ``arrays`` as that process sees them. It uses no other arrays.
            arrays: JAX arrays. Empty if the work needs none.
        """


class InProcessDispatcher:
    """A dispatcher for arrays whose shards are addressable in this process."""

    def device_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        return [_to_host(array) for array in arrays]

    def dispatch(self, name: str, function: Callable[[Sequence[Any]], Result], arrays: Sequence[Any]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function(arrays))
            except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
                future.set_exception(error)

        threading.Thread(target=run, name=f"gracepoint: {name}", daemon=True).start()
        return future


@isolated()
def _to_host(array: jax.Array) -> jax.Array:
    device: Any = next(iter(array.sharding.device_set))
    if array.sharding.memory_kind == "device" and device.platform != "cpu":
        pinned: jax.Array = jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
        return pinned
    return jnp.copy(array)


def folder_of(infos: Sequence[ParamInfo], *others: Sequence[Any] | None) -> StoragePath:
    """Returns the folder of all ``infos``.

    Raises:
        CheckpointRefused: There are no infos, their folders differ, or one of ``others`` has another length. Or an
            info is Orbax's, which has flags of the format that would be ignored.
    """
    if not infos:
        raise CheckpointRefused("expected at least one leaf, found none")
    if of_orbax := [info for info in infos if is_orbax(info, ParamInfo.__name__)]:
        raise CheckpointRefused(
            f"leaf {of_orbax[0].name!r}: expected a gracepoint.checkpoint.ParamInfo, found Orbax's: make one of its "
            "name, parent_dir and keypath (the format is in WriteOptions, and a reader detects it)"
        )
    if wrong := [len(other) for other in others if other is not None and len(other) != len(infos)]:
        raise CheckpointRefused(f"expected as many values and args as there are infos, {len(infos)}, found {wrong[0]}")
    folders = {info.parent_dir for info in infos}
    if len(folders) > 1:
        raise CheckpointRefused(f"expected leaves of one folder, found {', '.join(map(str, sorted(folders)))}")
    return storage_path(infos[0].parent_dir)


def leaf_args(infos: Sequence[ParamInfo], args: Sequence[Any] | None) -> list[RestoreArgs]:
    """Returns the arguments of each leaf as Gracepoint's. ``args`` may be Orbax's. None: all are the defaults.

    Raises:
        CheckpointRefused: One of ``args`` is no ``RestoreArgs``, or asks for something that is not supported.
    """
    if args is None:
        return [RestoreArgs()] * len(infos)
    return [restore_args_of(arg, f"leaf {info.name!r}") for info, arg in zip(infos, args, strict=True)]


def is_primary(primary_host: int | None) -> bool:
    """Returns whether this process writes. If ``primary_host`` is None, every process writes, to its own storage."""
    return primary_host is None or primary_host == jax.process_index()


def check_primary_host(primary_host: int | None) -> None:
    """Raises SettingsError if there is no such process, as nothing would be written then."""
    if primary_host is not None and not 0 <= primary_host < jax.process_count():
        raise SettingsError(
            f"primary_host is {shown(primary_host)}; expected one of the process indices 0 to "
            f"{jax.process_count() - 1}, or None where every process has separate storage"
        )


logger = logging.getLogger(__name__)

#: Seconds for each call of a handler, and for the part of a save that runs in the background.
TIMEOUT_S = 900.0


class NumpyHandler:
    """Saves and restores ``numpy.ndarray`` leaves. Every process has an equal copy, and the primary process writes it.

    Args:
        options: How leaves are written. None: the defaults.
        primary_host: ``jax.process_index()`` of the process that writes. None: every process writes, to storage of its
            own.
        allow_zero_size: Whether arrays without elements are saved. False: they are refused, as in Orbax.
        timeout_s: Seconds for each call, and for the part of a save that runs in the background.
        dispatcher: Copies arrays to host memory, and runs the work where the copies are. None: this process does both.
        read_limit_bytes: Most bytes of host memory in this process for values that are read and not yet on their
            devices. See ``RestoreOptions.limit_bytes``. None: no limit.
        clock: Returns monotonic seconds.
        metadata_key: Must be None. Arrays are written with their metadata at zarr's own names. Arrays that Orbax wrote
            with a metadata key are read without this argument.
        of_orbax: The other arguments of Orbax's handler of this type, by Orbax's names. They change ``options``, or
            are refused.

    Raises:
        SettingsError: An argument is wrong.
    """

    typestr = "np.ndarray"

    def __init__(
        self,
        options: WriteOptions | None = None,
        *,
        primary_host: int | None = 0,
        allow_zero_size: bool = False,
        timeout_s: float = TIMEOUT_S,
        dispatcher: Dispatcher | None = None,
        read_limit_bytes: int | None = READ_LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        metadata_key: str | None = None,
        **of_orbax: Any,
    ) -> None:
        if metadata_key is not None:
            raise SettingsError(
                f"metadata_key={metadata_key!r}: arrays are written with their metadata at zarr's own names, and read "
                "wherever those are; leave it out"
            )
        self._options = orbax.write_options(options, of_orbax) or DEFAULT_OPTIONS
        self._primary_host = primary_host
        self._allow_zero_size = allow_zero_size
        self._timeout_s = timeout_s
        self._dispatcher = dispatcher
        self._read_limit_bytes = read_limit_bytes
        self._clock = clock
        self._writer = ChunkWriter(self._options)

    def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> list[Future[None]]:
        """Copies values to host memory as the options say, and writes them while the caller continues.

        Args:
            values: The values of the leaves. The caller may donate or change them after this returns.
            infos: One ``ParamInfo`` for each value.
            args: One ``SaveArgs`` for each value. None: the defaults.

        Returns:
            One future, which is done when this process's part is durable. If that takes too long, its error is
            ``SaveFailed``.

        Raises:
            CheckpointError: A value cannot be saved; names the leaf.
        """
        folder_of(infos, values, args)
        check_primary_host(self._primary_host)
        self._check(values, infos)
        name = f"writing {self.typestr} leaves"
        if self._dispatcher is None:
            write = self._write(values, infos, args, in_snapshot=True)  # returns after all necessary copies
            return [InProcessDispatcher().dispatch(name, lambda _: write(), [])]
        positions = [position for position, value in enumerate(values) if isinstance(value, jax.Array)]
        on_host = self._on_host([values[i] for i in positions], [infos[i] for i in positions], self._dispatcher)
        others = [value if isinstance(value, jax.Array) else copy.deepcopy(value) for value in values]

        def write_there(arrays: Sequence[Any]) -> None:
            there = dict(zip(positions, arrays, strict=True))
            values_there = [there.get(position, value) for position, value in enumerate(others)]
            self._write(values_there, infos, args, in_snapshot=False)()

        return [self._dispatcher.dispatch(name, write_there, on_host)]

    def _on_host(self, arrays: Sequence[Any], infos: Sequence[ParamInfo], dispatcher: Dispatcher) -> Sequence[Any]:
        """Returns ``arrays``. Those that must be copied before ``serialize`` returns are replaced by copies on host."""
        options = self._options
        now = [
            position
            for position, info in enumerate(infos)
            if options.device_host_max_bytes is None
            or orbax.priority_of(options.callback.key_priority(info.keypath), info.name) is TransferPriority.SYNCHRONOUS
        ]
        copies = dict(zip(now, dispatcher.device_to_host([arrays[i] for i in now]), strict=True))
        return [copies.get(position, array) for position, array in enumerate(arrays)]

    def _write(
        self,
        values: Sequence[Any],
        infos: Sequence[ParamInfo],
        args: Sequence[SaveArgs] | None,
        *,
        in_snapshot: bool,
    ) -> Callable[[], None]:
        """Plans the write, and returns a function that writes.

        With ``in_snapshot``, values that must be copied before ``serialize`` returns are copied here.
        """
        folder = storage_path(infos[0].parent_dir)
        leaves = self._leaves(values, infos, args)
        plan = self._plan(leaves)
        specs = [leaf.spec for leaf in leaves]
        small_files = self._small_files(leaves)
        snapshot = None
        if in_snapshot:
            snapshot = HostSnapshot(specs, plan, ask_priorities(leaves, plan, self._options))
        transfer = Transfer(leaves, specs, plan, self._options, snapshot)

        def write() -> None:
            folder.make_folder_durably()
            job = WriteJob(
                folder,
                layout.NO_ITEM,
                {index: spec for index, spec in enumerate(specs) if spec is not None},
                plan.arrays,
                transfer,
                small_files,
                # Two calls, for example for two types of leaves, must not share a tree: both would write one manifest.
                tree_numbers=itertools.count(jax.process_index(), jax.process_count()),
            )
            deadline = Deadline.after(self._timeout_s, self._clock)
            written = self._writer.write(job, deadline)
            metrics.tell_written(written.chunk_bytes, deadline.elapsed_s(), job.folder)

        return write

    def finalize(self, directory: UserPath) -> None:
        """Merges the parts of all processes and handlers below ``directory``. May be called again.

        One process calls it, once all parts are durable.
        """
        ocdbt.merge_again(storage_path(directory))

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> list[Any]:
        """Returns the leaves, restored as ``args`` say. If ``args`` is None, they are restored as they were saved.

        Raises:
            CheckpointCorrupt: A leaf is missing or damaged; names it.
            CheckpointMismatch: A leaf does not have the shape or type that is asked for.
            CheckpointError: A leaf was not read in time, or cannot be restored as asked.
        """
        folder = folder_of(infos, args)
        args_of_leaves = leaf_args(infos, args)
        deadline = Deadline.after(self._timeout_s, self._clock)

        def read(_: Sequence[Any]) -> list[Any]:
            with in_time(folder, deadline):
                stored = self._open(infos, deadline)
                targets = [
                    target_of(stored.leaves[info.name], None, arg)
                    for info, arg in zip(infos, args_of_leaves, strict=True)
                ]
                return read_leaves(stored, targets, RestoreOptions(limit_bytes=self._read_limit_bytes), deadline)

        if self._dispatcher is None:  # in this thread, as JAX's settings may hold for it alone
            return read([])
        return self._dispatcher.dispatch(f"reading {self.typestr} leaves", read, []).result()

    def metadata(self, infos: Sequence[ParamInfo]) -> list[LeafMetadata]:
        """Returns shapes, types, shardings and chunks of the leaves, without reading their values.

        Raises:
            CheckpointCorrupt: A leaf is missing; names it.
        """
        folder = folder_of(infos)
        deadline = Deadline.after(self._timeout_s, self._clock)
        with in_time(folder, deadline):
            stored = self._open(infos, deadline)
        return [metadata_of_leaf(stored.leaves[info.name]) for info in infos]

    def memory_size(self, values: Sequence[Any]) -> list[tuple[int, int]]:
        """Returns for each value the bytes that this process writes, and the bytes that it reads."""
        nowhere = storage_path("/").local()
        infos = [ParamInfo(str(index), nowhere) for index in range(len(values))]
        leaves = self._leaves(values, infos, None)
        written = dict.fromkeys(range(len(leaves)), 0)
        for chunk in self._plan(leaves).chunks:
            written[chunk.leaf] += chunk.bytes if chunk.mine else 0
        sizes = {
            leaf.name: (written[index], sum(int(shard.nbytes) for shard in local_shards(leaf.data).values()))
            for index, leaf in enumerate(leaves)
        }
        return [sizes[info.name] for info in infos]

    def has_dispatcher(self) -> bool:
        """Returns whether this handler was given a dispatcher."""
        return self._dispatcher is not None

    def _check(self, values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
        """Raises CheckpointError if a value must not be saved."""
        for value, info in zip(values, infos, strict=True):
            if np.size(value) == 0 and not self._allow_zero_size:
                raise CheckpointRefused(f"leaf {info.name!r} has no elements; pass allow_zero_size=True to save such")
            if np.size(value) == 0:
                logger.warning("leaf %r is saved without elements", info.name)

    def _leaves(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None
    ) -> list[pytree.Leaf]:
        """Returns the values as leaves of a tree, with the spec of each."""
        named = {info.name: value for info, value in zip(infos, values, strict=True)}
        if len(named) < len(values):
            raise CheckpointRefused(f"expected leaves of different names, found {sorted(info.name for info in infos)}")
        keypaths = {info.name: info.keypath for info in infos}
        save_args = None if args is None else {info.name: arg for info, arg in zip(infos, args, strict=True)}
        leaves = pytree.flatten(named)
        specs = stored_specs(leaves, self._process_count, self._options, save_args)
        return [
            dataclasses.replace(leaf, spec=spec, path=keypaths[leaf.name] or leaf.path)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]

    @property
    def _process_count(self) -> int:
        """Number of processes that divide the writing of a leaf among them."""
        return 1

    def _plan(self, leaves: Sequence[pytree.Leaf]) -> WritePlan:
        if not is_primary(self._primary_host):
            return WritePlan((), (), 0)
        return make_plan(leaves, 0, 1)

    def _small_files(self, leaves: Sequence[pytree.Leaf]) -> dict[str, bytes]:
        """Returns the contents of the files that are written next to the arrays, by path."""
        return {}

    def _open(self, infos: Sequence[ParamInfo], deadline: Deadline) -> StoredTree:
        leaves = [StoredLeaf(info.name, ((info.name, pytree.MAPPING),), self.typestr) for info in infos]
        return open_leaves(folder_of(infos), leaves, deadline)


class ScalarHandler(NumpyHandler):
    """Saves and restores numbers of Python and numpy. They are restored as Python's numbers."""

    typestr = "scalar"


class StringHandler:
    """Saves and restores strings. Every process has the same strings, and the primary process writes them to one file.

    Args:
        primary_host: ``jax.process_index()`` of the process that writes. None: every process writes, to storage of its
            own.
        dispatcher: Runs the work. None: it runs in this process.
    """

    typestr = pytree.STRING

    def __init__(self, *, primary_host: int | None = 0, dispatcher: Dispatcher | None = None) -> None:
        self._primary_host = primary_host
        self._dispatcher = dispatcher or InProcessDispatcher()

    def serialize(
        self, values: Sequence[str], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> list[Future[None]]:
        """Writes strings while the caller continues. All strings of a folder must be passed in one call.

        Raises:
            CheckpointRefused: ``args`` ask for a type or for chunks, which strings do not have.
        """
        folder = folder_of(infos, values, args)
        for info, arg in zip(infos, args or (), strict=False):
            if save_args_of(arg, f"leaf {info.name!r}") != SaveArgs():
                raise CheckpointRefused(f"leaf {info.name!r}: strings have neither type nor chunks, found {arg}")
        check_primary_host(self._primary_host)
        leaves = [
            pytree.Leaf(info.name, ((info.name, pytree.MAPPING),), self.typestr, None, value)
            for info, value in zip(infos, values, strict=True)
        ]
        data = orbax_metadata.strings(leaves) if is_primary(self._primary_host) else None

        def write(_: Sequence[Any]) -> None:
            if data is not None:
                folder.make_folder_durably()
                (folder / layout.STRINGS).put(data)

        return [self._dispatcher.dispatch("writing strings", write, [])]

    def finalize(self, directory: UserPath) -> None:
        """Does nothing, as one process writes all strings."""

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> list[str]:
        """Returns the strings.

        Raises:
            CheckpointCorrupt: A string is missing; names the leaf.
            CheckpointRefused: ``args`` ask for another type.
        """
        folder = folder_of(infos, args)
        for info, arg in zip(infos, leaf_args(infos, args), strict=True):
            if arg not in (RestoreArgs(), RestoreArgs(restore_type=str)):
                raise CheckpointRefused(f"leaf {info.name!r}: strings are restored as str, found {arg}")
        try:
            strings = json.loads((folder / layout.STRINGS).read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointCorrupt(f"{folder / layout.STRINGS} cannot be read: {error!r}") from error
        return [text_of(strings, info.name, folder) for info in infos]

    def metadata(self, infos: Sequence[ParamInfo]) -> list[LeafMetadata]:
        """Returns the metadata of the leaves: their names and type."""
        return [LeafMetadata(info.name, self.typestr) for info in infos]

    def memory_size(self, values: Sequence[str]) -> list[tuple[int, int]]:
        """Returns for each string the bytes that this process writes, and the bytes that it reads."""
        writes = is_primary(self._primary_host)
        sizes = [len(value.encode()) for value in values]
        return [(size if writes else 0, size) for size in sizes]


#: Event of ``jax.monitoring``, with Orbax's name: an array handler was created.
INIT_EVENT = "/jax/orbax/array_handler/init"


class ArrayHandler(NumpyHandler):
    """Saves and restores ``jax.Array`` leaves over all processes of the job.

    Each process writes the shards that it holds. If several processes hold a shard, they divide it among them. Each
    process also writes ``array_metadatas/process_<N>``, and the primary process ``_sharding``, if the options say so.
    All arrays of a folder must be passed in one call.
    """

    typestr = "jax.Array"

    def __init__(self, options: WriteOptions | None = None, **others: Any) -> None:
        jax.monitoring.record_event(INIT_EVENT)
        super().__init__(options, **others)

    def _check(self, values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
        for value, info in zip(values, infos, strict=True):
            if not isinstance(value, jax.Array):
                raise CheckpointRefused(f"leaf {info.name!r}: expected a jax.Array, found a {type(value).__qualname__}")
            if jax.process_count() > 1 and value.is_fully_addressable:
                raise CheckpointRefused(
                    f"leaf {info.name!r} is local to this process, one of {jax.process_count()}: make it one array "
                    "over all processes (jax.make_array_from_process_local_data, multihost_utils), or save it as numpy"
                )
        super()._check(values, infos)

    @property
    def _process_count(self) -> int:
        return int(jax.process_count())

    def _plan(self, leaves: Sequence[pytree.Leaf]) -> WritePlan:
        return make_plan(leaves, jax.process_index(), jax.process_count(), max_replicas=self._options.max_replicas)

    def _small_files(self, leaves: Sequence[pytree.Leaf]) -> dict[str, bytes]:
        files = {}
        if self._options.store_array_metadata:
            files[layout.array_metadata(jax.process_index())] = orbax_metadata.array_metadata(leaves)
        if self._options.store_sharding and is_primary(self._primary_host):
            files[layout.SHARDING] = orbax_metadata.sharding(leaves)
        return files


def default_handlers(options: WriteOptions | None = None) -> HandlerRegistry:
    """Returns the handlers of all types of leaves that Gracepoint has a handler for, with the same options."""
    registry = HandlerRegistry()
    registry.add(jax.Array, ArrayHandler(options))
    registry.add(np.ndarray, NumpyHandler(options))
    scalar = ScalarHandler(options)
    for number in (int, float, np.number, np.bool_):
        registry.add(number, scalar)
    registry.add(str, StringHandler())
    return registry


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
        args_of_leaves = leaf_args(infos, args)
        for info, arg in zip(infos, args_of_leaves, strict=True):
            if not isinstance(arg, SingleReplicaArrayRestoreArgs):
                raise CheckpointRefused(
                    f"leaf {info.name!r}: expected SingleReplicaArrayRestoreArgs, found {type(arg).__name__}"
                )
        deadline = Deadline.after(self._timeout_s, self._clock)
        together = self._together(deadline)
        replica = self._replica()
        options = RestoreOptions(limit_bytes=self._read_limit_bytes, single_replica=replica)

        def read(_: Sequence[Any]) -> list[Any]:
            with in_time(folder, deadline), together.reporting_errors(deadline):
                stored = self._open(infos, deadline)
                targets = [
                    target_of(stored.leaves[info.name], None, arg, replica)
                    for info, arg in zip(infos, args_of_leaves, strict=True)
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
