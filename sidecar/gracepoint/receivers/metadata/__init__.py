"""Watches the cloud's metadata server, from inside the pod, for notices that this machine is going to end.

The operator sees most of these notices earlier, and for all pods at once. This package is for the time when the
operator is down, and for notices that appear on no Kubernetes object. It is off unless ``GRACEPOINT_METADATA`` names a
cloud.

Threads, all daemons, all ended by ``MetadataWatchers.close``:

* "gracepoint-metadata", only with ``auto``: finds out which cloud this is, starts the watchers of that cloud, and ends.
* "gracepoint-metadata-<cloud>-<what>": one for each ``Watcher``. Google's server answers when something changes, so
  each of its keys has a thread that blocks in a request. AWS and Azure are polled by one thread each.

A watcher owns its HTTP client, its sources and their boards. Watchers share only the mailbox, which is thread-safe.
Nothing here can make training wait or fail. An error is logged once, and the request is tried again.

One look at a source returns all events of that moment (``Look``). The source's ``Board`` compares them with the events
of the look before, and posts, moves or retracts notices. A look that failed changes nothing.
"""

from gracepoint.receivers.metadata.watchers import MetadataWatchers

__all__ = ["MetadataWatchers"]
