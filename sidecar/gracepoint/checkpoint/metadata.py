"""The metadata of a checkpoint: what it holds, leaf by leaf. No values are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from gracepoint.checkpoint.format import layout, orbax_metadata
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.reading.stored_arrays import json_object
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, StoredTree, open_tree
from gracepoint.checkpoint.restoring.restore_tree import handled_metadata, in_time
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError
from gracepoint.jax_isolation import isolated

if TYPE_CHECKING:
    from gracepoint.machine import LocalPath


@dataclasses.dataclass(frozen=True)
class LeafMetadata:
    """The metadata of one leaf.

    Attributes:
        name: The leaf's keys, joined by dots.
        value_type: Orbax's name for the type that was saved: "jax.Array", "np.ndarray", "scalar" or "string"; or the
            ``typestr`` of the handler that saved it.
        shape: Shape of the array; of typed PRNG keys, in keys. None if the leaf is not an array.
        dtype: numpy's type; for typed PRNG keys, JAX's. None if the leaf is not an array.
        sharding: Sharding that the array was saved with. None if it is not recorded, or its devices do not exist here.
        sharding_text: The sharding as text. Empty if it is not recorded.
        chunk_shape: Shape of a chunk, which is read as a whole. None if the leaf is not an array.
        write_shape: Shape of what one process wrote of a shard. None if it is not recorded, as for all leaves that are
            not a ``jax.Array``.
    """

    name: str
    value_type: str
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    sharding: jax.sharding.Sharding | None = None
    sharding_text: str = ""
    chunk_shape: tuple[int, ...] | None = None
    write_shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class TreeMetadata:
    """The metadata of one checkpoint.

    Attributes:
        path: The checkpoint's folder.
        tree: Dicts and lists with ``LeafMetadata`` at each leaf, or what the leaf's type handler returned. Empty
            containers and None stay as they are.
        by_orbax: Whether Orbax wrote the checkpoint, which then has no checksums.
        custom_metadata: The ``custom_metadata`` that was given to the save. If Orbax wrote the checkpoint, the custom
            metadata of the checkpoint and of its tree together.
    """

    path: LocalPath | str
    tree: Any
    by_orbax: bool
    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def metadata_of(
    folder: StoragePath,
    deadline: Deadline,
    handlers: HandlerRegistry | None = None,
    *,
    item: str = layout.STATE_ITEM,
) -> TreeMetadata:
    """Returns the metadata of the checkpoint in ``folder``.

    Args:
        folder: The folder of the checkpoint.
        deadline: The deadline for reading.
        handlers: Handlers of leaf types of the user's. None: there are none.
        item: The item that holds the train state, if Orbax wrote the step with several trees of arrays.

    Raises:
        CheckpointCorrupt: The metadata is missing or damaged.
        CheckpointError: It cannot be read for another reason, or not in time.
    """
    with in_time(folder, deadline):
        stored = open_tree(folder, deadline, preferred=item)
        custom_metadata = _custom_metadata(stored)
        handled = handled_metadata(stored, handlers, deadline)
    tree = jax.tree.map(
        lambda leaf: handled[leaf.name] if leaf.name in handled else metadata_of_leaf(leaf), stored.nested()
    )
    return TreeMetadata(folder.for_users(), tree, stored.manifest is None, custom_metadata)


def _custom_metadata(stored: StoredTree) -> dict[str, Any]:
    """Returns the custom metadata of the tree. If Orbax wrote the checkpoint, also that of the step or path."""
    merged: dict[str, Any] = {}
    if stored.manifest is None:  # otherwise both are the same
        for folder in (stored.item.parent, stored.item):
            path = folder / layout.STEP_METADATA
            if path.is_value():
                merged |= json_object(path.read_bytes(), path).get("custom_metadata") or {}
    return merged | dict(stored.custom_metadata)


@isolated()
def _key_dtype(impl: str | None) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def metadata_of_leaf(leaf: StoredLeaf) -> LeafMetadata:
    spec = leaf.spec
    if spec is None:
        return LeafMetadata(leaf.name, leaf.value_type)
    is_key = spec.kind == "key"
    try:
        sharding = None if leaf.sharding is None else orbax_metadata.to_jax_sharding(leaf.sharding, leaf.name)
    except CheckpointError:
        sharding = None
    if is_key and sharding is not None:
        sharding = orbax_metadata.without_last_axis(sharding, len(spec.shape))
    return LeafMetadata(
        leaf.name,
        leaf.value_type,
        spec.shape[:-1] if is_key else spec.shape,
        _key_dtype(spec.key_impl) if is_key else spec.numpy_dtype,
        sharding,
        orbax_metadata.describe_sharding(leaf.sharding),
        spec.chunk,
        leaf.write_shape,
    )
