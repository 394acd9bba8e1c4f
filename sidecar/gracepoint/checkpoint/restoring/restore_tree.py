"""Restores the train state of one checkpoint into this process.

This module does not choose a step. The calling thread decides how each leaf is restored, has all of them read at once
(``parallel_reader``), and builds the leaves. Every process does this for its own devices. The processes meet only for
arrays that one replica reads for all (``placement``).

Leaves that type handlers saved are restored by these handlers, in a thread that ends with their work. It is a daemon:
storage that hangs keeps no process from ending.

``Form`` compares what a job was saved on, or was given, with what it runs on: processes, devices, mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format import layout, orbax_metadata, pytree
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ParamInfo, TypeHandler
from gracepoint.checkpoint.options import (
    DEFAULT_RESTORE_OPTIONS,
    RestoreArgs,
    RestoreOptions,
)
from gracepoint.checkpoint.orbax import AsSaved, restore_args_of
from gracepoint.checkpoint.reading.parallel_reader import read_all
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, StoredTree, open_tree
from gracepoint.checkpoint.restoring import readers, transforms
from gracepoint.checkpoint.restoring.leaves import LeafRequest, LeafTarget, describe_leaf, describe_like, target_of
from gracepoint.checkpoint.restoring.placement import OnOneReplica, ReplicaAgreement, asks_one_replica, hand_to_all
from gracepoint.checkpoint.restoring.transforms import computed, origins
from gracepoint.checkpoint.storage.checks import check_contents
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import (
    BarrierError,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointRefused,
)
from gracepoint.jax_isolation import FALLBACK, cpu_by_fallback
from gracepoint.threads import DaemonThread


def is_handled(stored: StoredLeaf, like: Any, handlers: HandlerRegistry | None) -> bool:
    """Returns whether a handler restores the leaf.

    Raises:
        CheckpointMismatch: ``like`` is of a type with a handler, and the leaf was saved as another type.
    """
    if handlers is None:
        return False
    expected = handlers.get(type(like)).typestr if like is not None and handlers.has(type(like)) else None
    if expected not in (None, stored.value_type):
        raise CheckpointMismatch(f"leaf {stored.name!r}: expected a {expected}, found a {stored.value_type}")
    return handlers.has(stored.value_type)


def restore_handled(
    stored: StoredTree,
    requests: Sequence[tuple[StoredLeaf, RestoreArgs]],
    handlers: HandlerRegistry | None,
    deadline: Deadline,
) -> list[Any]:
    """Returns the leaves, restored by their handlers.

    Raises:
        CheckpointCorrupt: A file is missing or damaged; names it.
        TimeoutError: The deadline passed; names a leaf.
    """
    if not requests or handlers is None:
        return []
    by_handler: dict[int, tuple[TypeHandler, list[int]]] = {}
    for position, (leaf, _) in enumerate(requests):
        handler = handlers.get(leaf.value_type)
        by_handler.setdefault(id(handler), (handler, []))[1].append(position)
    by_position: dict[int, Any] = {}

    def read() -> None:
        for leaf, _ in requests:
            _check_files(stored, leaf)
        for handler, positions in by_handler.values():
            infos = [ParamInfo(requests[position][0].name, stored.item.local()) for position in positions]
            values = handler.deserialize(infos, [requests[position][1] for position in positions])
            by_position.update(zip(positions, values, strict=True))

    run_in_time(read, f"leaf {requests[0][0].name!r}", deadline)
    return [by_position[position] for position in range(len(requests))]


def handled_metadata(stored: StoredTree, handlers: HandlerRegistry | None, deadline: Deadline) -> Mapping[str, Any]:
    """Returns the metadata of handled leaves as their handlers return it, by the leaf's name. Values are not read.

    Raises:
        TimeoutError: The deadline passed; names a leaf.
    """
    leaves = [leaf for leaf in stored.leaves.values() if handlers is not None and handlers.has(leaf.value_type)]
    metadata: dict[str, Any] = {}

    def look() -> None:
        assert handlers is not None
        for leaf in leaves:
            info = ParamInfo(leaf.name, stored.item.local())
            metadata[leaf.name] = handlers.get(leaf.value_type).metadata([info])[0]

    if leaves:
        run_in_time(look, f"leaf {leaves[0].name!r}", deadline)
    return metadata


def run_in_time(function: Any, subject: str, deadline: Deadline) -> None:
    """Calls ``function`` in a thread. Raises its error, or TimeoutError if it does not end by the deadline."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised by the calling thread
            failed.append(error)

    thread = DaemonThread(run, f"gracepoint: handlers of {subject}")
    thread.start()
    if not thread.wait(deadline.remaining_s()):
        raise TimeoutError(subject)
    if failed:
        raise failed[0]


def _check_files(stored: StoredTree, leaf: StoredLeaf) -> None:
    if stored.manifest is None:
        return  # Orbax records no checksums
    path = layout.in_item(stored.manifest.item, leaf.name)
    files = {name: file for name, file in stored.manifest.files.items() if name == path or name.startswith(f"{path}/")}
    if not files:
        raise CheckpointCorrupt(f"{stored.folder / layout.MANIFEST} has no files of leaf {leaf.name!r}")
    for name, file in files.items():
        check_contents(stored.folder / name, file.bytes, file.crc32)


logger = logging.getLogger(__name__)

#: Marks a leaf of ``like`` that is not restored. The marker stays in the result.
PLACEHOLDER = ...

_SHOWN = 5

Keys = tuple[tuple[str, int], ...]


def read_tree(
    folder: StoragePath,
    like: Any = None,
    restore_args: Any = None,
    *,
    options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
    deadline: Deadline,
    together: ReplicaAgreement | None = None,
) -> Any:
    """Restores the train state of the checkpoint in ``folder``, written by Gracepoint or Orbax.

    Args:
        folder: Folder of a step, or of a checkpoint that has a path to itself.
        like: A state. Its arrays may be ``jax.ShapeDtypeStruct`` with a sharding. A leaf that is ``...`` is not
            restored and stays. None: the tree is restored as it was saved, as dicts and lists, with the saved
            shardings, which are wrong on another topology.
        restore_args: ``RestoreArgs`` for each leaf, in a tree with the same keys. ``RestoreArgs`` in place of a
            subtree, or of the whole tree, apply to each leaf below. None: no arguments.
        options: What may be missing, and how much memory reading may take.
        deadline: When the whole call must have ended.
        together: The processes that restore together and make the same call. Only used for leaves that one replica
            reads for all. None: this process restores alone.

    Raises:
        CheckpointCorrupt: A file that is read is missing or damaged.
        CheckpointMismatch: The checkpoint does not fit ``like``; names each leaf with what was expected and found.
        CheckpointError: It cannot be restored for another reason, or not in time.
    """
    with in_time(folder, deadline), reporting_errors(together, restore_args, deadline):
        return read_into(
            open_tree(folder, deadline), like, restore_args, options=options, deadline=deadline, together=together
        )


def read_into(
    stored: StoredTree,
    like: Any,
    restore_args: Any,
    *,
    options: RestoreOptions,
    deadline: Deadline,
    together: ReplicaAgreement | None = None,
) -> Any:
    """Does the same as ``read_tree`` with an opened checkpoint. Its TimeoutError names the leaf that was late."""
    if options.donate:
        like = transforms.marked(like)
    nodes, structure = jax.tree_util.tree_flatten_with_path(
        stored.nested() if like is None else like, is_leaf=pytree.leaf_test(options.handlers)
    )
    keyed = [(pytree.path_of(path), leaf) for path, leaf in nodes]
    empty_of_like = _empty_keys(like)
    more = [leaf.keys for leaf in stored.leaves.values()] if options.partial_restore else []
    args_of = _args_by_keys(restore_args, [keys for keys, _ in keyed] + empty_of_like + list(stored.empty) + more)
    leaves = [leaf for _, leaf in keyed]
    empty = {pytree.name_of(keys): value for keys, value in stored.empty.items()}
    targets: dict[int, LeafTarget] = {}
    handled: dict[int, tuple[StoredLeaf, RestoreArgs]] = {}
    differ, missing = [], []
    origin_of = origins(options, like, [leaf.keys for leaf in stored.leaves.values()] + list(stored.empty))
    names: set[str] = set()
    for position, (keys, leaf) in enumerate(keyed):
        origin = origin_of(keys)
        name = pytree.name_of(keys) if origin.name is None else origin.name
        names.add(name)
        if leaf is PLACEHOLDER or (name not in stored.leaves and pytree.is_code(leaf)):
            continue
        if origin.is_asked_for and name not in stored.leaves and name not in empty:
            missing.append(f"leaf {pytree.name_of(keys)!r}: expected {name!r} by its transformation, found nothing")
            continue
        if origin.name is None or name not in stored.leaves:
            if origin.name is not None and name in empty and not options.keep_missing:
                leaves[position] = empty[name]
                logger.warning("%s: leaf %r is restored as %r, as which it was saved", stored.folder, name, empty[name])
            elif not (options.keep_missing or origin.name is None) or isinstance(
                leaf, jax.ShapeDtypeStruct | LeafRequest
            ):
                description = "a leaf" if isinstance(leaf, AsSaved) else describe_like(leaf)
                missing.append(f"leaf {name!r}: expected {description}, found nothing")
            continue
        try:
            if origin.function is not None:
                targets[position] = computed(stored.leaves[name], leaf, args_of(keys), origin.function)
                continue
            form = None if like is None or isinstance(leaf, AsSaved) else leaf
            if is_handled(stored.leaves[name], form, options.handlers):
                handled[position] = stored.leaves[name], args_of(keys)
                continue
            targets[position] = target_of(stored.leaves[name], form, args_of(keys), options.single_replica)
        except CheckpointMismatch as mismatch:
            differ.append(str(mismatch))
    if like is not None and (emptied := set(map(pytree.name_of, empty_of_like)) & set(stored.leaves)):
        names |= emptied
        logger.info(
            "%s: not restored, as there is nothing in their place: %s", stored.folder, ", ".join(sorted(emptied))
        )
    extra = [
        f"leaf {name!r}: expected nothing, found {describe_leaf(leaf)}"
        for name, leaf in stored.leaves.items()
        if name not in names and not options.partial_restore
    ]
    if problems := differ + missing + extra:
        raise CheckpointMismatch(f"{stored.folder}: {_shown(problems)}")
    requests = list(targets.values())
    if together is not None and together.meets_first:
        requests = readers.taken(requests, together.ready(readers.limit_bytes(), deadline))
        if any(isinstance(target.placement, OnOneReplica) for target in requests):
            together.expects_report()
    if options.donate and like is not None:
        named = [(pytree.name_of(keys), leaf) for keys, leaf in keyed]
        transforms.take(
            (named[position] for position in targets),
            (leaf for position, leaf in enumerate(named) if position not in targets),
        )
    values = read_leaves(stored, requests, options, deadline, together)
    values += restore_handled(stored, list(handled.values()), options.handlers, deadline)
    leaves = [transforms.kept(leaf) for leaf in leaves]
    for position, value in zip([*targets, *handled], values, strict=True):
        leaves[position] = value
    return jax.tree_util.tree_unflatten(structure, leaves)


def read_leaves(
    stored: StoredTree,
    targets: Sequence[LeafTarget],
    options: RestoreOptions,
    deadline: Deadline,
    together: ReplicaAgreement | None = None,
) -> list[Any]:
    """Reads the values of all ``targets`` at once, and builds their leaves.

    Raises:
        CheckpointCorrupt: A file that is read is missing or damaged.
        TimeoutError: The deadline passed; names the leaf that was late.
    """
    if unsafe := [target.stored.name for target in targets if target.from_file]:
        logger.warning(
            "%s: %d arrays, as %r, are restored with the shardings that they were saved with, as none were given: that "
            "is wrong on devices that are arranged in another way",
            stored.folder,
            len(unsafe),
            unsafe[0],
        )
    parts: list[list[Any]] = [[] for _ in targets]
    by_target = [target.placement for target in targets]
    shared = [position for position, placement in enumerate(by_target) if isinstance(placement, OnOneReplica)]
    others = [position for position, placement in enumerate(by_target) if not isinstance(placement, OnOneReplica)]

    def read(then: Callable[[], None]) -> None:
        started_s, handing_s = time.monotonic(), 0.0

        def hand() -> None:
            nonlocal handing_s
            began_s = time.monotonic()
            then()
            handing_s = time.monotonic() - began_s

        requests = (targets[position].request(parts[position]) for position in (*shared, *others))
        total_bytes = read_all(
            (request for request in requests if request is not None),
            stored.source,
            limit_bytes=options.limit_bytes,
            deadline=deadline,
            far=stored.folder.is_far,
            first=len(shared),
            then=hand,
        )
        metrics.tell_read(total_bytes, time.monotonic() - started_s - handing_s, stored.folder)

    if not shared:
        read(lambda: None)
        return [target.build(into) for target, into in zip(targets, parts, strict=True)]
    placements = [placement for placement in by_target if isinstance(placement, OnOneReplica)]
    shared_parts = [parts[position] for position in shared]
    arrays = hand_to_all(placements, shared_parts, read, options.single_replica, together, deadline)
    arrays_by_position = dict(zip(shared, arrays, strict=True))
    return [
        target.finish(arrays_by_position[position]) if position in arrays_by_position else target.build(parts[position])
        for position, target in enumerate(targets)
    ]


def reporting_errors(
    together: ReplicaAgreement | None, restore_args: Any, deadline: Deadline
) -> contextlib.AbstractContextManager[None]:
    """Returns a context that reports an error to the other processes, if they will wait for this process's report."""
    if together is None or not (together.meets_first or asks_one_replica(restore_args)):
        return contextlib.nullcontext()
    return together.reporting_errors(deadline)


def _args_by_keys(restore_args: Any, paths: Sequence[Keys]) -> Callable[[Keys], RestoreArgs]:
    """Returns a function from a leaf's keys to its arguments."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(restore_args, is_leaf=lambda node: isinstance(node, RestoreArgs))
    args_by_path = {pytree.path_of(path): args for path, args in nodes if args is not PLACEHOLDER}
    by_name = {tuple(key for key, _ in keys): args for keys, args in args_by_path.items()}
    names = {keys: restore_args_of(args, f"restore_args{list(keys)}") for keys, args in by_name.items()}
    prefixes = {tuple(key for key, _ in keys[:count]) for keys in paths for count in range(len(keys) + 1)}
    if unknown := [keys for keys in names if keys not in prefixes]:
        raise CheckpointRefused(f"restore_args{list(unknown[0])}: expected a leaf or container of what is restored")

    def find(keys: Keys) -> RestoreArgs:
        path = tuple(key for key, _ in keys)
        matches = (names[path[:count]] for count in range(len(path), -1, -1) if path[:count] in names)
        return next(matches, RestoreArgs())

    return find


def _empty_keys(like: Any) -> list[Keys]:
    """Returns the keys of None nodes and of nodes without leaves, for example optax's ``MaskedNode``."""
    nodes = jax.tree_util.tree_flatten_with_path(like, is_leaf=pytree.is_empty_or_leaf)[0]
    return [pytree.path_of(path) for path, node in nodes if not jax.tree_util.tree_leaves(node)]


def _shown(problems: Sequence[str]) -> str:
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


@contextlib.contextmanager
def in_time(folder: StoragePath, deadline: Deadline) -> Iterator[None]:
    """Turns a TimeoutError that names a leaf into a CheckpointError that also names the folder and the timeout."""
    try:
        yield
    except BarrierError:
        raise
    except TimeoutError as error:
        raise CheckpointError(f"{folder}: {error} was not read within {deadline.timeout_s:.1f} s") from error


@dataclasses.dataclass(frozen=True)
class Form:
    """What a gang trains on. None for each part that is not known.

    Attributes:
        processes: Number of processes.
        mesh: Names and sizes of the axes of the largest mesh.
        platform: JAX's name of the kind of devices: ``cpu``, ``gpu``, ``tpu``. If there are several, not the CPU.
    """

    processes: int | None
    mesh: tuple[tuple[str, int], ...] | None
    platform: str | None = None

    @property
    def devices(self) -> int:
        """Number of devices. If there is no mesh, each process has used one."""
        return _devices(self.mesh) if self.mesh is not None else self.processes or 1

    def changes(self, now: Form) -> tuple[str, ...]:
        """Returns what is different now, as text. Parts that are not known are left out."""
        changes = []
        if self.processes is not None and now.processes is not None and self.processes != now.processes:
            changes.append(f"processes: {self.processes} -> {now.processes}")
        if None not in (self.platform, now.platform) and self.platform != now.platform:
            changes.append(f"devices: {self.devices} {self.platform} -> {now.devices} {now.platform}")
        elif self.mesh is not None and now.mesh is not None and self.devices != now.devices:
            changes.append(f"devices: {self.devices} -> {now.devices}")
        if self.mesh is not None and now.mesh is not None and self.mesh != now.mesh:
            changes.append(f"mesh: {_in_words(self.mesh)} -> {_in_words(now.mesh)}")
        return tuple(changes)


def form_of_stored(stored: StoredTree) -> Form:
    """Returns what a checkpoint was saved on, as far as it is recorded."""
    shardings = [leaf.sharding for leaf in stored.leaves.values() if leaf.sharding is not None]
    meshes = [
        tuple((str(name), int(size)) for name, size in zip(recorded["axis_names"], recorded["shape"], strict=True))
        for recorded in shardings
        if recorded.get("sharding_type") == "NamedSharding"
    ]
    processes = None if stored.manifest is None else stored.manifest.process_count
    return Form(processes, _largest(meshes), _platform(map(orbax_metadata.platform_of, shardings)))


def form_of_state(state: Any, processes: int) -> Form:
    """Returns what a state, or its form, is placed on."""
    shardings = [sharding for leaf in jax.tree.leaves(state) if (sharding := getattr(leaf, "sharding", None))]
    meshes = [tuple(each.mesh.shape.items()) for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    devices = (device for each in shardings for device in list(getattr(each, "device_set", ()))[:1])
    return Form(processes, _largest(meshes), _platform(device.platform for device in devices))


def check_devices(stored: StoredTree) -> None:
    """To be called before a job continues from its own checkpoint.

    Raises:
        CheckpointRefused: It was saved on accelerators, and JAX has taken the CPU here though nothing asks for that.
    """
    before = form_of_stored(stored)
    if before.platform in (None, "cpu") or not cpu_by_fallback():
        return
    raise CheckpointRefused(
        f"{stored.folder} was saved on {before.devices} {before.platform}, and JAX finds {jax.device_count()} cpu: "
        f"{before.devices} {before.platform} -> {jax.device_count()} cpu. {FALLBACK}"
    )


def _largest(meshes: Iterable[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...] | None:
    return max(meshes, key=_devices, default=None)


def _platform(platforms: Iterable[str | None]) -> str | None:
    known_platforms = {platform for platform in platforms if platform is not None}
    return min(known_platforms - {"cpu"}, default="cpu" if known_platforms else None)


def _devices(mesh: tuple[tuple[str, int], ...]) -> int:
    return math.prod(size for _, size in mesh)


def _in_words(mesh: tuple[tuple[str, int], ...]) -> str:
    return "x".join(f"{name}={size}" for name, size in mesh) or "no axes"
