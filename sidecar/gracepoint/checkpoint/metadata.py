"""What a checkpoint holds, leaf by leaf, without reading any values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from gracepoint.checkpoint.format import sharding_file
from gracepoint.checkpoint.loading.restore_tree import in_time
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, open_tree
from gracepoint.checkpoint.storage.storage_path import LocalPath, StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class LeafMetadata:
    """What is known of a saved leaf without reading it.

    Attributes:
        name: Its keys joined by dots.
        value_type: Orbax's word for what was saved: "jax.Array", "np.ndarray", "scalar", "string".
        shape: Of typed PRNG keys, in keys; None for strings.
        dtype: numpy's; of typed PRNG keys, of JAX; None for strings.
        sharding: That it was saved with, of typed PRNG keys that of the keys; None if that is not recorded or its
            devices are not here.
        sharding_text: The same in words; empty if it is not recorded.
        chunk_shape: Of what is read at once.
        write_shape: Of what one process wrote of a shard; None if that is not recorded, as of what is no jax.Array.
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
    """What a checkpoint holds.

    Attributes:
        path: Of the checkpoint's folder.
        tree: Dicts and lists with ``LeafMetadata`` at each leaf; empty containers and None as they are.
        by_orbax: Orbax wrote it: there are no checksums.
    """

    path: LocalPath
    tree: Any
    by_orbax: bool


def metadata_of(folder: StoragePath, deadline: Deadline) -> TreeMetadata:
    """Returns the metadata of the checkpoint in ``folder``.

    Raises:
        CheckpointCorrupt: They are missing or damaged.
        CheckpointError: They cannot be read for another reason, time among them.
    """
    with in_time(folder, deadline):
        stored = open_tree(folder, deadline)
    return TreeMetadata(folder.for_users(), jax.tree.map(metadata_of_leaf, stored.nested()), stored.manifest is None)


def metadata_of_leaf(leaf: StoredLeaf) -> LeafMetadata:
    spec = leaf.spec
    if spec is None:
        return LeafMetadata(leaf.name, leaf.value_type)
    is_key = spec.kind == "key"
    try:
        sharding = None if leaf.sharding is None else sharding_file.to_jax(leaf.sharding, leaf.name)
    except CheckpointError:
        sharding = None
    if is_key and sharding is not None:
        sharding = sharding_file.without_last_axis(sharding, len(spec.shape))
    return LeafMetadata(
        leaf.name,
        leaf.value_type,
        spec.shape[:-1] if is_key else spec.shape,
        jax.eval_shape(lambda: jax.random.key(0, impl=spec.key_impl)).dtype if is_key else spec.numpy_dtype,
        sharding,
        sharding_file.describe(leaf.sharding),
        spec.chunk,
        leaf.write_shape,
    )
