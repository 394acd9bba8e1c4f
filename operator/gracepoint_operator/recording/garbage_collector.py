"""Deletes Preemptions and requests that are over: which ones, and how.

Records that have ended are kept for some time, and only a limited number for one workload name. Preemptions that are
in progress are kept, and those that the operator still needs:

* for each workload that exists, the record with the highest number, from which the next number follows, and the highest
  one that was no rehearsal, which says to which signals the gang has answered;
* those that ended recently: the gang may still report, or the exit breaker of the policy counts them;
* a record whose request does not have its final status yet.

A request that is over is kept for a shorter time: its record says how it ended.

One task on the controller's event loop runs every ``PASS_S`` and deletes a limited number, one after the other. A
thread selects them, and ends with the selection. Before a deletion, the task reads the object again. It deletes only
the version that it read. Both replicas do so; the second one finds that the object does not exist. What is not deleted
in one pass is deleted in the next. If a deletion fails, the object is not tried again for ``AGAIN_S``, so that it
delays nothing else. The task ends when it is cancelled.

A request that is over gets a label (``LABEL_ENDED_AT``), and is not watched any more. Now and then those with
the label are listed, page by page, and the old ones are deleted. So nothing here is kept for them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from enum import StrEnum
from typing import TypeVar

from gracepoint.wire.messages import Phase
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.indexes import version_of
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import parse_time
from gracepoint_operator.logs import about, decided
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import LABEL_ENDED_AT, PreemptionRecord, RequestRecord
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import Preemption, RequestPhase
from gracepoint_operator.workloads import BY_NAME, WorkloadIdentity

logger = logging.getLogger(__name__)

#: Preemptions that ended less than this number of seconds ago are kept, whatever the limits are.
SHORTEST_S = 3600.0

Key = tuple[str, str]
_T = TypeVar("_T")
_ByName = dict[Key, list[tuple[float, _T]]]  # by namespace and name of the workload, each with when it ended


class DeletionReason(StrEnum):
    """Why a Preemption is deleted: a label of the metric."""

    AGE = "age"
    COUNT = "count"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How many Preemptions are kept, and for how long.

    Attributes:
        ttl_s: Seconds after the end for which a Preemption is kept.
        history: Number of ended records that are kept for one workload name.
        request_ttl_s: Seconds after the end for which a request is kept.
    """

    ttl_s: float = 30 * 86_400.0
    history: int = 50
    request_ttl_s: float = 3600.0


@dataclasses.dataclass(frozen=True)
class Due:
    """A Preemption to delete.

    Attributes:
        unless_lives: Delete only if this workload does not exist any more. None: delete in any case.
    """

    key: Key
    reason: DeletionReason
    unless_lives: WorkloadIdentity | None = None


def due_for_deletion(
    preemptions: Iterable[PreemptionRecord],
    requests: Iterable[RequestRecord],
    living: Container[str],
    now: float,
    limits: Limits,
) -> list[Due]:
    """Returns the Preemptions to delete, for one workload name oldest first.

    Args:
        preemptions: All known records.
        requests: All known requests.
        living: UIDs of the workloads that are known to exist.
        now: Seconds since the epoch.
        limits: How many are kept, and for how long.
    """
    preemptions = list(preemptions)
    beyond = list(_beyond(preemptions, now, limits))
    if not beyond:
        return []
    uids = {preemption.spec.workload.uid for preemption, _ in beyond}
    decisive = _decisive(preemption for preemption in preemptions if preemption.spec.workload.uid in uids)
    by_uid = {request.uid: request for request in requests}
    deletable: list[Due] = []
    for preemption, reason in beyond:
        its_requests = [by_uid[reference.uid] for reference in preemption.spec.requests if reference.uid in by_uid]
        workload = preemption.spec.workload
        is_decisive = preemption.key in decisive
        if not all(request.has_ended for request in its_requests) or (is_decisive and workload.uid in living):
            continue
        deletable.append(Due(preemption.key, reason, preemption.workload if is_decisive else None))
    return deletable


def final_requests(
    preemptions: Iterable[PreemptionRecord], requests: Iterable[RequestRecord], now: float
) -> list[RequestRecord]:
    """Returns the requests whose status will not change any more.

    Args:
        preemptions: All known records.
        requests: All known requests.
        now: Seconds since the epoch.
    """
    ended = [item for item in requests if item.has_ended]
    if not ended:
        return []
    asked_by = {reference.uid: preemption for preemption in preemptions for reference in preemption.spec.requests}
    return [item for item in ended if _stays_ended(item, asked_by.get(item.uid), now)]


def _stays_ended(request: RequestRecord, preemption: PreemptionRecord | None, now: float) -> bool:
    """A record that has Expired or is Evacuated may be Committed later, and one may name a Superseded request."""
    if preemption is None:
        return True
    if preemption.ended_at is None:
        return False
    same = RequestPhase(preemption.phase) is request.status.phase
    is_last = same and preemption.phase not in (Phase.EXPIRED, Phase.EVACUATED)
    return is_last or now - preemption.ended_at > SHORTEST_S


def _decisive(preemptions: Iterable[PreemptionRecord]) -> set[Key]:
    """For each workload, the keys of its highest record and of its highest record that was no rehearsal."""
    highest: dict[tuple[str, str, bool], PreemptionRecord] = {}
    for preemption in sorted(preemptions, key=lambda preemption: preemption.spec.epoch):
        highest[preemption.namespace, preemption.spec.workload.uid, False] = preemption
        if not preemption.is_rehearsal:
            highest[preemption.namespace, preemption.spec.workload.uid, True] = preemption
    return {preemption.key for preemption in highest.values()}


def _beyond(
    preemptions: Iterable[PreemptionRecord], now: float, limits: Limits
) -> Iterator[tuple[PreemptionRecord, DeletionReason]]:
    """Yields the records that are older than the limit, or beyond the number to keep, oldest first."""
    by_name: _ByName[PreemptionRecord] = collections.defaultdict(list)
    for preemption in preemptions:
        if (ended_at := preemption.ended_at) is not None:
            by_name[preemption.namespace, preemption.spec.workload.name].append((ended_at, preemption))
    for age_s, preemption, reason in _overdue(by_name, now, limits):
        if age_s > preemption.spec.policy.spec.exit_breaker.within_seconds:
            yield preemption, reason


def _overdue(by_name: _ByName[_T], now: float, limits: Limits) -> Iterator[tuple[float, _T, DeletionReason]]:
    """Yields the items beyond the limits with their age in seconds, for each workload name oldest first."""
    for of_name in by_name.values():
        of_name.sort(key=lambda item: item[0])
        for place, (at, item) in enumerate(of_name):
            reason = _reason(now - at, len(of_name) - place, limits)
            if reason is not None:
                yield now - at, item, reason


def _reason(age_s: float, place: int, limits: Limits) -> DeletionReason | None:
    """``place``: counted from the newest, which is 1."""
    if age_s <= SHORTEST_S:
        return None
    if age_s > limits.ttl_s:
        return DeletionReason.AGE
    return DeletionReason.COUNT if place > limits.history else None


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
        deletable = await asyncio.to_thread(
            due_for_deletion,
            list(cache.preemptions.records.values()),
            list(cache.preemptions.requests.values()),
            frozenset(cache.objects.workloads),
            now,
            self._limits,
        )
        self._set_aside = {key: until for key, until in self._set_aside.items() if until > now}
        deleted = 0
        for item in deletable:
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
        """Puts the label on requests that are over, so that they are not watched any more."""
        preemptions, now = self._cache.preemptions, self._clock()
        records_and_requests = (list(preemptions.records.values()), list(preemptions.requests.values()))
        for request in (await asyncio.to_thread(final_requests, *records_and_requests, now))[:REQUESTS_AT_MOST]:
            try:
                await self._retire(request, now)
            except (client.NotFound, client.Conflict):
                continue  # the watch will bring what became of it
            except client.KubeError as error:
                self._log_failure(request.kind.plural, request.namespace, request.name, error)
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
        """Runs one pass for requests that are over."""
        deleted = 0
        for namespace in self._namespaces or (None,):
            try:
                deleted += await self._prune_requests_in(namespace, REQUESTS_AT_MOST - deleted)
            except client.NotFound:
                continue  # the definition of requests is not there
            except client.KubeError as error:
                self._log_failure(objects.REQUESTS.plural, namespace or "", "", error)
        if deleted:
            logger.info("requests deleted", extra=about(number=deleted))

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

    def _log_failure(self, kind: str, namespace: str, name: str, error: client.KubeError) -> None:
        logger.warning(
            "cannot delete requests that are over, trying again later",
            extra=about(kind=kind, namespace=namespace, name=name, error=str(error), in_s=PASS_S),
        )

    def _note_failure(self, item: Due, error: client.KubeError) -> None:
        self._set_aside[item.key] = self._clock() + AGAIN_S
        outcome = type(error).__name__
        self._metrics.preemptions_not_deleted.labels(outcome=outcome).inc()
        namespace, name = item.key
        logger.warning(
            "cannot delete a Preemption, trying again later",
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
        logger.info("preemption deleted", extra=decided(preemption=name, namespace=namespace, reason=item.reason))
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
