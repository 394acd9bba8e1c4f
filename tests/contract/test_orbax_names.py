"""The pages about Orbax and JAX name everything that the installed versions export."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest
from jax._src import distributed
from orbax.checkpoint import type_handlers

DOCS = Path(__file__).parents[2] / "docs"


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "kwargs"}


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


#: What each page is about, as it is documented.
MULTIHOST = (
    "broadcast_one_to_all",
    "get_barrier_sync_fn",
    "is_primary_host",
    "process_index",
    "reached_preemption",
    "sync_global_processes",
)
REFERENCES: dict[str, set[str]] = {
    "orbax-multihost.md": {*MULTIHOST, "BarrierSyncFn", "key", "timeout_ms"}.union(
        *(arguments(getattr(ocp.multihost, name)) for name in MULTIHOST)
    )
    - {"name", "step"},
    "jax-distributed.md": arguments(jax.distributed.initialize)
    | set(distributed.State.__annotations__)
    | public(distributed.State)
    | {"initialize", "shutdown", "global_state"},
    "orbax-async-checkpointer.md": {
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
    "orbax-array-handlers.md": arguments(type_handlers.ArrayHandler)
    | arguments(type_handlers.SingleReplicaArrayHandler)
    | public(type_handlers.ArrayHandler) - {"finalize"}
    | fields(ocp.ArrayRestoreArgs)
    | fields(ocp.SaveArgs) - {"aggregate"}
    | {"single_replica_sharding", "memory_size", "await_path_creation", "raise_array_data_missing_error", "ts_context"},
}


@pytest.mark.parametrize("page", REFERENCES)
def test_every_public_name_of_a_reference_is_on_its_page(page: str) -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", (DOCS / page).read_text(encoding="utf-8")))))
    assert REFERENCES[page] - named == set()
