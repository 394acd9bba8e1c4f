"""Keeps the times at which marks were first seen, beyond the life of one process.

The API does not tell when a label, an annotation, a field or most taints were set. It only tells when their owner last
changed anything on the object. So an operator that starts again cannot know whether such a mark was there before a pod
was bound, which is no disruption, or came later. Therefore the replicas keep what they have seen in a ConfigMap: one
entry for each such mark that concerns a pod, with a digest of the mark and the time in seconds since the epoch.

Runs on the controller's event loop: ``recall`` once before the cluster is listed, then tasks of a write queue. A
replica writes the entries that it adds, removes those that it knew, and touches no others, so two replicas need not
agree on a time. When it has listed the cluster, it also removes old entries whose marks no longer exist.
"""

from __future__ import annotations

import logging

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.first_seen import digest
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics

log = logging.getLogger(__name__)


class FirstSeenWriter:
    """Writes the ConfigMap.

    Args:
        api: The API server.
        cache: What is known of the cluster. Gets the times from the ConfigMap.
        place: Namespace and name of the ConfigMap. None: nothing is kept.
        metrics: Counts failures.
        interval_s: Seconds between two writes.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, place: Key | None, metrics: Metrics, interval_s: float
    ) -> None:
        self._api = api
        self._cache = cache
        self._place = place
        self._kept: set[str] = set()  # the keys that this replica has read or written
        self._complete = False
        self._write_queue = WriteQueue("first seen", self._write, metrics, interval_s)

    async def recall(self) -> None:
        """Reads the ConfigMap into the cache.

        Raises:
            kube.KubeError: The API server cannot be reached now.
        """
        if self._place is None:
            return
        try:
            body = await self._api.get(kinds.CONFIG_MAPS, *self._place)
        except (client.NotFound, client.Refused) as error:
            log.error("since when signs are there is not kept", extra=about(error=str(error)))
            return
        found = body.get("data") or {}
        self._kept = set(found)
        self._cache.first_seen.recall(
            {digest: at for digest, text in found.items() if (at := _seconds(text)) is not None}
        )

    def touch(self, *, complete: bool) -> None:
        """Writes the ConfigMap soon, because marks may have been added or removed.

        Args:
            complete: True once every kind was listed. Until then no entry is removed, as its mark may be on an object
                of a kind that cannot be listed now.
        """
        self._complete |= complete
        if self._place is not None:
            self._write_queue.touch(self._place)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, place: Key) -> None:
        wanted = {digest(mark): since_at for mark, since_at in self._cache.untold_since().items()}
        changes: dict[str, str | None] = {key: f"{wanted[key]:.3f}" for key in wanted.keys() - self._kept}
        if self._complete:
            changes |= dict.fromkeys(self._kept - wanted.keys())
        if not changes:
            return
        try:
            await self._api.merge(kinds.CONFIG_MAPS, *place, {"data": changes})
        except client.NotFound:
            self._kept = set()  # write everything once the ConfigMap exists again
            raise
        self._kept = set(wanted) if self._complete else self._kept | wanted.keys()


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
