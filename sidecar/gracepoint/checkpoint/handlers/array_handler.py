"""The type handler of ``jax.Array``, and the registry of all handlers that Gracepoint has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint.format import layout, orbax_metadata, pytree
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ParamInfo
from gracepoint.checkpoint.handlers.call_checks import is_primary
from gracepoint.checkpoint.handlers.numpy_handler import NumpyHandler, ScalarHandler
from gracepoint.checkpoint.handlers.string_handler import StringHandler
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.chunks import WritePlan
from gracepoint.checkpoint.planning.write_plan import make_plan
from gracepoint.errors import CheckpointRefused

#: Event of ``jax.monitoring``, with Orbax's name: an array handler was created.
INIT_EVENT = "/jax/orbax/array_handler/init"


class ArrayHandler(NumpyHandler):
    """Saves and restores ``jax.Array`` leaves over all processes of the job.

    Each process writes the shards that it holds. If several processes hold a shard, they divide it among them. Each
    process also writes ``array_metadatas/process_<N>``, and the primary process ``_sharding``, if the options say so.
    All arrays of a folder must be passed in one call.
    """

    typestr = "jax.Array"

    def __init__(self, options: WriteOptions | None = None, **others: Any) -> None:
        jax.monitoring.record_event(INIT_EVENT)
        super().__init__(options, **others)

    def _check(self, values: Sequence[Any], infos: Sequence[ParamInfo]) -> None:
        for value, info in zip(values, infos, strict=True):
            if not isinstance(value, jax.Array):
                raise CheckpointRefused(f"leaf {info.name!r}: expected a jax.Array, found a {type(value).__qualname__}")
            if jax.process_count() > 1 and value.is_fully_addressable:
                raise CheckpointRefused(
                    f"leaf {info.name!r} is local to this process, one of {jax.process_count()}: make it one array "
                    "over all processes (jax.make_array_from_process_local_data, multihost_utils), or save it as numpy"
                )
        super()._check(values, infos)

    @property
    def _process_count(self) -> int:
        return int(jax.process_count())

    def _plan(self, leaves: Sequence[pytree.Leaf]) -> WritePlan:
        return make_plan(leaves, jax.process_index(), jax.process_count(), max_replicas=self._options.max_replicas)

    def _small_files(self, leaves: Sequence[pytree.Leaf]) -> dict[str, bytes]:
        files = {}
        if self._options.store_array_metadata:
            files[layout.array_metadata(jax.process_index())] = orbax_metadata.array_metadata(leaves)
        if self._options.store_sharding and is_primary(self._primary_host):
            files[layout.SHARDING] = orbax_metadata.sharding(leaves)
        return files


def default_handlers(options: WriteOptions | None = None) -> HandlerRegistry:
    """Returns the handlers of all types of leaves that Gracepoint has a handler for, with the same options."""
    registry = HandlerRegistry()
    registry.add(jax.Array, ArrayHandler(options))
    registry.add(np.ndarray, NumpyHandler(options))
    scalar = ScalarHandler(options)
    for number in (int, float, np.number, np.bool_):
        registry.add(number, scalar)
    registry.add(str, StringHandler())
    return registry
