"""Type handlers of numpy arrays and numbers: they save and restore leaves by type, without a tree or a commit.

They are for code that has its own tree and its own commit. They use the same chunk grid, plan, transfer, writer and
reader as the checkpointers.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint import metrics, orbax_objects
from gracepoint.checkpoint.format import layout, ocdbt, pytree
from gracepoint.checkpoint.handler_registry import ParamInfo
from gracepoint.checkpoint.handlers.call_checks import check_primary_host, folder_of, is_primary, leaf_args
from gracepoint.checkpoint.handlers.dispatcher import Dispatcher, InProcessDispatcher
from gracepoint.checkpoint.loading.leaves.leaf_target import target_of
from gracepoint.checkpoint.loading.restore_tree import in_time, read_leaves
from gracepoint.checkpoint.metadata import LeafMetadata, metadata_of_leaf
from gracepoint.checkpoint.options import (
    DEFAULT_OPTIONS,
    READ_LIMIT_BYTES,
    RestoreArgs,
    RestoreOptions,
    SaveArgs,
    TransferPriority,
    WriteOptions,
)
from gracepoint.checkpoint.planning.chunk_grid import stored_specs
from gracepoint.checkpoint.planning.chunks import WritePlan
from gracepoint.checkpoint.planning.local_shards import local_shards
from gracepoint.checkpoint.planning.write_plan import make_plan
from gracepoint.checkpoint.reading.stored_leaves import open_leaves
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, StoredTree
from gracepoint.checkpoint.storage.storage_path import UserPath, storage_path
from gracepoint.checkpoint.transfer.host_snapshot import Transfer, ask_priorities
from gracepoint.checkpoint.transfer.snapshot_memory import HostSnapshot
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.write_job import WriteJob
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointRefused, SettingsError

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
        self._options = orbax_objects.write_options(options, of_orbax) or DEFAULT_OPTIONS
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
        """Copies values to host memory as the options say, and writes them while the caller goes on.

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
        given = self._on_host([values[i] for i in positions], [infos[i] for i in positions], self._dispatcher)
        others = [value if isinstance(value, jax.Array) else copy.deepcopy(value) for value in values]

        def write_there(arrays: Sequence[Any]) -> None:
            there = dict(zip(positions, arrays, strict=True))
            found = [there.get(position, value) for position, value in enumerate(others)]
            self._write(found, infos, args, in_snapshot=False)()

        return [self._dispatcher.dispatch(name, write_there, given)]

    def _on_host(self, arrays: Sequence[Any], infos: Sequence[ParamInfo], dispatcher: Dispatcher) -> Sequence[Any]:
        """Returns ``arrays``. Those that must be copied before ``serialize`` returns are replaced by copies on host."""
        options = self._options
        now = [
            position
            for position, info in enumerate(infos)
            if options.device_host_max_bytes is None
            or orbax_objects.priority_of(options.callback.key_priority(info.keypath), info.name)
            is TransferPriority.SYNCHRONOUS
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
        asked = leaf_args(infos, args)
        deadline = Deadline.after(self._timeout_s, self._clock)

        def read(_: Sequence[Any]) -> list[Any]:
            with in_time(folder, deadline):
                stored = self._open(infos, deadline)
                targets = [
                    target_of(stored.leaves[info.name], None, arg) for info, arg in zip(infos, asked, strict=True)
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
        """Returns the contents of the files that are written beside the arrays, by path."""
        return {}

    def _open(self, infos: Sequence[ParamInfo], deadline: Deadline) -> StoredTree:
        leaves = [StoredLeaf(info.name, ((info.name, pytree.MAPPING),), self.typestr) for info in infos]
        return open_leaves(folder_of(infos), leaves, deadline)


class ScalarHandler(NumpyHandler):
    """Saves and restores numbers of Python and numpy. They are restored as Python's numbers."""

    typestr = "scalar"
