"""Keeps the times at which marks were first seen in a ConfigMap, beyond the life of one process.

The API does not say when a label, an annotation, a field or most taints were set. It only says when their owner last
changed anything on the object. So an operator that starts again cannot know whether such a mark was there before a pod
was bound, which is no disruption, or came later. Therefore the replicas keep what they have seen in a ConfigMap: one
entry for each such mark that concerns a pod, with a digest of the mark and the time in seconds since the epoch.

``recall`` reads it once, before the cluster is listed. A replica writes the entries that it adds, removes those that it
knew, and touches no others, so two replicas need not agree on a time. When it has listed the cluster, it also removes
old entries whose marks no longer exist. All writes are tasks of a write queue on the controller's event loop.

A job that is made again has no pods for some seconds. So the entry of a mark that still exists, but concerns no pod any
more, is kept for ``GRACE_S``. An operator that is killed meanwhile then still knows that the mark is older than the new
pods. So the ConfigMap has at most the marks that concerned a pod in that time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Set

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.indexes import digest
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics

logger = logging.getLogger(__name__)

#: How long an entry is kept after the last pod that its mark concerned is gone, in seconds.
GRACE_S = 60.0
#: The times in the ConfigMap have three decimals.
_ROUNDED_S = 0.001


class FirstSeenWriter:
    """Writes the ConfigMap.

    Args:
        api: The API server.
        cache: What is known of the cluster. Gets the times from the ConfigMap.
        place: Namespace and name of the ConfigMap. None: nothing is kept.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        interval_s: Seconds between two writes.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        place: Key | None,
        metrics: Metrics,
        clock: Callable[[], float],
        interval_s: float,
    ) -> None:
        self._api = api
        self._cache = cache
        self._place = place
        self._clock = clock
        self._kept: dict[str, float] = {}  # the entries that this replica has read or written
        self._alone_since: dict[str, float] = {}  # entry -> since when its mark concerns no pod
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
            body = await self._api.get(objects.CONFIG_MAPS, *self._place)
        except (client.NotFound, client.Refused) as error:
            logger.error("the times at which signs were first seen are not kept", extra=about(error=str(error)))
            return
        texts = body.get("data") or {}
        times = {key: at for key, text in texts.items() if (at := _seconds(text)) is not None}
        self._kept = dict.fromkeys(texts, -math.inf) | times  # what cannot be read is written again
        self._cache.first_seen.recall(times)

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
        marks = {digest(mark): since_at for mark, since_at in self._cache.undated_since().items()}
        # A mark that went away and came again is another one. Its entry still has the time of the earlier one.
        changes: dict[str, str | None] = {
            key: f"{at:.3f}" for key, at in marks.items() if key not in self._kept or _is_later(at, self._kept[key])
        }
        alone = self._kept.keys() - marks.keys() if self._complete else set()
        gone = alone - self._in_grace(alone)
        changes |= dict.fromkeys(gone)
        if not changes:
            return
        try:
            await self._api.merge(objects.CONFIG_MAPS, *place, {"data": changes})
        except client.NotFound:
            self._kept = {}  # write everything once the ConfigMap exists again
            raise
        self._kept = {key: at for key, at in self._kept.items() if key not in gone} | {
            key: marks[key] for key in marks.keys() & changes.keys()
        }

    def _in_grace(self, alone: Set[str]) -> set[str]:
        """Returns those of the entries that are kept although their marks concern no pod."""
        if not alone:
            self._alone_since = {}
            return set()
        now = self._clock()
        there = {digest(mark): at for mark, at in self._cache.undated_since(of_pods=False).items()}
        still = {key for key in alone & there.keys() if not _is_later(there[key], self._kept[key])}
        self._alone_since = {key: self._alone_since.get(key, now) for key in still}
        return {key for key, since_at in self._alone_since.items() if now - since_at < GRACE_S}


def _is_later(at: float, kept: float) -> bool:
    return at > kept + _ROUNDED_S


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
