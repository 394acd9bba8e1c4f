"""Converts calls and objects of Orbax, as in ``save(..., args=StandardSave(tree))``, to Gracepoint's, or refuses them.

Orbax is not imported: a class is recognized by its name and its package. ``StandardSave``, ``PyTreeSave``,
``StandardRestore`` and ``PyTreeRestore`` stand for the state. In a ``Composite``, one item is the state. The arguments
of the other items are passed to their handlers unchanged. A call or an option that Gracepoint does not support is
refused with an error that names it. It is never ignored.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import jax

from gracepoint.arguments import shown
from gracepoint.checkpoint.options import (
    ArrayRestoreArgs,
    RestoreArgs,
    RestoreOptions,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
    TransferPriority,
    WriteOptions,
)
from gracepoint.errors import CheckpointRefused, SettingsError

_RESTORE_ARGS = (SingleReplicaArrayRestoreArgs, ArrayRestoreArgs, RestoreArgs)


def restore_args_of(args: Any, where: str) -> RestoreArgs:
    """Returns ``args`` as ``RestoreArgs`` of Gracepoint.

    Raises:
        CheckpointRefused: ``args`` is of neither Gracepoint nor Orbax, or asks for something that is not supported.
    """
    if isinstance(args, RestoreArgs):
        return args
    for own_class in _RESTORE_ARGS:
        if is_orbax(args, own_class.__name__):
            return own_class(**_fields(args, own_class, where))
    raise CheckpointRefused(f"{where}: expected RestoreArgs, found a {type(args).__qualname__}")


def save_args_of(args: Any, where: str) -> SaveArgs:
    """Returns ``args`` as ``SaveArgs`` of Gracepoint.

    Raises:
        CheckpointRefused: ``args`` is of neither Gracepoint nor Orbax, or asks for something that is not supported.
    """
    if isinstance(args, SaveArgs):
        return args
    if is_orbax(args, SaveArgs.__name__):
        return SaveArgs(**_fields(args, SaveArgs, where))
    raise CheckpointRefused(f"{where} is {shown(args)}; expected a SaveArgs")


def priority_of(answer: Any, name: str) -> TransferPriority:
    """Returns the answer of ``key_priority`` for leaf ``name`` as a ``TransferPriority`` of Gracepoint.

    Raises:
        CheckpointRefused: The answer is no priority, for example None or Orbax's ``UNKNOWN``.
    """
    if isinstance(answer, TransferPriority):
        return answer
    if isinstance(answer, enum.Enum) and answer.name in TransferPriority.__members__:
        return TransferPriority[answer.name]
    raise CheckpointRefused(
        f"leaf {name!r}: key_priority answered {answer!r}; expected one of {', '.join(TransferPriority.__members__)}"
    )


def sharding_of(value: Any, where: str) -> Any:
    """Returns ``value``. Orbax's ``ShardingMetadata`` is converted to a JAX sharding.

    Raises:
        CheckpointRefused: The devices of the sharding do not exist here.
    """
    if not is_orbax(value, "ShardingMetadata"):
        return value
    try:
        sharding = value.to_jax_sharding()
    except Exception as error:
        raise CheckpointRefused(f"{where}: {value} is no sharding over the devices that are here: {error}") from error
    if sharding is None:
        raise CheckpointRefused(f"{where}: {value} is no sharding over the devices that are here: give another one")
    return sharding


def write_options(options: WriteOptions | None, arguments: dict[str, Any]) -> WriteOptions | None:
    """Returns ``options``, changed by the arguments of Orbax's ``ArrayHandler``.

    Args:
        options: The options to change. None: the defaults.
        arguments: The arguments, by Orbax's names. None and Orbax's defaults change nothing.

    Raises:
        SettingsError: An argument is unknown, or asks for something that is not supported.
    """
    if options is not None and not isinstance(options, WriteOptions):
        raise SettingsError(f"options: expected WriteOptions, found {shown(options)} (metadata_key is a keyword)")
    changed: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "array_metadata_store":
            changed["store_array_metadata"] = _is_stored(value)
        elif name in _REFUSED:
            accepted, reason = _REFUSED[name]
            if value not in accepted:
                raise SettingsError(f"{name}={shown(value)}: {reason}")
        elif name not in _OPTIONS:
            names = sorted([*_OPTIONS, *_REFUSED, "array_metadata_store"])
            raise SettingsError(f"unknown argument {name!r}; expected one of {', '.join(names)}")
        elif value is not None:
            changed[_OPTIONS[name]] = value
    return dataclasses.replace(options or WriteOptions(), **changed) if changed else options


def _is_stored(store: Any) -> bool:
    """Returns whether ``array_metadatas`` is written: with Orbax's ``Store``. As in Orbax, None means that it is not.

    Raises:
        SettingsError: It is another store, which would be ignored.
    """
    if store is not None and not (is_orbax(store, "Store") and type(store).__module__.startswith("orbax.")):
        raise SettingsError(
            f"array_metadata_store={shown(store)}: array_metadatas is written in Orbax's form, or not at all (None)"
        )
    return store is not None


_OPTIONS = {
    "use_replica_parallel": "replica_parallel",
    "min_slice_bytes_for_replica_parallel": "min_slice_bytes",
    "max_replicas_for_replica_parallel": "max_replicas",
    "enable_write_sharding_file": "store_sharding",
    "callback": "callback",
}
# Arguments that are refused, each with the values that are accepted because they change nothing.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "replica_id": (
        (None, 0),
        "which replica writes is worked out from the shardings, so that each process writes as little as possible; "
        "leave it out",
    ),
    "enable_replica_parallel_separate_folder": (
        (None, False),
        "replicas have no separate folder; leave it out (a checkpoint that Orbax wrote with it is read)",
    ),
}


def is_orbax(value: Any, name: str) -> bool:
    """Returns whether ``value`` is an instance of Orbax's class ``name`` or of a subclass of it."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] == "orbax" for base in type(value).__mro__)


def _fields(args: Any, own_class: type, where: str) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(own_class)}
    fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    if more := [name for name in fields if name not in names and fields[name]]:
        raise CheckpointRefused(
            f"{where}: {type(args).__qualname__}.{more[0]} is {fields[more[0]]!r}, and is not supported: leave it out"
        )
    return {name: value for name, value in fields.items() if name in names}


_SAVES = ("StandardSaveArgs", "PyTreeSaveArgs")
_RESTORES = ("StandardRestoreArgs", "PyTreeRestoreArgs")


@dataclasses.dataclass(frozen=True)
class AsSaved:
    """A number of ``like`` that stands for any leaf: it is restored as its arguments say, else as it was saved.

    Attributes:
        value: The number, which stays if the leaf is not restored.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class SaveCall:
    """What is saved.

    Attributes:
        tree: The state.
        save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.
        custom_metadata: JSON values of the user's, by name.
        items: Arguments for the handlers of further items, by the item's name.
    """

    tree: Any
    save_args: Any
    custom_metadata: Mapping[str, Any]
    items: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RestoreCall:
    """What is restored.

    Attributes:
        like: The tree to restore into. None: the tree is restored as it was saved.
        restore_args: ``RestoreArgs`` for all leaves, or a tree of them. None: no arguments.
        options: How the tree is restored.
        items: Arguments for the handlers of further items, by the item's name.
    """

    like: Any
    restore_args: Any
    options: RestoreOptions
    items: Mapping[str, Any]


def save_call(
    tree: Any,
    args: Any,
    *,
    save_args: Any,
    custom_metadata: Mapping[str, Any] | None,
    items: Mapping[str, Any] | None = None,
    item_name: str | None = None,
    options: WriteOptions | None,
) -> SaveCall:
    """Returns what a call of ``save`` asks for, in Gracepoint's form or in Orbax's.

    Args:
        tree: The state, or Orbax's arguments in its place.
        args: Orbax's arguments. None: the call has Gracepoint's form.
        save_args: The argument of this name of the call.
        custom_metadata: The argument of this name of the call.
        items: The argument of this name of the call.
        item_name: The item of the state. None: the checkpoint has no items.
        options: The options of the checkpointer.

    Raises:
        CheckpointRefused: The arguments contradict each other, or ask for something that is not supported.
    """
    tree, args = _one_form(tree, args, "tree")
    if args is None:
        return SaveCall(tree, save_args, {} if custom_metadata is None else custom_metadata, dict(items or {}))
    state, others = _parts(args, item_name, _SAVES)
    items = _one_of(items, others, "items")
    other_bytes = getattr(state, "ocdbt_target_data_file_size", None)
    own_bytes = None if options is None else options.ocdbt_target_data_file_bytes
    if other_bytes is not None and other_bytes != own_bytes:
        raise CheckpointRefused(
            f"ocdbt_target_data_file_size is {other_bytes}, and the checkpointer's is {own_bytes}: it is the "
            "same for all saves. Leave it out, and make the checkpointer with "
            f"options=WriteOptions(ocdbt_target_data_file_bytes={other_bytes})"
        )
    return SaveCall(
        state.item,
        _one_of(save_args, state.save_args, "save_args"),
        _one_of(custom_metadata, state.custom_metadata, "custom_metadata") or {},
        dict(items or {}),
    )


def restore_call(
    like: Any,
    args: Any,
    *,
    restore_args: Any,
    options: RestoreOptions,
    items: Mapping[str, Any] | None = None,
    item_name: str | None = None,
) -> RestoreCall:
    """Returns what a call of ``restore`` asks for, in Gracepoint's form or in Orbax's.

    The arguments are those of the call, and ``item_name`` as in ``save_call``.

    Raises:
        CheckpointRefused: The arguments contradict each other, or ask for something that is not supported.
    """
    like, args = _one_form(like, args, "like")
    if args is None:
        return RestoreCall(like, restore_args, options, dict(items or {}))
    state, others = _parts(args, item_name, _RESTORES)
    items = dict(_one_of(items, others, "items") or {})
    like = state.item
    if is_orbax(state, "StandardRestoreArgs"):
        if state.fallback_sharding is not None:
            raise CheckpointRefused(
                "fallback_sharding is not supported: give each abstract array of the item the sharding that it needs"
            )
        if not state.strict:
            restore_args = _one_of(restore_args, _not_strict(like), "restore_args")
        return RestoreCall(like, restore_args, options, items)
    if state.legacy_transform_fn is not None:
        raise CheckpointRefused("legacy_transform_fn is not supported: use RestoreOptions.transforms")
    changes: dict[str, Any] = {}
    if state.partial_restore:
        changes["partial_restore"] = True
    if state.transforms is not None:
        # As in Orbax, leaves that are not asked for are left out, and leaves that were not saved stay as they are.
        changes |= {
            "transforms": state.transforms,
            "transforms_default_to_original": state.transforms_default_to_original,
            "partial_restore": True,
            "keep_missing": True,
        }
    # The item gives the structure: its numbers often stand for arrays.
    like = jax.tree.map(lambda leaf: AsSaved(leaf) if isinstance(leaf, bool | int | float) else leaf, like)
    options = dataclasses.replace(options, **changes) if changes else options
    return RestoreCall(like, _one_of(restore_args, state.restore_args, "restore_args"), options, items)


def result_of(args: Any, item_name: str, state: Any, items: Mapping[str, Any]) -> Any:
    """Returns what ``restore(args=)`` returns in Orbax: the state, or for a ``Composite`` a ``Composite``."""
    if not _is_composite(args):
        return state
    return type(args)(**{name: state if name == item_name else items[name] for name in args})


def _one_form(value: Any, args: Any, name: str) -> tuple[Any, Any]:
    """Returns the tree and Orbax's arguments, one of which is None. Orbax takes its arguments in both places."""
    if is_orbax(value, "CheckpointArgs"):
        value, args = None, _one_of(args, value, "args")
    if args is not None and value is not None:
        raise CheckpointRefused(f"{name}= and args= are both given: give one of them")
    if args is not None and not is_orbax(args, "CheckpointArgs"):
        raise CheckpointRefused(
            f"args: expected arguments of Orbax, as orbax.checkpoint.args.StandardSave, found a "
            f"{type(args).__qualname__}: give a tree as {name}="
        )
    return value, args


def _parts(args: Any, item_name: str | None, accepted: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of the state, and those of the other items."""
    names = " or ".join(name.removesuffix("Args") for name in accepted)
    if not _is_composite(args):
        if not any(is_orbax(args, name) for name in accepted):
            raise CheckpointRefused(f"args: expected {names}, found a {type(args).__qualname__}")
        return args, {}
    if item_name is None:
        raise CheckpointRefused(
            "args: a Composite has items, and a checkpoint with its own path has none: use a CheckpointManager, "
            f"or give the {names} alone"
        )
    items = dict(args)
    if item_name not in items:
        others = [name for name, one in items.items() if any(is_orbax(one, kind) for kind in accepted)]
        hint = f": make the CheckpointManager with item_name={others[0]!r}" if others else f": add it, a {names}"
        raise CheckpointRefused(f"args: expected the state in item {item_name!r}, found {', '.join(items)}{hint}")
    state = items.pop(item_name)
    if not any(is_orbax(state, name) for name in accepted):
        raise CheckpointRefused(f"args: item {item_name!r}: expected {names}, found a {type(state).__qualname__}")
    return state, items


def _one_of(first: Any, second: Any, name: str) -> Any:
    """Returns the one that is given. Raises CheckpointRefused if both are."""
    if first is not None and second:
        raise CheckpointRefused(f"{name} is given twice, also in args=: give it once")
    return second if first is None else first


def _is_composite(args: Any) -> bool:
    return is_orbax(args, "Composite")


def _not_strict(like: Any) -> Any:
    """Returns arguments by which arrays are cut, or filled up with zeros, to the shapes of ``like``."""
    return jax.tree.map(
        lambda leaf: ArrayRestoreArgs(strict=False) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None,
        like,
    )
