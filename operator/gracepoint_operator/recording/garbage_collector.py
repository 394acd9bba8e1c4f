"""Deletes the Preemptions and requests that ``retention`` selects.

One task on the controller's event loop runs every ``PASS_S`` and deletes a limited number, one after the other. A
thread selects them, and ends with the selection. Before a deletion, the task reads the object again. It deletes only
the version that it read. Both replicas do so; the second one finds that the object does not exist. What is not deleted
in one pass is deleted in the next. If a deletion fails, the object is not tried again for ``AGAIN_S``, so that it
delays nothing else. The task ends when it is cancelled.

A request that is over for good gets a label (``LABEL_ENDED_AT``), and is not watched any more. Now and then those with
the label are listed, page by page, and the old ones are deleted. So nothing here is kept for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import re
from collections.abc import Callable, Collection

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.indexes import version_of
from gracepoint_operator.decisions.answers import Due, Key, Limits, due, over
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Pod, parse_time
from gracepoint_operator.logs import about, decided
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import Places, place_of
from gracepoint_operator.model.preemption_record import LABEL_ENDED_AT, PreemptionRecord, RequestRecord
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import Preemption, Replica
from gracepoint_operator.workloads import BY_NAME, WorkloadIdentity

log = logging.getLogger(__name__)

PASS_S = 30.0
AT_MOST = 50
#: An object that could not be deleted is not tried again for this time.
AGAIN_S = 600.0
#: Every so many passes the requests that are over are listed.
REQUESTS_EVERY = 10
#: How many requests get their label, or are deleted, in one pass.
REQUESTS_AT_MOST = 500


#: A time of this century and the next few.
_SECONDS = re.compile(r"[0-9]{10}")


class GarbageCollector:
    """Keeps the number of Preemptions within limits.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        metrics: Counts what was deleted.
        clock: Seconds since the epoch.
        limits: How long, and how many, Preemptions are kept.
        drop: Forgets an object, by its UID and its version.
        namespaces: The namespaces that are watched. Empty: all.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        metrics: Metrics,
        clock: Callable[[], float],
        limits: Limits,
        drop: Callable[[str, int], object],
        namespaces: Collection[str] = (),
    ) -> None:
        self._drop = drop
        self._namespaces = tuple(namespaces)
        self._api = api
        self._cache = cache
        self._metrics = metrics
        self._clock = clock
        self._limits = limits
        self._passes = 0
        self._set_aside: dict[Key, float] = {}  # what could not be deleted -> when it is tried again

    async def look(self) -> None:
        """Runs one pass. To be called every ``PASS_S``."""
        await self.prune()
        await self.retire_requests()
        if self._passes % REQUESTS_EVERY == 0:
            await self.prune_requests()
        self._passes += 1

    async def prune(self) -> None:
        """Runs one pass for Preemptions."""
        cache, now = self._cache, self._clock()
        # In a thread, as it looks at all records, which are immutable. Each is read again before it is deleted.
        found = await asyncio.to_thread(
            due,
            list(cache.preemptions.records.values()),
            list(cache.preemptions.requests.values()),
            frozenset(cache.objects.workloads),
            now,
            self._limits,
        )
        self._set_aside = {key: until for key, until in self._set_aside.items() if until > now}
        deleted = 0
        for item in found:
            if item.key in self._set_aside:
                continue
            try:
                deleted += await self._delete(item)
            except client.KubeError as error:
                self._note_failure(item, error)
                if isinstance(error, client.Unavailable):
                    return  # the next ones would probably fail too, each after a timeout
            except Unreadable:
                continue  # a newer version of the operator wrote it, and will delete it
            if deleted == AT_MOST:
                return

    async def retire_requests(self) -> None:
        """Puts the label on requests that are over for good, so that they are not watched any more."""
        preemptions, now = self._cache.preemptions, self._clock()
        known = (list(preemptions.records.values()), list(preemptions.requests.values()))
        for request in (await asyncio.to_thread(over, *known, now))[:REQUESTS_AT_MOST]:
            try:
                await self._retire(request, now)
            except (client.NotFound, client.Conflict):
                continue  # the watch will bring what became of it
            except client.KubeError as error:
                self._say_failed(request.kind.plural, request.namespace, request.name, error)
                return

    async def _retire(self, request: RequestRecord, now: float) -> None:
        if request.kind is objects.REQUESTS:
            metadata = {"uid": request.uid, "labels": {LABEL_ENDED_AT: str(int(now))}}
            body = await self._api.merge(request.kind, request.namespace, request.name, {"metadata": metadata})
            self._drop(request.uid, version_of(body["metadata"]))
        elif now - request.created_at > self._limits.request_ttl_s:  # made under version 0.2
            body = await self._api.get(request.kind, request.namespace, request.name)
            if body["metadata"]["uid"] == request.uid:
                await self._api.delete(request.kind, body)

    async def prune_requests(self) -> None:
        """Runs one pass for requests that are over for good."""
        deleted = 0
        for namespace in self._namespaces or (None,):
            try:
                deleted += await self._prune_requests_in(namespace, REQUESTS_AT_MOST - deleted)
            except client.NotFound:
                continue  # the definition of requests is not there
            except client.KubeError as error:
                self._say_failed(objects.REQUESTS.plural, namespace or "", "", error)
        if deleted:
            log.info("requests deleted", extra=about(number=deleted))

    async def _prune_requests_in(self, namespace: str | None, at_most: int) -> int:
        """Returns how many were deleted. ``namespace``: None for all."""
        deleted = 0
        pages = self._api.pages(objects.REQUESTS, _ended_request, label_selector=LABEL_ENDED_AT, namespace=namespace)
        async for page in pages:
            for metadata, ended_at in page.items:
                if deleted >= at_most:
                    return deleted
                if self._clock() - ended_at > self._limits.request_ttl_s:
                    with contextlib.suppress(client.NotFound, client.Conflict):
                        await self._api.delete(objects.REQUESTS, {"metadata": metadata})
                        deleted += 1
        return deleted

    def _say_failed(self, kind: str, namespace: str, name: str, error: client.KubeError) -> None:
        log.warning(
            "could not put away requests that are over, it is tried again later",
            extra=about(kind=kind, namespace=namespace, name=name, error=str(error), in_s=PASS_S),
        )

    def _note_failure(self, item: Due, error: client.KubeError) -> None:
        self._set_aside[item.key] = self._clock() + AGAIN_S
        outcome = type(error).__name__
        self._metrics.preemptions_not_deleted.labels(outcome=outcome).inc()
        namespace, name = item.key
        log.warning(
            "could not delete a Preemption, it is tried again later",
            extra=about(preemption=name, namespace=namespace, error=str(error), in_s=AGAIN_S),
        )

    async def _delete(self, item: Due) -> bool:
        """Returns False if it must not be deleted any more, or the other replica deleted it first."""
        namespace, name = item.key
        try:
            body = await self._api.get(objects.PREEMPTIONS, namespace, name)
            if not _has_ended(body) or (item.unless_lives is not None and await self._lives(item.unless_lives)):
                return False
            await self._api.delete(objects.PREEMPTIONS, body)
        except client.NotFound:
            self._cache.preemptions.drop_unmade(item.key)
            return False
        except client.Conflict:
            return False
        self._metrics.preemptions_deleted.labels(reason=item.reason).inc()
        log.info("preemption deleted", extra=decided(preemption=name, namespace=namespace, reason=item.reason))
        return True

    async def _lives(self, workload: WorkloadIdentity) -> bool:
        """Asks the API: a workload that lost its label is not watched any more, and may get it again."""
        kind = BY_NAME[workload.kind].kind
        try:
            body = await self._api.get(kind, workload.namespace, workload.name)
            return bool(body["metadata"]["uid"] == workload.uid)
        except client.NotFound:
            return False


def _ended_request(body: JsonObject) -> tuple[JsonObject, float]:
    """What is needed to delete a request, and since when it is over. Anybody may have changed the label."""
    metadata = body["metadata"]
    created_at = parse_time(metadata["creationTimestamp"]) or 0.0
    label = str(metadata["labels"].get(LABEL_ENDED_AT))
    needed = {name: metadata[name] for name in ("namespace", "name", "uid", "resourceVersion")}
    return needed, float(label) if _SECONDS.fullmatch(label) else created_at


def _has_ended(body: JsonObject) -> bool:
    # A phase that only a newer version knows is read as an end, which may be wrong. That version deletes it.
    return PreemptionRecord.of(body).phase.ended and not Preemption.of(body).unknown


ReceiptKey = tuple[str, str]


# What only this replica knows of its notices: when it told each pod, and which pods acknowledged to it.
#
# It is kept in the form in which it is written, because a gang of thousands of pods has an event for each of them. The
# controller's event loop owns it; there are no locks.


@dataclasses.dataclass
class _Heard:
    """Which pods something has happened to.

    Attributes:
        at: When it happened first, by UID of the pod, in seconds since the epoch.
        first_at: When it happened to the first pod. None if it has not happened.
        last_at: The same for the last pod.
        places: The places of these pods.
    """

    at: dict[str, float] = dataclasses.field(default_factory=dict)
    first_at: float | None = None
    last_at: float | None = None
    places: Places = dataclasses.field(default_factory=Places)

    def add(self, pod: Pod, at: float) -> bool:
        """True if it is the first time for the pod."""
        if pod.uid in self.at:
            return False
        self.at[pod.uid] = at
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)
        self.places.add(place_of(pod))
        return True


@dataclasses.dataclass
class _Receipts:
    """What is known of one preemption."""

    told: _Heard = dataclasses.field(default_factory=_Heard)
    acknowledged: _Heard = dataclasses.field(default_factory=_Heard)


class AcknowledgementLog:
    """By preemption (namespace, name) and pod UID. The first notice and the first acknowledgement count."""

    def __init__(self) -> None:
        self._receipts: dict[ReceiptKey, _Receipts] = {}

    def told(self, key: ReceiptKey, pod: Pod, at: float) -> bool:
        """True if the pod is told for the first time."""
        return self._of(key).told.add(pod, at)

    def acknowledged(self, key: ReceiptKey, pod: Pod, at: float) -> bool:
        """True if the pod acknowledges for the first time."""
        return self._of(key).acknowledged.add(pod, at)

    def told_at(self, key: ReceiptKey, pod_uid: str) -> float | None:
        """When the pod was told first, in seconds since the epoch. None if this replica has not told it."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.told.at.get(pod_uid)

    def replica(self, key: ReceiptKey, name: str) -> Replica:
        """This replica's entry in the Preemption's status."""
        receipts = self._receipts.get(key, _Receipts())
        told, acknowledged = receipts.told, receipts.acknowledged
        return Replica(
            name=name,
            told=len(told.at),
            acknowledged=len(acknowledged.at),
            told_at=_time(told.last_at),
            acknowledged_at=_time(acknowledged.last_at),
            told_pods=told.places.lines(),
            acknowledged_pods=acknowledged.places.lines(),
        )

    def first_acknowledged_at(self, key: ReceiptKey) -> float | None:
        """When the first pod acknowledged, in seconds since the epoch. None if none has."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.acknowledged.first_at

    def forget(self, key: ReceiptKey) -> None:
        self._receipts.pop(key, None)

    def _of(self, key: ReceiptKey) -> _Receipts:
        return self._receipts.setdefault(key, _Receipts())


def _time(at: float | None) -> datetime.datetime | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC)
