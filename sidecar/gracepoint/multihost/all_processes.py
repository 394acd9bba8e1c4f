"""The process group of all JAX processes, without a session. For the utilities, which any training code may call.

The state is one process group for the coordination service that this process has joined, and the keys of calls that
pass no name. The first thread that needs the group makes it. It is made again if the process joins another cluster.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

from gracepoint.errors import NoCluster
from gracepoint.multihost.coordination.barriers import StoreProcessGroup
from gracepoint.multihost.coordination.store import JaxStore
from gracepoint.multihost.joining.distributed_state import global_state
from gracepoint.multihost.keys import BarrierKeys
from gracepoint.wire.names import Env


@dataclasses.dataclass(frozen=True)
class AllProcesses:
    """All processes of the JAX cluster."""

    client: Any
    gang: StoreProcessGroup
    keys: BarrierKeys


_lock = threading.Lock()
_last: AllProcesses | None = None


def joined_cluster() -> AllProcesses:
    """Returns all processes of the cluster that this process belongs to now. Initialises JAX's backend.

    Raises:
        NoCluster: This process has not joined a cluster.
    """
    import jax

    global _last
    index, count = jax.process_index(), jax.process_count()
    with _lock:
        client = global_state.client
        if client is None:
            raise NoCluster("expected a JAX cluster, found none: call gracepoint.multihost.initialize() at the start")
        if _last is None or _last.client is not client:
            store = JaxStore(client, "gracepoint/everybody")
            # The service, and so its store, belongs to one attempt. The job and the attempt are in the keys only for
            # people who read them.
            keys = BarrierKeys(os.environ.get(Env.JOBSET_UID) or "local", os.environ.get(Env.RESTART_ATTEMPT) or 0)
            _last = AllProcesses(client, StoreProcessGroup(store, index, count), keys)
        return _last
