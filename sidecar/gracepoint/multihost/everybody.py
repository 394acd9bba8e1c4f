"""All JAX processes as a process group, without a session: for the utilities, which any training code may call.

State: one process group for the coordination service of which this process is a client, with the keys of calls that
name none. Any thread makes it on first use, and again for another cluster.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

from gracepoint.errors import NoCluster
from gracepoint.multihost.barriers import StoreGang
from gracepoint.multihost.keys import BarrierKeys
from gracepoint.multihost.state import global_state
from gracepoint.multihost.store import JaxStore, KeyValueStore
from gracepoint.wire.names import Env


@dataclasses.dataclass(frozen=True)
class Everybody:
    """All processes of JAX's cluster."""

    client: Any
    gang: StoreGang
    store: KeyValueStore
    keys: BarrierKeys


_lock = threading.Lock()
_last: Everybody | None = None


def everybody() -> Everybody:
    """All processes of the cluster that this one belongs to now. Initialises JAX's backend.

    Raises:
        NoCluster: There is no cluster.
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
            # The service, and so its store, belongs to one attempt; the names of job and attempt are for readers of
            # the keys.
            keys = BarrierKeys(os.environ.get(Env.JOBSET_UID) or "local", os.environ.get(Env.RESTART_ATTEMPT) or 0)
            _last = Everybody(client, StoreGang(store, index, count), store, keys)
        return _last
