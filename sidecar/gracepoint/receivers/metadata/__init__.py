"""What the cloud itself tells this machine of its end, watched from inside the pod.

The operator sees most of it earlier and for all pods at once; this is for when the operator is down, and for what
reaches no Kubernetes object at all. Off unless ``GRACEPOINT_METADATA`` names a cloud.

Threads, all daemons, all ended by ``MetadataWatchers.close``:

* "gracepoint-metadata", only with ``auto``: finds out which cloud this is, starts what watches it, and ends.
* "gracepoint-metadata-<cloud>-<what>": one ``Watcher`` each. Google's server answers when something changes, so
  each of its keys has a thread that is parked in a request; AWS and Azure are polled by one thread each.

A watcher owns its HTTP client, its sources and their boards: nothing is shared but the mailbox, which is
thread-safe. Nothing here can make training wait or fail: what goes wrong is logged once and tried again.

What a source sees in one look is the whole truth of that moment (``Look``); its ``Board`` compares it with what was
there before, and posts, moves or retracts accordingly. A look that failed says nothing, and changes nothing.
"""

from gracepoint.receivers.metadata.watchers import MetadataWatchers

__all__ = ["MetadataWatchers"]
