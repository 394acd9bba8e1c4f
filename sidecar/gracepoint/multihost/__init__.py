"""Several processes as one: joining the cluster, meeting at barriers, agreeing on a sync point.

No name here loads JAX before it is called.
"""

from gracepoint.multihost.agreement import Agreement, Observer
from gracepoint.multihost.barriers import StoreGang
from gracepoint.multihost.cluster import Meeting, Member, initialize, meet, raise_jax_notice, shutdown
from gracepoint.multihost.store import (
    InMemoryStore,
    JaxStore,
    KeyExists,
    KeyTimeout,
    KeyValueStore,
    StoreUnavailable,
)

__all__ = [
    "Agreement",
    "InMemoryStore",
    "JaxStore",
    "KeyExists",
    "KeyTimeout",
    "KeyValueStore",
    "Meeting",
    "Member",
    "Observer",
    "StoreGang",
    "StoreUnavailable",
    "initialize",
    "meet",
    "raise_jax_notice",
    "shutdown",
]
