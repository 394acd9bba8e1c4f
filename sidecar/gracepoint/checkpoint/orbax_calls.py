"""Converts calls in Orbax's form, such as ``save(..., args=StandardSave(tree))``, to Gracepoint's form.

A call that asks for something unsupported is refused with an error. Orbax is not imported: a class is recognized by its
name and its package. ``StandardSave``, ``PyTreeSave``, ``StandardRestore`` and ``PyTreeRestore`` stand for the state.
In a ``Composite``, one item is the state. The arguments of the other items are passed to their handlers unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from gracepoint.checkpoint.options import ArrayRestoreArgs, RestoreOptions, WriteOptions
from gracepoint.checkpoint.orbax_objects import is_orbax
from gracepoint.errors import CheckpointRefused

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
    theirs = getattr(state, "ocdbt_target_data_file_size", None)
    ours = None if options is None else options.ocdbt_target_data_file_bytes
    if theirs is not None and theirs != ours:
        raise CheckpointRefused(
            f"ocdbt_target_data_file_size is {theirs}, and the checkpointer's is {ours}: it is the same for all saves. "
            f"Leave it out, and make the checkpointer with options=WriteOptions(ocdbt_target_data_file_bytes={theirs})"
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
            "args: a Composite has items, and a checkpoint with a path of its own has none: use a CheckpointManager, "
            f"or give the {names} alone"
        )
    found = dict(args)
    if item_name not in found:
        others = [name for name, one in found.items() if any(is_orbax(one, kind) for kind in accepted)]
        hint = f": make the CheckpointManager with item_name={others[0]!r}" if others else f": add it, a {names}"
        raise CheckpointRefused(f"args: expected the state in item {item_name!r}, found {', '.join(found)}{hint}")
    state = found.pop(item_name)
    if not any(is_orbax(state, name) for name in accepted):
        raise CheckpointRefused(f"args: item {item_name!r}: expected {names}, found a {type(state).__qualname__}")
    return state, found


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
