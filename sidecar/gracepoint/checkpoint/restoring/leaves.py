"""How one leaf is restored: what is read for it, and how the leaf is built from that.

A leaf is restored as its ``RestoreArgs`` say, else as the leaf of ``like``, else as it was saved. The shape and the
type must be the stored ones, unless an argument asks for others.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from gracepoint.arguments import shown
from gracepoint.checkpoint.format import orbax_metadata, pytree
from gracepoint.checkpoint.format.array_spec import zarr_dtype
from gracepoint.checkpoint.options import (
    DEFAULT_REPLICA,
    ArrayRestoreArgs,
    RestoreArgs,
    SingleReplica,
    SingleReplicaArrayRestoreArgs,
)
from gracepoint.checkpoint.orbax import sharding_of
from gracepoint.checkpoint.reading.parallel_reader import ReadRequest, Values
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf
from gracepoint.checkpoint.restoring.placement import (
    LeafPlacement,
    OnDefaultDevice,
    OnDevices,
    OnHost,
    OnOneReplica,
    check_sharding,
    replica_of,
)
from gracepoint.errors import CheckpointMismatch, CheckpointRefused
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
        where = "" if self.sharding is ANYWHERE else orbax_metadata.describe_sharding(self.sharding)
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
        state = "none is set" if mesh.empty else f"{dict(mesh.shape)} is set"
        raise CheckpointRefused(
            f"leaf {name!r}: its sharding is on an abstract mesh {dict(sharding.mesh.shape)}, which has no devices: "
            f"expected the same mesh to be set by jax.set_mesh, and {state}. Set it around the restore, or give "
            f"jax.sharding.NamedSharding with a mesh of devices"
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def as_args_say(stored: StoredLeaf, request: LeafRequest, args: RestoreArgs, *, as_saved: bool) -> LeafRequest:
    """Returns ``request``, changed where ``args`` ask for something else. ``as_saved``: whether ``like`` was None.

    Raises:
        CheckpointError: The arguments contradict each other.
    """
    restore_type = _kind(args.restore_type)
    if restore_type is None and isinstance(args, ArrayRestoreArgs):
        restore_type = jax.Array
    if restore_type is not None and restore_type is not request.restore_type:
        if restore_type not in (jax.Array, np.ndarray, str) and not is_number(restore_type):
            kind = f"a {restore_type}" if isinstance(restore_type, type) else shown(restore_type)
            raise CheckpointRefused(f"leaf {stored.name!r}: cannot restore into {kind}")
        if request.key_impl and as_saved and stored.spec is not None:  # the keys' data is restored
            request = dataclasses.replace(
                request, shape=stored.spec.shape, dtype=stored.spec.numpy_dtype, key_impl=None, sharding=None
            )
        request = dataclasses.replace(request, restore_type=restore_type)
    if args.dtype is not None:
        request = _of_dtype(stored, request, args.dtype)
    if not isinstance(args, ArrayRestoreArgs):
        return request
    if args.shape is not None and args.global_shape is not None and tuple(args.shape) != tuple(args.global_shape):
        raise CheckpointRefused(
            f"leaf {stored.name!r}: shape {args.shape} and global_shape {args.global_shape} differ; give one"
        )
    shape = args.global_shape if args.global_shape is not None else args.shape
    if shape is not None:
        request = dataclasses.replace(request, shape=tuple(shape))
    if (args.mesh is None) != (args.mesh_axes is None):
        present, absent = ("mesh", "mesh_axes") if args.mesh_axes is None else ("mesh_axes", "mesh")
        raise CheckpointRefused(
            f"leaf {stored.name!r}: {present} without {absent} says no sharding; give both, or sharding"
        )
    option: Any = sharding_of(args.sharding, f"leaf {stored.name!r}")
    layout: Any = None
    if isinstance(option, Format):
        option, layout = option.sharding, option.layout
    if not isinstance(option, jax.sharding.Sharding | None):
        raise CheckpointRefused(f"leaf {stored.name!r}: expected a jax.sharding.Sharding, found {shown(option)}")
    if args.mesh is not None and args.mesh_axes is not None:
        of_mesh = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
        if option is not None and not _is_equivalent(of_mesh, option, len(request.shape)):
            raise CheckpointRefused(
                f"leaf {stored.name!r}: mesh and mesh_axes say {orbax_metadata.describe_sharding(of_mesh)}, and "
                f"sharding says {orbax_metadata.describe_sharding(option)}; give one"
            )
        option = of_mesh if option is None else option
    return request if option is None else dataclasses.replace(request, sharding=option, layout=layout)


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


def _of_dtype(stored: StoredLeaf, request: LeafRequest, dtype: Any) -> LeafRequest:
    """Returns ``request`` with another dtype. Typed PRNG keys accept their own dtype and the dtype of their data."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dataclasses.replace(request, dtype=None, key_impl=key_impl_of(jax.ShapeDtypeStruct((), dtype)))
    if request.key_impl and stored.spec is not None and np.dtype(dtype) == stored.spec.numpy_dtype:
        return request
    return dataclasses.replace(request, dtype=np.dtype(dtype), key_impl=None)


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
        return None  # a deleted array does not have its layout
    layout = like.format.layout
    return layout if layout is not None and tuple(layout.major_to_minor) != tuple(range(like.ndim)) else None


def key_impl_of(like: Any) -> str:
    """Returns the name of the implementation of typed PRNG keys, concrete or abstract."""
    impls: list[str] = []
    # JAX gives the implementation only for a concrete or traced key. Tracing computes nothing.
    with isolated():
        jax.eval_shape(lambda key: impls.append(str(jax.random.key_impl(key))), like)
    return impls[0]


logger = logging.getLogger(__name__)

_PLAIN = (str, *NUMBERS)


@dataclasses.dataclass(frozen=True)
class LeafTarget:
    """One leaf to restore.

    Attributes:
        stored: The leaf in the checkpoint.
        dtype: Type that the values are cast to. None: they are not cast.
        placement: Where the array's values go. None if the leaf is not an array.
        finish: Builds the leaf from the array.
        from_file: Whether the sharding is the saved one, which names devices by the ids that they had at the save.
    """

    stored: StoredLeaf
    dtype: np.dtype[Any] | None = None
    placement: LeafPlacement | None = None
    finish: Callable[[Any], Any] = lambda value: value
    from_file: bool = False

    def request(self, parts: list[Any]) -> ReadRequest | None:
        """Returns the request that reads into ``parts``. None if nothing is read."""
        spec, placement = self.stored.spec, self.placement
        if placement is None:
            return None
        assert spec is not None

        def deliver(values: Values) -> Any:
            parts.append(placement.put(values))
            return parts[-1]

        return ReadRequest(spec.name, spec.shape, spec.numpy_dtype, tuple(placement.regions), deliver, self.dtype)

    def build(self, parts: Sequence[Any]) -> Any:
        """Builds the leaf from ``parts``."""
        return self.finish(self.stored.text if self.placement is None else self.placement.build(parts))


def target_of(
    stored: StoredLeaf, like: Any, args: RestoreArgs, single_replica: SingleReplica = DEFAULT_REPLICA
) -> LeafTarget:
    """Returns how ``stored`` is restored.

    Args:
        stored: The leaf in the checkpoint.
        like: The leaf of ``like``. None: the leaf is restored as it was saved.
        args: The arguments of this leaf.
        single_replica: How one replica reads for all, if ``args`` ask for that.

    Raises:
        CheckpointMismatch: The leaf does not have the shape or type that is asked for.
        CheckpointError: It cannot be restored as asked.
    """
    default = as_stored(stored)
    request = default if like is None else as_like(stored.name, like)
    if _is_numpy_of_no_device(like, default, args):
        request = dataclasses.replace(request, restore_type=np.ndarray, sharding=None, layout=None)
    request = as_args_say(stored, request, args, as_saved=like is None)
    if default.key_impl and _names_data(stored, request, like, args):
        request = dataclasses.replace(request, shape=default.shape, dtype=None, key_impl=default.key_impl)
    if (request.restore_type is str) != (default.restore_type is str):
        raise _mismatch(stored, request)
    if request.restore_type is str:
        return LeafTarget(stored, finish=_of_the_type_of(stored, like))
    if args.dtype is None and is_number(request.restore_type) and _is_same_kind(request.dtype, default.dtype):
        request = dataclasses.replace(request, dtype=default.dtype)  # Python's numbers have no width
    if _is_number_for_array(stored, request, default, args):
        return LeafTarget(stored, None, OnHost(()), lambda value: _as_jax_takes(stored, value, request))
    _check(stored, request, default, args)
    assert stored.spec is not None
    says_nothing = request.sharding is ANYWHERE and isinstance(like, jax.ShapeDtypeStruct)  # an array has a device
    if says_nothing and request.shape == default.shape and orbax_metadata.sharding_fits(default.sharding):
        request = dataclasses.replace(request, sharding=default.sharding)
    shape = request.shape + (stored.spec.shape[-1:] if default.key_impl and request.key_impl else ())
    dtype = None if request.key_impl or np.dtype(request.dtype) == stored.spec.numpy_dtype else np.dtype(request.dtype)
    if request.restore_type is not jax.Array:
        finish = _of_the_type_of(stored, like) if request.restore_type in NUMBERS else lambda value: value
        return LeafTarget(stored, dtype, OnHost(shape), lambda value: finish(_finish_on_host(stored, request)(value)))
    placement: LeafPlacement
    from_file = False
    if isinstance(args, SingleReplicaArrayRestoreArgs):
        placement = _on_one_replica(stored, request, shape, single_replica, args)
    else:
        placement, from_file = _on_devices(stored, request, shape, dtype)
    impl = request.key_impl
    if impl is not None:
        return LeafTarget(stored, None, placement, functools.partial(_as_keys, impl), from_file)
    return LeafTarget(stored, dtype, placement, from_file=from_file)


def _is_numpy_of_no_device(like: Any, as_saved: LeafRequest, args: RestoreArgs) -> bool:
    """Returns whether the leaf was saved from numpy and nothing names a device for it. It then stays a numpy array."""
    is_abstract = isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None
    asks = args.restore_type is not None or isinstance(args, ArrayRestoreArgs)
    return is_abstract and as_saved.restore_type is np.ndarray and not asks


def _names_data(stored: StoredLeaf, request: LeafRequest, like: Any, args: RestoreArgs) -> bool:
    """Returns whether the request names typed PRNG keys by the shape and type of their data.

    Orbax's metadata and abstract arrays do so.
    """
    assert stored.spec is not None
    if request.restore_type is not jax.Array or request.shape != stored.spec.shape:
        return False
    asks_shape = isinstance(args, ArrayRestoreArgs) and (args.global_shape or args.shape) is not None
    if not asks_shape and not isinstance(like, jax.ShapeDtypeStruct):
        return False
    if request.key_impl:  # of the arguments or the saved leaf, not of the abstract array
        is_typed = args.dtype is not None and jnp.issubdtype(args.dtype, jax.dtypes.prng_key)
        return asks_shape and not is_typed
    return bool(np.dtype(request.dtype) == stored.spec.numpy_dtype)


def _is_same_kind(dtype: Any, other: Any) -> bool:
    """Returns whether both types are integers, or both are floating-point numbers, real or complex."""
    if dtype is None or other is None:
        return False
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    return any(jnp.issubdtype(dtype, kind) and jnp.issubdtype(other, kind) for kind in kinds)


def _is_number_for_array(stored: StoredLeaf, request: LeafRequest, as_saved: LeafRequest, args: RestoreArgs) -> bool:
    """Returns whether a number was saved, and the array is wanted that JAX makes of it: it has no 64 bits by default.

    A loop may hand over Python's count of steps in place of the array that ``init`` made.
    """
    if (
        args != RestoreArgs()
        or request.restore_type is not jax.Array
        or request.key_impl
        or as_saved.shape
        or request.shape
    ):
        return False
    is_scalar = stored.spec is not None and stored.spec.kind == "scalar"
    return bool(is_scalar and as_saved.dtype != request.dtype == jax.dtypes.canonicalize_dtype(as_saved.dtype))


def _as_jax_takes(stored: StoredLeaf, value: Any, request: LeafRequest) -> jax.Array:
    number = value.astype(request.dtype)
    if jnp.issubdtype(request.dtype, jnp.integer) and number != value:
        raise CheckpointMismatch(f"leaf {stored.name!r}: expected {request}, found {value}, which does not fit")
    if request.sharding is ANYWHERE or request.sharding is None:
        placed: jax.Array = OnDefaultDevice((), weak_scalar=request.weak).put({(): number})
        return placed
    with isolated():
        return jax.make_array_from_callback((), request.sharding, lambda index: number)


def _of_the_type_of(stored: StoredLeaf, like: Any) -> Callable[[Any], Any]:
    """Returns a function that gives a number or string the type of ``like``, which may be an enum's."""
    kind = type(like)
    if not isinstance(like, _PLAIN) or kind in _PLAIN:
        return lambda value: value

    def convert(value: Any) -> Any:
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            raise CheckpointMismatch(
                f"leaf {stored.name!r}: expected a {kind.__qualname__}, found {value!r}"
            ) from error

    return convert


def _check(stored: StoredLeaf, request: LeafRequest, saved: LeafRequest, args: RestoreArgs) -> None:
    assert stored.spec is not None
    as_data = request.key_impl is None and saved.key_impl is not None and request.restore_type is not jax.Array
    if as_data and args.restore_type is not None:
        saved = dataclasses.replace(saved, shape=stored.spec.shape, dtype=stored.spec.numpy_dtype, key_impl=None)
    may_be_cut = isinstance(args, ArrayRestoreArgs) and not args.strict and len(request.shape) == len(saved.shape)
    if (
        request.key_impl != saved.key_impl
        or (request.shape != saved.shape and not may_be_cut)
        or (args.dtype is None and not request.key_impl and dtype_name(request.dtype) != dtype_name(saved.dtype))
    ):
        raise _mismatch(stored, request)
    if is_number(request.restore_type) and request.shape != ():
        raise CheckpointMismatch(f"leaf {stored.name!r}: expected a number, found {saved}")


def _on_devices(
    stored: StoredLeaf, request: LeafRequest, shape: tuple[int, ...], dtype: np.dtype[Any] | None
) -> tuple[LeafPlacement, bool]:
    assert stored.spec is not None
    where = f"leaf {stored.name!r}"
    if request.dtype is not None and jax.dtypes.canonicalize_dtype(request.dtype) != request.dtype:
        raise CheckpointRefused(
            f"{where}: JAX has no {request.dtype} without jax_enable_x64: give another dtype, or restore_type "
            f"numpy.ndarray"
        )
    if request.sharding is ANYWHERE:
        if request.weak and shape:
            _warn_of_weak_type(stored.name)
        return OnDefaultDevice(shape, weak_scalar=request.weak), False
    if request.weak:
        _warn_of_weak_type(stored.name)
    if request.sharding is None:
        raise CheckpointRefused(
            f"{where}: no sharding is known to restore it with: give one, or restore_type numpy.ndarray"
        )
    from_file = isinstance(request.sharding, Mapping)
    sharding = orbax_metadata.to_jax_sharding(request.sharding, where) if from_file else request.sharding
    if request.key_impl and not isinstance(
        sharding, jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding
    ):  # other shardings have a fixed number of axes, and the keys' data has one more
        raise CheckpointRefused(f"{where}: typed PRNG keys cannot be restored with a {type(sharding).__name__}")
    _check_fits(where, shape, sharding)
    return OnDevices(shape, dtype or stored.spec.numpy_dtype, sharding, request.layout), from_file


def _on_one_replica(
    stored: StoredLeaf,
    request: LeafRequest,
    shape: tuple[int, ...],
    single_replica: SingleReplica,
    args: SingleReplicaArrayRestoreArgs,
) -> OnOneReplica:
    assert stored.spec is not None
    where = f"leaf {stored.name!r}"
    if request.sharding is None or request.sharding is ANYWHERE or isinstance(request.sharding, Mapping):
        raise CheckpointRefused(f"{where}: give a sharding, by which one replica reads it for all")
    dtype = stored.spec.numpy_dtype if request.dtype is None else np.dtype(request.dtype)
    _check_fits(where, shape, request.sharding)
    if args.single_replica_sharding is not None:
        reads = sharding_of(args.single_replica_sharding, f"{where}: single_replica_sharding")
        single_replica = replica_of(single_replica, where, reads, request.sharding, shape)
    return OnOneReplica(shape, dtype, check_sharding(single_replica, where, request.sharding), single_replica)


def _check_fits(where: str, shape: tuple[int, ...], sharding: Any) -> None:
    """Raises CheckpointRefused if an array of this shape cannot have the sharding."""
    try:
        jax.ShapeDtypeStruct(shape, np.uint8, sharding=sharding)  # on one device, this alone counts the axes
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:
        raise CheckpointRefused(f"{where}: no array of shape {list(shape)} can have {sharding}: {error}") from error


@isolated()
def _as_keys(impl: str, data: jax.Array) -> jax.Array:
    keys: jax.Array = jax.random.wrap_key_data(data, impl=impl)
    return keys


def _finish_on_host(stored: StoredLeaf, request: LeafRequest) -> Callable[[Any], Any]:
    restore_type = request.restore_type
    if restore_type is np.ndarray:
        return lambda values: values
    if restore_type is np.generic:
        return lambda values: values[()]
    if restore_type == "scalar":
        return lambda values: values.item() if values.ndim == 0 else values

    def to_number(values: Any) -> Any:
        try:
            return restore_type(values.item())
        except (ValueError, OverflowError) as error:
            raise CheckpointMismatch(
                f"leaf {stored.name!r}: {values.item()!r} is no {restore_type.__name__}: {error}"
            ) from error

    return to_number


def _mismatch(stored: StoredLeaf, request: LeafRequest) -> CheckpointMismatch:
    return CheckpointMismatch(f"leaf {stored.name!r}: expected {request}, found {describe_leaf(stored)}")


def _warn_of_weak_type(name: str) -> None:
    logger.warning(
        "leaf %r has a weak type in the state, and is restored with a strong one, which may change how it promotes: "
        "give it a dtype where it is made",
        name,
    )
