"""Multi-process utilities: joining the JAX cluster, barriers, and the agreement on a sync point.

Importing this package does not load JAX. Its functions load JAX when they are called.
"""

from gracepoint.multihost.broadcast import broadcast_one_to_all
from gracepoint.multihost.coordination.barriers import StoreProcessGroup
from gracepoint.multihost.coordination.store import (
    InMemoryStore,
    JaxStore,
    KeyExists,
    KeyTimeout,
    KeyValueStore,
    StoreUnavailable,
)
from gracepoint.multihost.joining.cluster import Meeting, join, meet, raise_jax_notice
from gracepoint.multihost.joining.distributed import initialize, shutdown
from gracepoint.multihost.joining.distributed_state import State, global_state
from gracepoint.multihost.joining.members import ProcessNames
from gracepoint.multihost.keys import BarrierKeys
from gracepoint.multihost.sync_point.agreement import Agreement
from gracepoint.multihost.sync_point.timekeeper import Observer
from gracepoint.multihost.utilities import (
    BarrierSyncFn,
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
