"""The first state of a training run: a state of a given form, restored from a checkpoint or created."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from gracepoint.arguments import check_kind, check_state
from gracepoint.checkpoint.loading.leaves import donation
from gracepoint.checkpoint.loading.leaves.leaf_request import ANYWHERE, LeafRequest, as_like
from gracepoint.checkpoint.loading.replicas.single_replica import check_sharding
from gracepoint.checkpoint.options import (
    DEFAULT_RESTORE_OPTIONS,
    RestoreArgs,
    RestoreOptions,
    SingleReplica,
    SingleReplicaArrayRestoreArgs,
)
from gracepoint.errors import CheckpointNotFound, InvalidSharding, SettingsError


@dataclasses.dataclass(frozen=True)
class Asked:
    """The arguments of ``Session.restore``, after checks.

    Attributes:
        like: A state or its form, which is restored.
        init: Creates the first state. None: ``like`` is the first state.
        restore_args: ``RestoreArgs`` of the leaves. None: no arguments.
        options: How the tree is restored.
    """

    like: Any
    init: Callable[[], Any] | None
    restore_args: Any
    options: RestoreOptions

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that adds a note to errors, if the arrays of ``like`` were deleted."""
        return donation.telling(self.like)

    def first_state(self) -> Any:
        """Returns the state to begin with if there is no checkpoint.

        Raises:
            CheckpointNotFound: There is no such state: ``init`` is None, and ``like`` has no values.
            SettingsError: ``init`` created a state that differs from ``like``.
        """
        if self.init is not None:
            state = self.init()
            check_made_alike(state, self.like)
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
        like = form_of(init)
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
    """Returns the form of the state that ``init`` creates, with ``jax.ShapeDtypeStruct`` leaves. Creates no arrays.

    Raises:
        SettingsError: ``init`` does not determine the shardings; names the first leaf. Not raised with a single device.
    """
    form = jax.eval_shape(init)
    if jax.device_count() == 1:
        return form
    for path, leaf in jax.tree_util.tree_flatten_with_path(form)[0]:
        if not _names_devices(leaf.sharding):
            raise SettingsError(
                f"restore(init=...): there are {jax.device_count()} devices, and init does not tell the sharding of "
                f"state{jax.tree_util.keystr(path)}. Give init as jax.jit(..., out_shardings=...), or give "
                f"like= with jax.ShapeDtypeStruct leaves that have shardings"
            )
    return form


def check_made_alike(state: Any, form: Any) -> None:
    """Checks that the state that ``init`` created has the form that a restore would give it.

    Raises:
        SettingsError: The state differs from ``like``; names the leaf.
    """
    made, expected = jax.tree.structure(state), jax.tree.structure(form)
    if made != expected:
        raise SettingsError(f"restore(): init made another tree than like: expected {expected}, found {made}")
    expected_leaves = jax.tree.leaves(form)
    for (path, leaf), like in zip(jax.tree_util.tree_flatten_with_path(state)[0], expected_leaves, strict=True):
        found, wanted = as_like("", leaf), as_like("", like)
        if _kind(found) != _kind(wanted) or not _lie_alike(found, wanted):
            raise SettingsError(
                f"restore(): init made state{jax.tree_util.keystr(path)} in another way than like says: expected "
                f"{wanted}, found {found}. The next start would restore it as like says"
            )


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
    why: list[InvalidSharding] = []

    def args_of(path: Any, leaf: Any) -> RestoreArgs:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return RestoreArgs()
        try:
            check_sharding(replica, f"state{jax.tree_util.keystr(path)}", as_like("", leaf).sharding)
        except InvalidSharding as error:
            why.append(error)
            return RestoreArgs()
        return SingleReplicaArrayRestoreArgs()

    args = jax.tree_util.tree_map_with_path(args_of, like)
    if not any(isinstance(leaf, SingleReplicaArrayRestoreArgs) for leaf in jax.tree.leaves(args)):
        reason = str(why[0]) if why else "the state has no arrays"
        raise InvalidSharding(f"restore(single_replica=...): no array can be read by one replica for all: {reason}")
    return args


def _names_devices(sharding: Any) -> bool:
    if sharding is None:
        return False
    mesh = getattr(sharding, "mesh", None)
    return not isinstance(mesh, jax.sharding.AbstractMesh)


def _kind(wanted: LeafRequest) -> tuple[Any, ...]:
    return wanted.restore_type, wanted.shape, wanted.dtype, wanted.key_impl


def _lie_alike(found: LeafRequest, wanted: LeafRequest) -> bool:
    """Returns whether the shardings are equivalent, or one of them is not given."""
    if found.sharding in (None, ANYWHERE) or wanted.sharding in (None, ANYWHERE):
        return True
    return bool(found.sharding.is_equivalent_to(wanted.sharding, len(found.shape)))
