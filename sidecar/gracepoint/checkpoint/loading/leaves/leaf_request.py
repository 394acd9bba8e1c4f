"""How one leaf must be restored: as its ``RestoreArgs`` say, else as the leaf of ``like``, else as it was saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format

from gracepoint.arguments import shown
from gracepoint.checkpoint.format import pytree, sharding_file
from gracepoint.checkpoint.format.array_spec import zarr_dtype
from gracepoint.checkpoint.options import ArrayRestoreArgs, RestoreArgs
from gracepoint.checkpoint.orbax_objects import sharding_of
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf
from gracepoint.errors import CheckpointRefused
from gracepoint.jax_isolation import isolated

#: Value of ``LeafRequest.sharding`` that means the default device.
ANYWHERE = "anywhere"
NUMBERS = (bool, int, float, complex)


def is_number(restore_type: Any) -> bool:
    """Returns whether ``restore_type`` is a type of numbers of Python or, with a size, of numpy."""
    if restore_type in NUMBERS:
        return True
    if not isinstance(restore_type, type) or not issubclass(restore_type, np.generic):
        return False
    try:
        return zarr_dtype(np.dtype(restore_type)) is not None
    except TypeError:  # an abstract type, as numpy.number
        return False


@dataclasses.dataclass(frozen=True)
class LeafRequest:
    """How one leaf must be restored.

    Attributes:
        restore_type: The type of the leaf: ``jax.Array``, ``numpy.ndarray``, ``numpy.generic``, ``str`` or a number
            type of Python; or "scalar" for the number type of Python that matches ``dtype``.
        shape: Shape of the array; of typed PRNG keys, in keys.
        dtype: Type of the values. None for typed PRNG keys and strings.
        key_impl: Implementation of typed PRNG keys. None for all other leaves.
        sharding: A JAX sharding, a recorded one (a mapping), or ``ANYWHERE``. None: none is known or needed.
        layout: Layout on the devices. None: the default one.
        weak: Whether the array of ``like`` has a weak type.
    """

    restore_type: Any
    shape: tuple[int, ...] = ()
    dtype: Any = None
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
    """A ``jax.Array`` of ``like`` whose memory is freed for the array that is restored in its place.

    Attributes:
        array: The array. It is deleted before the restored array is created.
        wanted: The request that the array stood for, recorded before it was deleted.
    """

    array: jax.Array
    wanted: LeafRequest


def describe_leaf(leaf: StoredLeaf) -> str:
    """Returns the type, shape and sharding of a stored leaf as text."""
    return f"a {leaf.value_type}" if leaf.spec is None else str(as_stored(leaf))


def describe_like(like: Any) -> str:
    """Returns the type, shape and sharding of a leaf of ``like`` as text."""
    return str(as_like("", like))


def describe(shape: Sequence[int], dtype: Any, key_impl: str | None) -> str:
    """Returns a shape and a type as text. For typed PRNG keys, the key type as users see it."""
    return f"{f'key<{key_impl}>' if key_impl else np.dtype(dtype).name}{list(shape)}"


def as_stored(stored: StoredLeaf) -> LeafRequest:
    """Returns the request that restores the leaf as it was saved.

    Raises:
        CheckpointError: The leaf is of a type that only Orbax supports.
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
    """Returns the request that a leaf of ``like`` describes.

    Raises:
        CheckpointError: A leaf of this type cannot be restored into.
    """
    if isinstance(like, Donated):
        return like.wanted
    if isinstance(like, LeafRequest):
        return like
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        is_key = pytree.is_typed_key(like)
        return LeafRequest(
            jax.Array,
            tuple(like.shape),
            None if is_key else np.dtype(like.dtype),
            key_impl_of(like) if is_key else None,
            _sharding_of(name, like),
            None if is_key else _layout_of(like),
            bool(getattr(like, "weak_type", False)),
        )
    if isinstance(like, np.ndarray):
        pytree.check_plain(f"leaf {name!r}", like)
        return LeafRequest(np.ndarray, like.shape, like.dtype)
    if isinstance(like, str):
        return LeafRequest(str)
    if isinstance(like, np.generic):
        return LeafRequest(np.generic, (), like.dtype)
    if isinstance(like, NUMBERS):
        return LeafRequest(next(kind for kind in NUMBERS if isinstance(like, kind)), (), np.asarray(like).dtype)
    raise CheckpointRefused(f"leaf {name!r}: cannot restore into a {type(like).__qualname__}")


def _sharding_of(name: str, like: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Returns the sharding of ``like``.

    Under ``jax.set_mesh``, ``jax.eval_shape`` gives shardings of a mesh without devices: the devices are that mesh's.
    """
    sharding = like.sharding if isinstance(like, jax.ShapeDtypeStruct) or like.committed else None
    if not isinstance(sharding, jax.sharding.NamedSharding) or isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding or ANYWHERE
    mesh = jax.sharding.get_mesh()
    if mesh.abstract_mesh != sharding.mesh:
        found = "none is set" if mesh.empty else f"{dict(mesh.shape)} is set"
        raise CheckpointRefused(
            f"leaf {name!r}: its sharding is on an abstract mesh {dict(sharding.mesh.shape)}, which has no devices: "
            f"expected the same mesh to be set by jax.set_mesh, and {found}. Set it around the restore, or give "
            f"jax.sharding.NamedSharding with a mesh of devices"
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def as_args_say(stored: StoredLeaf, wanted: LeafRequest, args: RestoreArgs, *, as_saved: bool) -> LeafRequest:
    """Returns ``wanted``, changed where ``args`` ask for something else. ``as_saved``: whether ``like`` was None.

    Raises:
        CheckpointError: The arguments contradict each other.
    """
    restore_type = _kind(args.restore_type)
    if restore_type is None and isinstance(args, ArrayRestoreArgs):
        restore_type = jax.Array
    if restore_type is not None and restore_type is not wanted.restore_type:
        if restore_type not in (jax.Array, np.ndarray, str) and not is_number(restore_type):
            kind = f"a {restore_type}" if isinstance(restore_type, type) else shown(restore_type)
            raise CheckpointRefused(f"leaf {stored.name!r}: cannot restore into {kind}")
        if wanted.key_impl and as_saved and stored.spec is not None:  # the keys' data is restored
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
    given, layout = sharding_of(args.sharding, f"leaf {stored.name!r}"), None
    if isinstance(given, Format):
        given, layout = given.sharding, given.layout
    if not isinstance(given, jax.sharding.Sharding | None):
        raise CheckpointRefused(f"leaf {stored.name!r}: expected a jax.sharding.Sharding, found {shown(given)}")
    if args.mesh is not None and args.mesh_axes is not None:
        of_mesh = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
        if given is not None and not _is_equivalent(of_mesh, given, len(wanted.shape)):
            raise CheckpointRefused(
                f"leaf {stored.name!r}: mesh and mesh_axes say {sharding_file.describe(of_mesh)}, and sharding says "
                f"{sharding_file.describe(given)}; give one"
            )
        given = of_mesh if given is None else given
    return wanted if given is None else dataclasses.replace(wanted, sharding=given, layout=layout)


def _is_equivalent(one: jax.sharding.Sharding, other: jax.sharding.Sharding, axes: int) -> bool:
    try:
        return bool(one.is_equivalent_to(other, axes))
    except (IndexError, ValueError):  # one has more axes than the array, which is an error elsewhere
        return bool(one == other)


def _kind(restore_type: Any) -> Any:
    """Returns ``jax.Array`` or ``numpy.ndarray`` for a subclass of it, and any other ``restore_type`` unchanged."""
    if isinstance(restore_type, type):
        return next((kind for kind in (jax.Array, np.ndarray) if issubclass(restore_type, kind)), restore_type)
    return restore_type


def _of_dtype(stored: StoredLeaf, wanted: LeafRequest, dtype: Any) -> LeafRequest:
    """Returns ``wanted`` with another dtype. Typed PRNG keys accept their own dtype and the dtype of their data."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return dataclasses.replace(wanted, dtype=None, key_impl=key_impl_of(jax.ShapeDtypeStruct((), dtype)))
    if wanted.key_impl and stored.spec is not None and np.dtype(dtype) == stored.spec.numpy_dtype:
        return wanted
    return dataclasses.replace(wanted, dtype=np.dtype(dtype), key_impl=None)


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype as it is stored, without byte order."""
    return zarr_dtype(np.dtype(dtype)) or str(dtype) if dtype is not None else ""


def _layout_of(like: Any) -> Any:
    """Returns the device layout that is asked for. None for the default layout.

    It is the layout of an abstract array with a sharding, or the layout of an array if that is not the default one.
    """
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.format.layout if like.sharding is not None else None
    if like.is_deleted():
        return None  # a deleted array does not tell its layout
    layout = like.format.layout
    return layout if layout is not None and tuple(layout.major_to_minor) != tuple(range(like.ndim)) else None


def key_impl_of(like: Any) -> str:
    """Returns the name of the implementation of typed PRNG keys, concrete or abstract."""
    found: list[str] = []
    # JAX tells the implementation only for a concrete or traced key. Tracing computes nothing.
    with isolated():
        jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), like)
    return found[0]
