"""What is asked of one leaf: by its ``RestoreArgs`` first, then by the leaf of ``like``, then by what was saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format

from gracepoint.checkpoint.format import pytree, sharding_file
from gracepoint.checkpoint.format.array_spec import zarr_dtype
from gracepoint.checkpoint.options import ArrayRestoreArgs, RestoreArgs
from gracepoint.checkpoint.orbax_objects import sharding_of
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf
from gracepoint.errors import CheckpointRefused

#: In the place of a sharding: the default device.
ANYWHERE = "anywhere"
NUMBERS = (bool, int, float)


@dataclasses.dataclass(frozen=True)
class LeafRequest:
    """What is asked for: ``restore_type`` is a type, or "scalar" for the number that Python has for it."""

    restore_type: Any
    shape: tuple[int, ...] = ()
    dtype: Any = None  # None for typed keys
    key_impl: str | None = None
    sharding: Any = None
    layout: Any = None
    weak: bool = False

    def __str__(self) -> str:
        if self.restore_type is str:
            return "a string"
        where = "" if self.sharding is ANYWHERE else sharding_file.describe(self.sharding)
        return " ".join(filter(None, [describe(self.shape, self.dtype, self.key_impl), where]))


@dataclasses.dataclass(frozen=True)
class Donated:
    """A ``jax.Array`` of ``like`` whose memory goes to the array that is restored in its place.

    Attributes:
        array: It is deleted before that one is made.
        wanted: What it asked for while it was there.
    """

    array: jax.Array
    wanted: LeafRequest


def describe_leaf(leaf: StoredLeaf) -> str:
    """Returns a stored leaf's type, shape and sharding in words."""
    return f"a {leaf.value_type}" if leaf.spec is None else str(as_stored(leaf))


def describe_like(like: Any) -> str:
    """Returns the same of a leaf of ``like``."""
    return str(as_like("", like))


def describe(shape: Sequence[int], dtype: Any, key_impl: str | None) -> str:
    """Returns a shape and a type in words; of typed keys, as the user sees them."""
    return f"{f'key<{key_impl}>' if key_impl else np.dtype(dtype).name}{list(shape)}"


def as_stored(stored: StoredLeaf) -> LeafRequest:
    """Returns what asks for the leaf as it was saved.

    Raises:
        CheckpointError: It is of a kind that only Orbax knows.
    """
    spec = stored.spec
    if stored.value_type == pytree.STRING:
        return LeafRequest(str)
    if spec is None:
        raise CheckpointRefused(f"leaf {stored.name!r} was saved as {stored.value_type!r}, which is not supported")
    if spec.kind == "key":
        return LeafRequest(jax.Array, spec.shape[:-1], None, spec.key_impl, stored.sharding)
    kinds: dict[str, Any] = {"array": jax.Array, "numpy": np.ndarray, "scalar": "scalar"}
    return LeafRequest(kinds[spec.kind], spec.shape, spec.numpy_dtype, None, stored.sharding)


def as_like(name: str, like: Any) -> LeafRequest:
    """Returns what a leaf of ``like`` asks for.

    Raises:
        CheckpointError: Nothing can be restored into a leaf of this type.
    """
    if isinstance(like, Donated):
        return like.wanted
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        is_key = pytree.is_typed_key(like)
        return LeafRequest(
            jax.Array,
            tuple(like.shape),
            None if is_key else np.dtype(like.dtype),
            key_impl_of(like) if is_key else None,
            (like.sharding or ANYWHERE) if isinstance(like, jax.ShapeDtypeStruct) or like.committed else ANYWHERE,
            None if is_key else _layout_of(like),
            bool(getattr(like, "weak_type", False)),
        )
    if isinstance(like, np.ndarray):
        return LeafRequest(np.ndarray, like.shape, like.dtype)
    if isinstance(like, np.generic):
        return LeafRequest(np.generic, (), like.dtype)
    if isinstance(like, NUMBERS):
        return LeafRequest(type(like), (), np.asarray(like).dtype)
    if isinstance(like, str):
        return LeafRequest(str)
    raise CheckpointRefused(f"leaf {name!r}: cannot restore into a {type(like).__qualname__}")


def as_args_say(stored: StoredLeaf, wanted: LeafRequest, args: RestoreArgs, *, as_saved: bool) -> LeafRequest:
    """Returns what is asked for where ``args`` ask before ``wanted``; ``as_saved`` says that there was no ``like``.

    Raises:
        CheckpointError: They contradict themselves.
    """
    restore_type = _kind(args.restore_type)
    if restore_type is None and isinstance(args, ArrayRestoreArgs):
        restore_type = jax.Array
    if restore_type is not None and restore_type is not wanted.restore_type:
        if restore_type not in (jax.Array, np.ndarray, str, *NUMBERS):
            raise CheckpointRefused(f"leaf {stored.name!r}: cannot restore into a {restore_type!r}")
        if wanted.key_impl and as_saved and stored.spec is not None:  # its data
            wanted = dataclasses.replace(
                wanted, shape=stored.spec.shape, dtype=stored.spec.numpy_dtype, key_impl=None, sharding=None
            )
        wanted = dataclasses.replace(wanted, restore_type=restore_type)
    if args.dtype is not None:
        wanted = _of_dtype(stored, wanted, args.dtype)
    if not isinstance(args, ArrayRestoreArgs):
        return wanted
    if args.shape is not None and args.global_shape is not None and tuple(args.shape) != tuple(args.global_shape):
        raise CheckpointRefused(
            f"leaf {stored.name!r}: shape {args.shape} and global_shape {args.global_shape} differ; give one"
        )
    shape = args.global_shape if args.global_shape is not None else args.shape
    if shape is not None:
        wanted = dataclasses.replace(wanted, shape=tuple(shape))
    if (args.mesh is None) != (args.mesh_axes is None):
        given, other = ("mesh", "mesh_axes") if args.mesh_axes is None else ("mesh_axes", "mesh")
        raise CheckpointRefused(
            f"leaf {stored.name!r}: {given} without {other} says no sharding; give both, or sharding"
        )
    if args.mesh is not None and args.mesh_axes is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
        return dataclasses.replace(wanted, sharding=sharding, layout=None)
    if isinstance(args.sharding, Format):
        return dataclasses.replace(wanted, sharding=args.sharding.sharding, layout=args.sharding.layout)
    if args.sharding is not None:
        return dataclasses.replace(wanted, sharding=sharding_of(args.sharding, f"leaf {stored.name!r}"), layout=None)
    return wanted


def _kind(restore_type: Any) -> Any:
    """Returns the kind of array that ``restore_type``, as ``type(array)`` has it, is derived from."""
    if isinstance(restore_type, type):
        return next((kind for kind in (jax.Array, np.ndarray) if issubclass(restore_type, kind)), restore_type)
    return restore_type


def _of_dtype(stored: StoredLeaf, wanted: LeafRequest, dtype: Any) -> LeafRequest:
    """Returns ``wanted`` in another type; typed keys have their own, and that of their data names them, too."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return dataclasses.replace(wanted, dtype=None, key_impl=key_impl_of(jax.ShapeDtypeStruct((), dtype)))
    if wanted.key_impl and stored.spec is not None and np.dtype(dtype) == stored.spec.numpy_dtype:
        return wanted
    return dataclasses.replace(wanted, dtype=np.dtype(dtype), key_impl=None)


def dtype_name(dtype: Any) -> str:
    """Returns the stored type's name, which has no byte order."""
    return zarr_dtype(np.dtype(dtype)) or str(dtype) if dtype is not None else ""


def _layout_of(like: Any) -> Any:
    """Returns the device layout that was asked for, or that an array has and is not the usual one."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.format.layout if like.sharding is not None else None
    if like.is_deleted():
        return None  # it is not told any more
    layout = like.format.layout
    return layout if layout is not None and tuple(layout.major_to_minor) != tuple(range(like.ndim)) else None


def key_impl_of(like: Any) -> str:
    """Returns the implementation's name of typed keys, given or abstract."""
    found: list[str] = []
    # Only a key, or a traced one, tells; nothing is computed here.
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), like)
    return found[0]
