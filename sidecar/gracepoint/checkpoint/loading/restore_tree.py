"""Restores the train state of one checkpoint into this process.

This module does not choose a step. The calling thread decides how each leaf is restored, has all of them read at once
(``parallel_reader``), and builds the leaves. Every process does this for its own devices. The processes meet only for
arrays that one replica reads for all (``replicas``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.loading import reader_choice
from gracepoint.checkpoint.loading.handled_restore import is_handled, restore_handled
from gracepoint.checkpoint.loading.leaves import donation
from gracepoint.checkpoint.loading.leaves.leaf_request import LeafRequest, describe_leaf, describe_like
from gracepoint.checkpoint.loading.leaves.leaf_target import LeafTarget, target_of
from gracepoint.checkpoint.loading.leaves.transforms import computed, origins
from gracepoint.checkpoint.loading.replicas.replica_agreement import ReplicaAgreement, asks_one_replica
from gracepoint.checkpoint.loading.replicas.single_replica import OnOneReplica, hand_to_all
from gracepoint.checkpoint.options import (
    DEFAULT_RESTORE_OPTIONS,
    RestoreArgs,
    RestoreOptions,
)
from gracepoint.checkpoint.orbax_calls import AsSaved
from gracepoint.checkpoint.orbax_objects import restore_args_of
from gracepoint.checkpoint.reading.parallel_reader import read_all
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, StoredTree, open_tree
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, CheckpointError, CheckpointMismatch, CheckpointRefused

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
    with in_time(folder, deadline), telling(together, restore_args, deadline):
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
        like = donation.marked(like)
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
    known: set[str] = set()
    for position, (keys, leaf) in enumerate(keyed):
        origin = origin_of(keys)
        name = pytree.name_of(keys) if origin.name is None else origin.name
        known.add(name)
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
                what = "a leaf" if isinstance(leaf, AsSaved) else describe_like(leaf)
                missing.append(f"leaf {name!r}: expected {what}, found nothing")
            continue
        try:
            if origin.function is not None:
                targets[position] = computed(stored.leaves[name], leaf, args_of(keys), origin.function)
                continue
            wanted = None if like is None or isinstance(leaf, AsSaved) else leaf
            if is_handled(stored.leaves[name], wanted, options.handlers):
                handled[position] = stored.leaves[name], args_of(keys)
                continue
            targets[position] = target_of(stored.leaves[name], wanted, args_of(keys), options.single_replica)
        except CheckpointMismatch as mismatch:
            differ.append(str(mismatch))
    if like is not None and (left := set(map(pytree.name_of, empty_of_like)) & set(stored.leaves)):
        known |= left
        logger.info("%s: not restored, as there is nothing in their place: %s", stored.folder, ", ".join(sorted(left)))
    extra = [
        f"leaf {name!r}: expected nothing, found {describe_leaf(leaf)}"
        for name, leaf in stored.leaves.items()
        if name not in known and not options.partial_restore
    ]
    if problems := differ + missing + extra:
        raise CheckpointMismatch(f"{stored.folder}: {_shown(problems)}")
    asked = list(targets.values())
    if together is not None and together.meets_first:
        asked = reader_choice.taken(asked, together.ready(reader_choice.limit_bytes(), deadline))
        if any(isinstance(target.placement, OnOneReplica) for target in asked):
            together.expects_tell()
    if options.donate and like is not None:
        named = [(pytree.name_of(keys), leaf) for keys, leaf in keyed]
        donation.take(
            (named[position] for position in targets),
            (leaf for position, leaf in enumerate(named) if position not in targets),
        )
    found = read_leaves(stored, asked, options, deadline, together)
    found += restore_handled(stored, list(handled.values()), options.handlers, deadline)
    leaves = [donation.kept(leaf) for leaf in leaves]
    for position, value in zip([*targets, *handled], found, strict=True):
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
            far=not stored.folder.backend.renames,
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
    found = dict(zip(shared, arrays, strict=True))
    return [
        target.finish(found[position]) if position in found else target.build(parts[position])
        for position, target in enumerate(targets)
    ]


def telling(
    together: ReplicaAgreement | None, restore_args: Any, deadline: Deadline
) -> contextlib.AbstractContextManager[None]:
    """Returns a context that reports an error to the other processes, if they will wait for this process's report."""
    if together is None or not (together.meets_first or asks_one_replica(restore_args)):
        return contextlib.nullcontext()
    return together.telling_failure(deadline)


def _args_by_keys(restore_args: Any, known: Sequence[Keys]) -> Callable[[Keys], RestoreArgs]:
    """Returns a function from a leaf's keys to its arguments."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(restore_args, is_leaf=lambda node: isinstance(node, RestoreArgs))
    given = {pytree.path_of(path): args for path, args in nodes if args is not PLACEHOLDER}
    by_name = {tuple(key for key, _ in keys): args for keys, args in given.items()}
    names = {keys: restore_args_of(args, f"restore_args{list(keys)}") for keys, args in by_name.items()}
    prefixes = {tuple(key for key, _ in keys[:count]) for keys in known for count in range(len(keys) + 1)}
    if unknown := [keys for keys in names if keys not in prefixes]:
        raise CheckpointRefused(f"restore_args{list(unknown[0])}: expected a leaf or container of what is restored")

    def find(keys: Keys) -> RestoreArgs:
        path = tuple(key for key, _ in keys)
        found = (names[path[:count]] for count in range(len(path), -1, -1) if path[:count] in names)
        return next(found, RestoreArgs())

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
