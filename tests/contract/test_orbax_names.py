"""The tables about Orbax and JAX name everything that the installed versions export."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest
from jax._src import distributed
from orbax.checkpoint import type_handlers

from gracepoint import checkpoint, multihost
from tests.contract import conformance
from tests.contract.conformance import Name


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


#: What each table is about, as it is documented.
MULTIHOST = (
    "broadcast_one_to_all",
    "get_barrier_sync_fn",
    "is_primary_host",
    "process_index",
    "reached_preemption",
    "sync_global_processes",
)
REFERENCES: dict[str, set[str]] = {
    "orbax-multihost": {*MULTIHOST, "BarrierSyncFn", "key", "timeout_ms"}.union(
        *(arguments(getattr(ocp.multihost, name)) for name in MULTIHOST)
    )
    - {"name", "step"},
    "jax-distributed": arguments(jax.distributed.initialize)
    | set(distributed.State.__annotations__)
    | public(distributed.State)
    | {"initialize", "shutdown", "global_state"},
    "orbax-async-checkpointer": {
        "handler",
        "timeout_secs",
        "primary_host",
        "active_processes",
        "barrier_sync_fn",
        "post_finalization_callback",
        "force",
        "save",
        "restore",
        "check_for_errors",
        "wait_until_finished",
        "close",
    },
    "orbax-array-handlers": arguments(type_handlers.ArrayHandler)
    | arguments(type_handlers.SingleReplicaArrayHandler)
    | public(type_handlers.ArrayHandler) - {"finalize"}
    | fields(ocp.ArrayRestoreArgs)
    | fields(ocp.SaveArgs) - {"aggregate"}
    | {"single_replica_sharding", "memory_size", "await_path_creation", "raise_array_data_missing_error", "ts_context"},
}


@pytest.mark.parametrize("table", REFERENCES)
def test_every_public_name_of_a_reference_is_in_its_table(table: str) -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", conformance.source(table)))))
    assert REFERENCES[table] - named == set()


# conformance/orbax-names.toml: all of Orbax's public API.

#: Modules of other projects, which Orbax's package imports.
FOREIGN = {"contextlib", "functools"}


def listed(section: str = "") -> set[str]:
    """Returns the names that the table has, by their places in Orbax's package."""
    return {
        f"{row.part}.{name}" if row.part else name
        for row in conformance.names()
        for name in row.names
        if row.part.startswith(section)
    }


def lookup(path: str) -> Any:
    found: Any = ocp
    for part in path.split("."):
        found = getattr(found, part)
    return found


def orbax_names() -> list[set[str]]:
    """Returns the public names of Orbax's modules. Names of the same thing are in one set."""
    modules = {"": ocp} | {
        name: getattr(ocp, name) for name in public(ocp) - FOREIGN if inspect.ismodule(getattr(ocp, name))
    }
    things: dict[Any, set[str]] = {}
    for prefix, module in modules.items():
        for name in public(module):
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                if not (thing.__module__ or "").startswith("orbax"):
                    continue
            elif inspect.ismodule(thing) or not (name.isupper() or isinstance(thing, int)):
                continue
            simple = isinstance(thing, str | int)
            things.setdefault((name, thing) if simple else id(thing), set()).add(f"{prefix}.{name}".strip("."))
    return list(things.values())


def test_every_public_name_of_orbax_is_in_the_table() -> None:
    names = listed()
    whole = tuple(name.removesuffix("*") for name in names if name.endswith(".*"))
    missing = [
        aliases for aliases in orbax_names() if not aliases & names and not all(a.startswith(whole) for a in aliases)
    ]
    assert missing == [], "list these names in conformance/orbax-names.toml"
    assert len(orbax_names()) > 200


def test_every_name_in_the_table_is_one_of_orbax() -> None:
    for row in conformance.names():
        if row.part == "" or inspect.ismodule(lookup(row.part)):
            for name in row.names:
                lookup(f"{row.part}.{name}".strip(".").removesuffix(".*"))


#: Classes whose arguments and members the table lists, by section.
CLASSES: dict[str, tuple[Any, ...]] = {
    "CheckpointManager": (ocp.CheckpointManager,),
    "CheckpointManagerOptions": (ocp.CheckpointManagerOptions,),
    "AsyncCheckpointer": (ocp.AsyncCheckpointer, ocp.Checkpointer, ocp.StandardCheckpointer),
    "AsyncOptions": (ocp.AsyncOptions,),
    "options.MultiprocessingOptions": (ocp.options.MultiprocessingOptions,),
    "PyTreeCheckpointHandler": (ocp.PyTreeCheckpointHandler,),
    "StandardCheckpointHandler": (ocp.StandardCheckpointHandler,),
    "args.PyTreeSave": (ocp.args.PyTreeSave, ocp.args.StandardSave),
    "args.PyTreeRestore": (ocp.args.PyTreeRestore,),
    "args.StandardRestore": (ocp.args.StandardRestore,),
    "type_handlers.NumpyHandler": (type_handlers.NumpyHandler, type_handlers.ScalarHandler),
    "type_handlers.StringHandler": (type_handlers.StringHandler,),
    "type_handlers.ParamInfo": (type_handlers.ParamInfo,),
    "type_handlers.TypeHandlerRegistry": (type_handlers.TypeHandlerRegistry,),
    "SaveArgs": (ocp.SaveArgs,),
    "type_handlers.SingleReplicaArrayRestoreArgs": (type_handlers.SingleReplicaArrayRestoreArgs,),
    "metadata.ArrayMetadata": (ocp.metadata.ArrayMetadata,),
    "metadata.StepMetadata": (ocp.metadata.StepMetadata,),
}
#: Of these only the arguments: their methods are called by Orbax's checkpointers.
ONLY_ARGUMENTS = ("CheckpointHandler", "Options", "args.")


@pytest.mark.parametrize("section", CLASSES)
def test_every_argument_and_member_of_a_class_is_in_the_table(section: str) -> None:
    expected = set().union(*map(arguments, CLASSES[section]))
    if not any(word in section for word in ONLY_ARGUMENTS):
        expected |= set().union(*map(public, CLASSES[section]))
    found = {name for row in conformance.names() if row.part == section for name in row.names}
    assert expected - found == set(), "list these names in conformance/orbax-names.toml"
    assert found - expected == set(), "Orbax does not have these names"


def of_class(kind: Any, *methods: str) -> set[str]:
    """Returns the names of a class's arguments and members, and of the arguments of some methods."""
    return arguments(kind) | public(kind) | set().union(*(arguments(getattr(kind, method)) for method in methods))


#: What can be meant here by a name in a section. In the others: the public names of the packages.
HERE: dict[str, set[str]] = {
    "CheckpointManager": of_class(checkpoint.CheckpointManager),
    "AsyncCheckpointer": of_class(checkpoint.AsyncCheckpointer),
    "AsyncOptions": of_class(checkpoint.AsyncCheckpointer),
    "options.MultiprocessingOptions": of_class(checkpoint.AsyncCheckpointer),
    "PyTreeCheckpointHandler": fields(checkpoint.WriteOptions),
    "args.PyTreeSave": of_class(checkpoint.AsyncCheckpointer, "save"),
    "args.PyTreeRestore": of_class(checkpoint.AsyncCheckpointer, "restore"),
    "type_handlers.ParamInfo": of_class(checkpoint.ParamInfo),
    "type_handlers.TypeHandlerRegistry": of_class(checkpoint.HandlerRegistry),
    "SaveArgs": fields(checkpoint.SaveArgs),
    "type_handlers.SingleReplicaArrayRestoreArgs": fields(checkpoint.SingleReplicaArrayRestoreArgs),
    "metadata.ArrayMetadata": fields(checkpoint.LeafMetadata),
    "metadata.StepMetadata": fields(checkpoint.TreeMetadata),
}
PACKAGES = {*checkpoint.__all__, *multihost.__all__}


@pytest.mark.parametrize("row", conformance.names(), ids=lambda row: f"{row.part}: {row.names[0]}")
def test_every_row_names_a_replacement_or_gives_a_reason(row: Name) -> None:
    assert row.status in conformance.STATUSES
    assert row.here or row.tests
    if row.status == "same":
        here = HERE.get(row.part, PACKAGES)
        assert {name.rpartition(".")[2] for name in row.names} - here == set()
    if row.status in ("same", "other name"):
        assert row.tests, "name a test"
    if row.status == "other name":
        ours = re.findall(r"`([\w.]+)(?:\(\w*\)[\w.]*)?`", row.here)
        assert ours, "say the name"
        for name in ours:
            assert exists_here(name), name


def exists_here(name: str) -> bool:
    """Returns whether a name, with dots or without, is public here, or an argument of a checkpointer."""
    first, _, rest = name.removeprefix("multihost.").partition(".")
    if first not in PACKAGES:
        kinds = (checkpoint.CheckpointManager, checkpoint.AsyncCheckpointer)
        return any(first in of_class(kind, "save", "restore") for kind in kinds)
    thing = getattr(checkpoint, first, None) or getattr(multihost, first)
    return not rest or rest in public(thing) | (fields(thing) if dataclasses.is_dataclass(thing) else set())
