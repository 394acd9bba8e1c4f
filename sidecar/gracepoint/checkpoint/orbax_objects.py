"""Orbax's own objects, where code that was written for Orbax hands them over: taken as ours, or refused in words.

Orbax is not imported: a class is known by its name and its package. An object that Orbax's classes have and ours lack
is refused by its name, never ignored.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

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
    """Returns ``given`` as ours.

    Raises:
        CheckpointRefused: It is neither ours nor Orbax's, or asks for what is not there.
    """
    if isinstance(given, RestoreArgs):
        return given
    for ours in _RESTORE_ARGS:
        if _is_orbax(given, ours.__name__):
            return ours(**_fields(given, ours, where))
    raise CheckpointRefused(f"{where}: expected RestoreArgs, found a {type(given).__qualname__}")


def save_args_of(given: Any, where: str) -> SaveArgs:
    """Returns ``given`` as ours.

    Raises:
        CheckpointRefused: It is neither ours nor Orbax's, or asks for what is not there.
    """
    if isinstance(given, SaveArgs):
        return given
    if _is_orbax(given, SaveArgs.__name__):
        return SaveArgs(**_fields(given, SaveArgs, where))
    raise CheckpointRefused(f"{where} is {given!r}; expected a SaveArgs")


def priority_of(answer: Any, name: str) -> TransferPriority:
    """Returns what ``key_priority`` answered for leaf ``name``, as ours.

    Raises:
        CheckpointRefused: It says nothing: None, or Orbax's ``UNKNOWN``.
    """
    if isinstance(answer, TransferPriority):
        return answer
    if isinstance(answer, enum.Enum) and answer.name in TransferPriority.__members__:
        return TransferPriority[answer.name]
    raise CheckpointRefused(
        f"leaf {name!r}: key_priority answered {answer!r}; expected one of {', '.join(TransferPriority.__members__)}"
    )


def sharding_of(given: Any, where: str) -> Any:
    """Returns ``given``, and Orbax's ``ShardingMetadata`` as the sharding that it stands for.

    Raises:
        CheckpointRefused: Its devices are not here.
    """
    if not _is_orbax(given, "ShardingMetadata"):
        return given
    try:
        found = given.to_jax_sharding()
    except Exception as error:
        raise CheckpointRefused(f"{where}: {given} is no sharding over the devices that are here: {error}") from error
    if found is None:
        raise CheckpointRefused(f"{where}: {given} is no sharding over the devices that are here: give another one")
    return found


def write_options(options: WriteOptions | None, given: dict[str, Any]) -> WriteOptions | None:
    """Returns ``options`` changed as the arguments of Orbax's ``ArrayHandler`` say.

    Args:
        options: None: the defaults.
        given: Those arguments by Orbax's names; None and Orbax's defaults change nothing.

    Raises:
        SettingsError: One is unknown, or asks for what is not there.
    """
    if options is not None and not isinstance(options, WriteOptions):
        raise SettingsError(f"options: expected WriteOptions, found {options!r} (metadata_key is a keyword)")
    changed = {}
    for name, value in given.items():
        if name in _REFUSED:
            accepted, why = _REFUSED[name]
            if value not in accepted:
                raise SettingsError(f"{name}={value!r}: {why}")
        elif name not in _OPTIONS:
            raise SettingsError(f"unknown argument {name!r}; expected one of {', '.join(sorted(_OPTIONS | _REFUSED))}")
        elif value is not None:
            changed[_OPTIONS[name]] = value
    return dataclasses.replace(options or WriteOptions(), **changed) if changed else options


_OPTIONS = {
    "use_replica_parallel": "replica_parallel",
    "min_slice_bytes_for_replica_parallel": "min_slice_bytes",
    "max_replicas_for_replica_parallel": "max_replicas",
    "enable_write_sharding_file": "store_sharding",
    "callback": "callback",
}
# Each with the values that ask for what is done anyway.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "replica_id": (
        (None, 0),
        "which replica writes is worked out from the shardings, so that each process writes as little as possible; "
        "leave it out",
    ),
    "array_metadata_store": ((None,), "array_metadatas is always written, in Orbax's form; leave it out"),
    "enable_replica_parallel_separate_folder": ((None, False), "replicas have no folder of their own; leave it out"),
}


def _is_orbax(value: Any, name: str) -> bool:
    """True if ``value`` is of Orbax's class ``name``, or of one derived from it."""
    return any(base.__name__ == name and base.__module__.partition(".")[0] == "orbax" for base in type(value).__mro__)


def _fields(given: Any, ours: type, where: str) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(ours)}
    found = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if more := [name for name in found if name not in names and found[name]]:
        raise CheckpointRefused(
            f"{where}: {type(given).__qualname__}.{more[0]} is {found[more[0]]!r}, and is not supported: leave it out"
        )
    return {name: value for name, value in found.items() if name in names}
