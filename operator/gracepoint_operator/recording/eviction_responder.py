"""Answers Evictions of lifecycle.k8s.io: that a gang saves, and when its pods may go.

Runs as tasks of a write queue on the controller's event loop. ``respond`` is called after each decision. Each write
computes the answer from what is known at that moment, so both replicas write the same. The fields are applied to the
operator's own entry of the Eviction's status; those of others are not touched.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import eviction_answers
from gracepoint_operator.decisions.eviction_answers import HEARTBEAT_S, EvictionAnswer
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.model.eviction_requests import RESPONDER, EvictionAsked
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.observability.metrics import Metrics

_MANAGER = "gracepoint-eviction-responder"


class EvictionResponder:
    """Keeps the operator's entries in the Evictions up to date.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        interval_s: Seconds between two writes of one Eviction.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, metrics: Metrics, clock: Callable[[], float], interval_s: float
    ) -> None:
        self._api = api
        self._cache = cache
        self._clock = clock
        self._written: dict[str, tuple[EvictionAnswer, float]] = {}  # by UID: what was written, and when
        self._write_queue = WriteQueue("eviction", self._write, metrics, interval_s)

    def respond(self, gang: GangSnapshot) -> float | None:
        """Answers the Evictions of a gang's pods soon. Returns when to call again even if nothing changes."""
        if not gang.evictions:
            return None
        now = self._clock()
        for asked in gang.evictions.values():
            found = eviction_answers.answer(gang, asked, now)
            if found is not None and self._is_news(asked, found, now):
                self._write_queue.touch(asked.key, urgent=found.done)
        return eviction_answers.next_at(gang, now)

    def forget(self, uid: str) -> None:
        """Forgets an Eviction that was deleted."""
        self._written.pop(uid, None)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    def _is_news(self, asked: EvictionAsked, found: EvictionAnswer, now: float) -> bool:
        before, at = self._written.get(asked.uid, (None, 0.0))
        same = before is not None and (before.done, before.until_at) == (found.done, found.until_at)
        return not same or now - at >= HEARTBEAT_S

    async def _write(self, key: Key) -> None:
        asked, found = self._answer(key)
        if asked is None or found is None:
            return
        now = self._clock()
        # The API server refuses times that go back, by whichever clock: that of Kubernetes, of the other replica, ours.
        at = max([now, *(time for time in (asked.started_at, asked.heartbeat_at) if time is not None)])
        entry: JsonObject = {"name": RESPONDER, "heartbeatTime": _stamp(at), "message": found.message}
        if found.done:
            entry["completionTime"] = _stamp(at)
        elif found.until_at is not None:
            entry["expectedCompletionTime"] = _stamp(max(found.until_at, at))
        body = {
            "apiVersion": kinds.EVICTIONS.api_version,
            "kind": "Eviction",
            "metadata": {"name": asked.name, "namespace": asked.namespace},
            "status": {"responders": [entry]},
        }
        try:
            await self._api.apply_status(kinds.EVICTIONS, *key, body, manager=_MANAGER)
        except client.NotFound:
            return
        except client.Refused:
            if await self._is_over(key, asked):
                return
            raise
        newest = self._cache.evictions.named(key)
        if newest is not None and newest.uid == asked.uid:  # or it was deleted in the meantime, and is forgotten
            self._written[asked.uid] = (found, now)

    def _answer(self, key: Key) -> tuple[EvictionAsked | None, EvictionAnswer | None]:
        asked = self._cache.evictions.named(key)
        pod = None if asked is None else self._cache.objects.pods.get(asked.pod_uid)
        if asked is None or pod is None:
            return None, None
        return asked, eviction_answers.answer(self._cache.gang(pod.workload_uid), asked, self._clock())

    async def _is_over(self, key: Key, asked: EvictionAsked) -> bool:
        """Returns whether the operator's turn is over, so that nothing more may be written. Reads the Eviction."""
        try:
            body = await self._api.get(kinds.EVICTIONS, *key)
        except client.NotFound:
            return True
        self._cache.put(kinds.EVICTIONS, body, listed=True, fresh=True)
        newest = self._cache.evictions.named(key)
        return newest is None or newest.uid != asked.uid or not newest.active


def _stamp(at: float) -> str:
    return datetime.datetime.fromtimestamp(int(at), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
