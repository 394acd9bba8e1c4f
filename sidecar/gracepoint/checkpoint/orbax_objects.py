"""Converts Orbax's own objects, which code written for Orbax passes in, to Gracepoint's, or refuses them.

Orbax is not imported: a class is recognized by its name and its package. An option that Orbax's class has, and
Gracepoint's lacks, is refused with an error that names it. It is never ignored.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from gracepoint.arguments import shown
from gracepoint.checkpoint.options import (
    ArrayRestoreArgs,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
    TransferPriority,
    WriteOptions,
)
from gracepoint.errors import CheckpointRefused, SettingsError

_RESTORE_ARGS = (SingleReplicaArrayRestoreArgs, ArrayRestoreArgs, RestoreArgs)


def restore_args_of(given: Any, where: str) -> RestoreArgs:
    """Returns ``given`` as ``RestoreArgs`` of Gracepoint.

    Raises:
        CheckpointRefused: ``given`` is of neither Gracepoint nor Orbax, or asks for something that is not supported.
    """
    if isinstance(given, RestoreArgs):
        return given
    for ours in _RESTORE_ARGS:
        if is_orbax(given, ours.__name__):
            return ours(**_fields(given, ours, where))
    raise CheckpointRefused(f"{where}: expected RestoreArgs, found a {type(given).__qualname__}")


def save_args_of(given: Any, where: str) -> SaveArgs:
    """Returns ``given`` as ``SaveArgs`` of Gracepoint.

    Raises:
        CheckpointRefused: ``given`` is of neither Gracepoint nor Orbax, or asks for something that is not supported.
    """
    if isinstance(given, SaveArgs):
        return given
    if is_orbax(given, SaveArgs.__name__):
        return SaveArgs(**_fields(given, SaveArgs, where))
    raise CheckpointRefused(f"{where} is {shown(given)}; expected a SaveArgs")


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


def sharding_of(given: Any, where: str) -> Any:
    """Returns ``given``. Orbax's ``ShardingMetadata`` is converted to a JAX sharding.

    Raises:
        CheckpointRefused: The devices of the sharding do not exist here.
    """
    if not is_orbax(given, "ShardingMetadata"):
        return given
    try:
        found = given.to_jax_sharding()
    except Exception as error:
        raise CheckpointRefused(f"{where}: {given} is no sharding over the devices that are here: {error}") from error
    if found is None:
        raise CheckpointRefused(f"{where}: {given} is no sharding over the devices that are here: give another one")
    return found


def write_options(options: WriteOptions | None, given: dict[str, Any]) -> WriteOptions | None:
    """Returns ``options``, changed by the arguments of Orbax's ``ArrayHandler``.

    Args:
        options: The options to change. None: the defaults.
        given: The arguments, by Orbax's names. None and Orbax's defaults change nothing.

    Raises:
        SettingsError: An argument is unknown, or asks for something that is not supported.
    """
    if options is not None and not isinstance(options, WriteOptions):
        raise SettingsError(f"options: expected WriteOptions, found {shown(options)} (metadata_key is a keyword)")
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name == "array_metadata_store":
            changed["store_array_metadata"] = _is_stored(value)
        elif name in _REFUSED:
            accepted, why = _REFUSED[name]
            if value not in accepted:
                raise SettingsError(f"{name}={shown(value)}: {why}")
        elif name not in _OPTIONS:
            known = sorted([*_OPTIONS, *_REFUSED, "array_metadata_store"])
            raise SettingsError(f"unknown argument {name!r}; expected one of {', '.join(known)}")
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
        "replicas have no folder of their own; leave it out (a checkpoint that Orbax wrote with it is read)",
    ),
}


def is_orbax(value: Any, name: str) -> bool:
    """Returns whether ``value`` is an instance of Orbax's class ``name`` or of a subclass of it."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] == "orbax" for base in type(value).__mro__)


def _fields(given: Any, ours: type, where: str) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(ours)}
    found = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if more := [name for name in found if name not in names and found[name]]:
        raise CheckpointRefused(
            f"{where}: {type(given).__qualname__}.{more[0]} is {found[more[0]]!r}, and is not supported: leave it out"
        )
    return {name: value for name, value in found.items() if name in names}
