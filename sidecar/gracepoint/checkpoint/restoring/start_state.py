"""The first state of a training run: a state of a given form, restored from a checkpoint or created."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gracepoint.arguments import check_kind, check_state
from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.options import (
    DEFAULT_RESTORE_OPTIONS,
    RestoreArgs,
    RestoreOptions,
    SingleReplica,
    SingleReplicaArrayRestoreArgs,
)
from gracepoint.checkpoint.restoring import transforms
from gracepoint.checkpoint.restoring.leaves import ANYWHERE, NUMBERS, LeafRequest, as_like
from gracepoint.checkpoint.restoring.placement import OnDefaultDevice, check_sharding
from gracepoint.errors import CheckpointNotFound, InvalidSharding, SettingsError
from gracepoint.jax_isolation import isolated

_LIKE = "like= with jax.ShapeDtypeStruct leaves that have shardings"
_WHAT_TO_GIVE = f"Give init as jax.jit(init, out_shardings=...), or give {_LIKE}"
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Asked:
    """The arguments of ``Session.restore``, after checks.

    Attributes:
        like: A state or its form, which is restored. ``FormByCall``: the form is that of what ``init`` returns.
        init: Creates the first state. None: ``like`` is the first state.
        restore_args: ``RestoreArgs`` of the leaves. None: no arguments.
        options: How the tree is restored.
    """

    like: Any
    init: Callable[[], Any] | None
    restore_args: Any
    options: RestoreOptions

    def noting_deletions(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that adds a note to errors, if the arrays of ``like`` were deleted."""
        return transforms.noting_deletions(self.like)

    def first_state(self) -> Any:
        """Returns the state to begin with if there is no checkpoint.

        Raises:
            CheckpointNotFound: There is no such state: ``init`` is None, and ``like`` has no values.
            CheckpointRefused: ``init`` created a state that cannot be saved; names the leaf.
            SettingsError: ``init`` created a state that differs from ``like``.
        """
        if self.init is not None:
            state = self.init()
            if not isinstance(self.like, transforms.FormByCall):
                state = made_alike(state, self.like)
            pytree.flatten(state)
            return state
        if is_abstract(self.like):
            raise CheckpointNotFound(
                "there is no checkpoint to restore, and like has no values to begin with: give init=, which makes the "
                "first state"
            )
        return self.like


def asked(
    like: Any,
    init: Callable[[], Any] | None,
    single_replica: bool | SingleReplica,
    *,
    donate: bool,
    restore_args: Any = None,
    options: RestoreOptions | None = None,
) -> Asked:
    """Checks the arguments of ``Session.restore``, and returns them.

    Raises:
        InvalidSharding: No array can be read by one replica for all.
        SettingsError: The arguments contradict each other.
    """
    if like is not None:
        check_state("restore(like=...)", like)
    check_kind("restore(options=...)", options, RestoreOptions)
    if like is None and init is None:
        raise SettingsError("restore(): expected like= (a state, or its form) or init= (makes one), found neither")
    if init is not None and not callable(init):
        raise SettingsError(
            f"restore(init=...): expected a function that makes the first state, found a {type(init).__qualname__}. "
            f"A state, or its form, is given as like="
        )
    if callable(like) and jax.tree_util.all_leaves([like]):  # a module of Equinox or Flax is callable, and has leaves
        raise SettingsError(
            "restore(like=...): expected a state or its form, found a function. A function that makes the first state "
            "is given as init="
        )
    if init is not None and has_arrays(like):
        raise SettingsError(
            "restore(): like has arrays, and init would make them a second time: give one of both, or a like of "
            "jax.ShapeDtypeStruct leaves"
        )
    if like is None:
        assert init is not None
        is_traced = jax.device_count() > 1 or single_replica or _jitted(init) is not None
        like = form_of(init) if is_traced else transforms.FormByCall(init)
    options = DEFAULT_RESTORE_OPTIONS if options is None else options
    replica = options.single_replica if isinstance(single_replica, bool) else single_replica
    if single_replica:
        if restore_args is not None:
            raise SettingsError(
                "restore(): expected single_replica= or restore_args=, found both: give the leaves that one replica "
                "reads SingleReplicaArrayRestoreArgs"
            )
        restore_args = by_one_replica(like, replica)
    return Asked(like, init, restore_args, dataclasses.replace(options, single_replica=replica, donate=donate))


def form_of(init: Callable[[], Any]) -> Any:
    """Returns the form of the state that ``init`` creates, with ``jax.ShapeDtypeStruct`` leaves. Computes nothing.

    Leaves that are no arrays of JAX (numbers, numpy arrays, strings, functions) stay as they are.

    Raises:
        SettingsError: There are several devices, and ``init`` cannot be traced, or does not determine the shardings;
            names the first leaf.
    """
    if jax.device_count() == 1:
        return _on_the_mesh(_traced(init))
    try:
        form = _on_the_mesh(_traced(init))
    except Exception as error:
        raise SettingsError(
            f"restore(init=...): init raised {type(error).__name__} while it was traced ({error}). There are "
            f"{jax.device_count()} devices, so it is traced first, to know the shardings. {_WHAT_TO_GIVE}{_or()}"
        ) from error
    leaves = [(f"state{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(form)]
    structs = [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if unknown := [path for path, leaf in structs if not _names_devices(leaf.sharding)]:
        more = f" (and of {len(unknown) - 1} more leaves)" if len(unknown) > 1 else ""
        fixed = next((path for path, leaf in leaves if isinstance(leaf, str) or pytree.is_code(leaf)), None)
        advice = _WHAT_TO_GIVE if fixed is None else f"Give {_LIKE}, as {fixed} is nothing that jax.jit can return"
        raise SettingsError(
            f"restore(init=...): there are {jax.device_count()} devices, and init does not give the sharding of "
            f"{unknown[0]}{more}. {advice}{_or()}"
        )
    return form


def _on_the_mesh(form: Any) -> Any:
    """Returns the form with the shardings that a mesh set by ``jax.set_mesh`` gives its arrays, where they are known.

    With explicit axes, they are part of the arrays' types. JAX leaves out those of arrays that are on all devices of
    the mesh. A mesh of one device has one place for every array, whatever its axes are.
    """
    mesh = jax.sharding.get_mesh()
    explicit = all(kind is jax.sharding.AxisType.Explicit for kind in mesh.axis_types)
    if mesh.empty or (mesh.size > 1 and not explicit):
        return form

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct) or _names_devices(leaf.sharding):
            return leaf
        spec = jax.sharding.PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)

    return jax.tree.map(placed, form)


def _or() -> str:
    """Returns what else can be done, if this is the only process: tutorials are written for one device."""
    return "; or make a single device visible" if jax.process_count() == 1 else ""


def _traced(init: Callable[[], Any]) -> Any:
    if (jitted := _jitted(init)) is not None:
        return jax.eval_shape(jitted.func, *jitted.args, **jitted.keywords)
    structure: list[Any] = []
    leaves: list[Any] = []

    def arrays() -> list[Any]:
        state = init()
        structure.append(jax.tree.structure(state))
        leaves.extend(jax.tree.leaves(state))
        traced = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
        leaves[:] = [None if isinstance(leaf, jax.core.Tracer) else _described(leaf) for leaf in leaves]
        return traced

    forms = iter(jax.eval_shape(arrays))
    return jax.tree.unflatten(structure[0], [next(forms) if leaf is None else leaf for leaf in leaves])


def _described(leaf: Any) -> Any:
    """Returns the form of an array that was made before the trace. Other leaves are returned as they are."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)


def _jitted(init: Callable[[], Any]) -> functools.partial[Any] | None:
    """Returns the function of ``jax.jit`` that ``init`` is, with the arguments bound to it. None: it is not one."""
    bound = functools.partial(init)  # flattens partials of partials
    return bound if isinstance(bound.func, jax.stages.Wrapped) else None


def made_alike(state: Any, form: Any) -> Any:
    """Returns the state that ``init`` created, with the leaves that a restore would give it.

    Numbers and numpy arrays become arrays of JAX where ``form`` has these. Static fields of the trees are not compared:
    many are functions, which are equal to nothing that is made by another call.

    Raises:
        SettingsError: The state differs from ``like``; names the leaf.
    """
    made_leaves, expected_leaves = (jax.tree_util.tree_flatten_with_path(tree) for tree in (state, form))
    paths, expected = (
        [jax.tree_util.keystr(path) for path, _ in leaves] for leaves, _ in (made_leaves, expected_leaves)
    )
    if paths != expected:
        lacks = [f"no state{path}, which like has" for path in expected if path not in set(paths)]
        more = [f"state{path}, which like does not have" for path in paths if path not in set(expected)]
        difference = "; ".join((lacks + more)[:_SHOWN]) or "the leaves in another order"
        raise SettingsError(f"restore(): init made another tree than like: it made {difference}")
    if differing := _other_node(made_leaves[1], expected_leaves[1]):
        raise SettingsError(f"restore(): init made another tree than like: {differing}")
    leaves = [
        _leaf_alike(f"state{path}", leaf, like)
        for path, (_, leaf), (_, like) in zip(paths, made_leaves[0], expected_leaves[0], strict=True)
    ]
    return jax.tree.unflatten(made_leaves[1], leaves)


def _leaf_alike(where: str, leaf: Any, like: Any) -> Any:
    if pytree.is_code(leaf) and pytree.is_code(like):
        return leaf
    actual, expected = as_like(where, leaf), as_like(where, like)
    if isinstance(like, jax.ShapeDtypeStruct) and _may_become(actual, expected):
        return _on_devices(leaf, expected)
    if _kind(actual) != _kind(expected) or not _lie_alike(actual, expected):
        texts = [_in_words(actual), _in_words(expected)]
        if texts[0] == texts[1]:  # what differs is in none of them, such as the order of devices or the kind of memory
            texts = [f"{text} ({request.sharding!r})" for text, request in zip(texts, (actual, expected), strict=True)]
        raise SettingsError(
            f"restore(): init made {where} in another way than like says: expected {texts[1]}, found {texts[0]}. "
            f"The next start would restore it as like says"
        )
    return leaf


def _may_become(actual: LeafRequest, expected: LeafRequest) -> bool:
    """Returns whether ``actual`` is a number or numpy array that JAX makes the array of."""
    if actual.restore_type in (jax.Array, str) or expected.key_impl or actual.shape != expected.shape:
        return False
    return bool(jax.dtypes.canonicalize_dtype(actual.dtype) == expected.dtype)


def _on_devices(leaf: Any, expected: LeafRequest) -> jax.Array:
    values = np.asarray(leaf, expected.dtype)
    if expected.sharding in (None, ANYWHERE):
        whole = tuple((0, size) for size in values.shape)
        placed: jax.Array = OnDefaultDevice(values.shape, weak_scalar=expected.weak).put({whole: values})
        return placed
    with isolated():
        return jax.make_array_from_callback(values.shape, expected.sharding, lambda index: values[index])


def _in_words(request: LeafRequest) -> str:
    if request.restore_type in NUMBERS:
        return f"a Python {request.restore_type.__name__}"
    kinds = {jax.Array: "a jax.Array", np.ndarray: "a numpy array", np.generic: "a numpy number"}
    kind = kinds.get(request.restore_type)
    return str(request) if kind is None else f"{kind} {request}"


def _other_node(actual: Any, expected: Any) -> str:
    """Returns which nodes of two trees are of different types, as text. Empty if none are."""
    nodes = [tree.node_data() for tree in (actual, expected)]
    kinds = [None if node is None else node[0] for node in nodes]
    if kinds[0] != kinds[1]:
        names = [getattr(kind, "__qualname__", "leaf") for kind in kinds]
        return f"it has a {names[0]} where like has a {names[1]}"
    below = zip(actual.children(), expected.children(), strict=True)
    return next((difference for one, other in below if (difference := _other_node(one, other))), "")


def is_abstract(like: Any) -> bool:
    """Returns whether some leaf is a ``jax.ShapeDtypeStruct``, which has no values."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(like))


def has_arrays(like: Any) -> bool:
    """Returns whether some leaf is a ``jax.Array``, which takes memory of devices."""
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(like))


def by_one_replica(like: Any, replica: SingleReplica) -> Any:
    """Returns restore arguments with which one replica reads the arrays that are replicated along the replicas' axis.

    Every process reads all other leaves that it needs.

    Raises:
        InvalidSharding: There is no such array; says why the first array is not one.
    """
    errors: list[InvalidSharding] = []

    def args_of(path: Any, leaf: Any) -> RestoreArgs:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return RestoreArgs()
        try:
            check_sharding(replica, f"state{jax.tree_util.keystr(path)}", as_like("", leaf).sharding)
        except InvalidSharding as error:
            errors.append(error)
            return RestoreArgs()
        return SingleReplicaArrayRestoreArgs()

    args = jax.tree_util.tree_map_with_path(args_of, like)
    if not any(isinstance(leaf, SingleReplicaArrayRestoreArgs) for leaf in jax.tree.leaves(args)):
        reason = str(errors[0]) if errors else "the state has no arrays"
        raise InvalidSharding(f"restore(single_replica=...): no array can be read by one replica for all: {reason}")
    return args


def _names_devices(sharding: Any) -> bool:
    if sharding is None:
        return False
    mesh = getattr(sharding, "mesh", None)
    return not isinstance(mesh, jax.sharding.AbstractMesh)


def _kind(request: LeafRequest) -> tuple[Any, ...]:
    return request.restore_type, request.shape, request.dtype, request.key_impl


def _lie_alike(actual: LeafRequest, expected: LeafRequest) -> bool:
    """Returns whether the shardings are equivalent, or one of them is not given."""
    if actual.sharding in (None, ANYWHERE) or expected.sharding in (None, ANYWHERE):
        return True
    return bool(actual.sharding.is_equivalent_to(expected.sharding, len(actual.shape)))
