"""Multi-process utilities: joining the JAX cluster, barriers, and the agreement on a sync point.

Importing this package does not load JAX. Its functions load JAX when they are called.
"""

from gracepoint.multihost.agreement import Agreement, Observer
from gracepoint.multihost.barriers import StoreProcessGroup
from gracepoint.multihost.distributed import State, global_state, initialize, shutdown
from gracepoint.multihost.membership import Meeting, ProcessNames, join, meet, raise_jax_notice
from gracepoint.multihost.store import (
    BarrierKeys,
    InMemoryStore,
    JaxStore,
    KeyExists,
    KeyTimeout,
    KeyValueStore,
    StoreUnavailable,
)
from gracepoint.multihost.utilities import (
    BarrierSyncFn,
    broadcast_one_to_all,
    failing_together,
    get_barrier_sync_fn,
    is_primary_host,
    process_count,
    process_index,
    reached_preemption,
    sync_global_processes,
)

__all__ = [
    "Agreement",
    "BarrierKeys",
    "BarrierSyncFn",
    "InMemoryStore",
    "JaxStore",
    "KeyExists",
    "KeyTimeout",
    "KeyValueStore",
    "Meeting",
    "Observer",
    "ProcessNames",
    "State",
    "StoreProcessGroup",
    "StoreUnavailable",
    "broadcast_one_to_all",
    "failing_together",
    "get_barrier_sync_fn",
    "global_state",
    "initialize",
    "is_primary_host",
    "join",
    "meet",
    "process_count",
    "process_index",
    "raise_jax_notice",
    "reached_preemption",
    "shutdown",
    "sync_global_processes",
]
