"""Since when signs are there, beyond the life of one process.

Of a label, an annotation, a field or most taints the API tells no time, only when its owner last wrote anything of the
object. So an operator that is started anew cannot know by itself whether such a sign was there before a pod was bound,
which is no disruption, or came after it. What the replicas have seen is therefore kept in a ConfigMap, one entry for
each such sign that concerns a pod: a digest of what it is, and since when, in seconds since the epoch.

Runs on the core's event loop: ``recall`` once before the cluster is listed, then tasks of a scribe. A replica writes
the entries that it comes to know and takes away those that it knew, and touches no others: so two replicas need not
agree on when. What was written before it began, and is not there when it has listed the cluster, it takes away as well.
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
    """See the module.

    Args:
        api: The API server.
        world: What is known; is told what was seen before.
        place: Namespace and name of the ConfigMap; None: nothing is kept.
        metrics: Counts failures.
        interval_s: Pause between two writes.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, place: Key | None, metrics: Metrics, interval_s: float
    ) -> None:
        self._api = api
        self._cache = cache
        self._place = place
        self._kept: set[str] = set()  # what this replica has read or written there
        self._write_queue = WriteQueue("sightings", self._write, metrics, interval_s)

    async def recall(self) -> None:
        """Tells the world what was seen before.

        Raises:
            kube.KubeError: The API server cannot be asked just now.
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

    def touch(self) -> None:
        """Something may have come or gone."""
        if self._place is not None:
            self._write_queue.touch(self._place)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, place: Key) -> None:
        wanted = {digest(mark): since_at for mark, since_at in self._cache.untold_since().items()}
        changes: dict[str, str | None] = {key: f"{wanted[key]:.3f}" for key in wanted.keys() - self._kept}
        changes |= dict.fromkeys(self._kept - wanted.keys())
        if not changes:
            return
        try:
            await self._api.merge(kinds.CONFIG_MAPS, *place, {"data": changes})
        except client.NotFound:
            self._kept = set()  # all of it, once it is there again
            raise
        self._kept = set(wanted)


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
