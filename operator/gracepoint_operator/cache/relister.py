"""Lists objects of the API server where a watch is not enough: at start, now and then, and after gaps.

A ``WorkloadRefresh`` reads one workload and the objects around it again, to learn why its pods were deleted or why it
is suspended. A watch shows a past state, and watches of different kinds show different ones. A read that begins after
an event sees whatever caused the event.

The controller, the reconciler, ``health``, the watches and ``channel`` call this. It calls ``cluster_cache`` and
``kube``. The controller's event loop owns everything here and runs the tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Set
from typing import TypeVar

from gracepoint.wire import names
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.indexes import version_of
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient, ListPage
from gracepoint_operator.logs import about
from gracepoint_operator.model.preemption_record import LABEL_ENDED_AT
from gracepoint_operator.workloads import BY_NAME, BY_PLACE, JOB_LABEL, POD_LABEL, WorkloadIdentity

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: The watched kinds, each with the selector of its objects. Preemptions come before what they explain.
SELECTORS: dict[objects.Kind, str | None] = {
    objects.PREEMPTIONS: None,
    objects.REQUESTS: f"!{LABEL_ENDED_AT}",
    objects.NAMESPACES: None,
    objects.CLUSTER_POLICIES: None,
    objects.POLICIES: None,
    **{place: known.selector for place, known in BY_PLACE.items()},
    objects.JOBS: JOB_LABEL,
    objects.NODES: None,
    objects.NODE_CLAIMS: None,
    objects.KUEUE_WORKLOADS: None,
    objects.RESOURCE_SLICES: None,
    objects.DEVICE_TAINT_RULES: None,
    objects.RESOURCE_CLAIMS: None,
    objects.PODS: POD_LABEL,
    objects.SNAPSHOT_SERVERS: names.LABEL_SNAPSHOT_SERVER,
}

#: The kinds that are watched in any case. The others need rights that an administrator may give to the operator.
ALWAYS: Set[objects.Kind] = SELECTORS.keys() - objects.DEVICES - {objects.SNAPSHOT_SERVERS}


#: Kinds that a cluster may not have. A failure of one of them delays nothing else.
OPTIONAL: frozenset[objects.Kind] = objects.DEVICES | {
    objects.NODE_CLAIMS,
    objects.KUEUE_WORKLOADS,
    objects.SNAPSHOT_SERVERS,
}

#: What the operator decides by. If a cluster stops serving one, as when CRDs of another version are installed, that
#: does not mean that its objects are gone.
OWN: frozenset[objects.Kind] = frozenset(
    {objects.PREEMPTIONS, objects.REQUESTS, objects.CLUSTER_POLICIES, objects.POLICIES}
)


#: How long the watch may take to bring what changed during a list.
_EVENTS_COME_S = 5.0


async def _nothing(kind: objects.Kind) -> None:
    """The default of ``begins``."""


@dataclasses.dataclass
class Findings:
    """What sweeps have found and not reported yet.

    If a list fails, what it found before stays here for the next sweep. That sweep cannot find it again: by then the
    versions of these objects are known, so they do not count as changed.

    Attributes:
        affected: UIDs of the workloads to which it matters what was found.
        rewound: True if the API server has gone back to an older state.
    """

    affected: set[str] = dataclasses.field(default_factory=set)
    rewound: bool = False


@dataclasses.dataclass(frozen=True)
class Swept:
    """The result of a sweep.

    Attributes:
        unlisted: The optional kinds that could not be listed, and the own kinds that are not served. Their known
            objects stay.
        changed: The kinds that have to be listed in full, since what is known of them is not the newest state. Empty
            after a full sweep.
        affected: As in ``Findings``.
        rewound: As in ``Findings``.
        whole: True if all kinds that are always watched were wanted.
    """

    unlisted: frozenset[objects.Kind]
    changed: frozenset[objects.Kind]
    affected: frozenset[str]
    rewound: bool
    whole: bool


async def sweep(
    api: KubeClient,
    cache: ClusterCache,
    drop: Callable[[str], Set[str]],
    watches: WatchState,
    kinds: Collection[objects.Kind] = ALWAYS,
    begins: Callable[[objects.Kind], Awaitable[None]] = _nothing,
    *,
    findings: Findings | None = None,
    metadata_only: bool = False,
) -> Swept:
    """Lists kinds into ``cache``. A kind that the cluster does not have yet has no objects, but for those in ``OWN``.

    At start, the first sweep makes the cluster known. Later ones find what was deleted while a watch had lost its
    place, which no watch ever reports. They also find that the API server has gone back to an older state,
    as after etcd was restored from a backup: then known versions are higher than the newest ones.

    Objects are listed page by page and read in the threads of ``KubeClient``, so that whole objects are held for a
    moment only. For the later sweeps the metadata of the objects are enough.

    Args:
        api: The API server.
        cache: Stores what is listed.
        drop: Removes the object with a UID, which no longer exists. Returns the UIDs of the affected workloads.
        watches: Has the version up to which each kind was watched. Notes failures.
        kinds: The kinds to list.
        begins: Awaited before a kind is listed.
        findings: What sweeps that failed have found. This sweep adds what it finds at once. None: nothing was found.
        metadata_only: If True, the sweep only finds what no longer exists, and which kinds have changed.

    Raises:
        kube.KubeError: The API server cannot be asked for a kind that is not optional.
    """
    unlisted: set[objects.Kind] = set()
    changed: set[objects.Kind] = set()
    findings = Findings() if findings is None else findings
    for kind in (kind for kind in SELECTORS if kind in kinds):
        await begins(kind)
        listing = _Listing(api, cache, watches, kind, findings)
        try:
            uids = await (listing.compared() if metadata_only else listing.stored())
        except client.NotFound:
            watches.absent(kind, optional=kind in OPTIONAL)
            if kind in OWN:
                unlisted.add(kind)
                continue
            uids = set()
        except client.KubeError as error:
            if kind not in OPTIONAL:
                raise
            watches.failed(kind, str(error), optional=True)
            unlisted.add(kind)
            continue
        for uid in listing.gone(uids):
            findings.affected |= drop(uid)
        if listing.behind:
            changed.add(kind)
    affected, rewound = frozenset(findings.affected), findings.rewound
    return Swept(frozenset(unlisted), frozenset(changed), affected, rewound, whole=set(kinds) >= ALWAYS)


class _Listing:
    """The list of one kind.

    If only some namespaces are watched, these are listed one after the other. Of one that may not be listed, what is
    known stays, and the others are still listed.

    Attributes:
        before: The versions of the objects that were known when the list began, by UID.
        behind: True if an object was listed in a version that is not known here.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, watches: WatchState, kind: objects.Kind, findings: Findings
    ) -> None:
        self._api = api
        self._cache = cache
        self._watches = watches
        self._kind = kind
        self._findings = findings
        self._seen_version = watches.version(kind)
        self.before = cache.versions_of(kind)
        self._newest = max([self._seen_version, *self.before.values()])
        self._rewound = False  # the list is older than what was known; versions fall only by a restore
        self.behind = False
        self._unlisted: set[str] = set()

    async def stored(self) -> set[str]:
        """Stores all objects, page by page. Returns their UIDs."""
        reader, uids, metadata = self._cache.reader, set(), {}
        async for page in self._pages(lambda body: reader.read(self._kind, body)):
            readings = [reading for reading in page.items if reading is not None]
            self._check(page.metadata, ((reading.uid, reading.version) for reading in readings))
            for reading in readings:
                uids.add(reading.uid)
                is_new = reading.version == 0 or reading.version != self._cache.versions.of(reading.uid)
                # Fresh: an object that seemed deleted while its kind was not served is back in the same version.
                affected = self._cache.store(reading, listed=True, fresh=True)
                if is_new:
                    self._findings.affected |= affected
            metadata = page.metadata
        if metadata:
            self._watches.listed_at(self._kind, version_of(metadata))
        return uids

    async def compared(self) -> set[str]:
        """Compares the versions of all objects with the known ones. Returns their UIDs."""
        versions: dict[str, int] = {}
        async for page in self._pages(_version, metadata_only=True):
            self._check(page.metadata, page.items)
            versions.update(page.items)
        if self._is_behind(versions):
            await asyncio.sleep(_EVENTS_COME_S)  # what changed during the list comes from the watch
            self.behind = self._is_behind(versions)
        return set(versions)

    def gone(self, listed_uids: Set[str]) -> set[str]:
        """The UIDs of the known objects that are not among those that were found, and do not exist any more."""
        uids = self.before.keys() - listed_uids
        if self._unlisted:
            places = {uid: self._cache.place(uid) for uid in uids}
            uids = {uid for uid, place in places.items() if place is None or place[1] not in self._unlisted}
        return set(uids)

    async def _pages(
        self, read: Callable[[client.JsonObject], _T], *, metadata_only: bool = False
    ) -> AsyncIterator[ListPage[_T]]:
        selector = SELECTORS[self._kind]
        for namespace in self._watches.places(self._kind):
            pages = self._api.pages(
                self._kind, read, label_selector=selector, namespace=namespace or None, metadata_only=metadata_only
            )
            try:
                async for page in pages:
                    yield page
            except client.Refused as error:
                if not namespace:
                    raise
                if await self._is_gone(namespace):  # and the right to list it with it
                    self._watches.left(self._kind, namespace)
                    continue
                self._unlisted.add(namespace)
                self._watches.failed(self._kind, str(error), namespace, optional=self._kind in OPTIONAL)

    async def _is_gone(self, namespace: str) -> bool:
        try:
            await self._api.get(objects.NAMESPACES, None, namespace)
        except client.NotFound:
            return True
        return False

    def _is_behind(self, versions: Mapping[str, int]) -> bool:
        return any(self._cache.versions.is_behind(uid, version) for uid, version in versions.items())

    def _check(self, metadata: client.JsonObject, versions: Iterable[tuple[str, int]]) -> None:
        """Notes if a page is older than what was known at the time of the request."""
        version, before = version_of(metadata), self.before
        if self._rewound or not (
            0 < version < self._newest or any(version < before.get(uid, 0) for uid, version in versions)
        ):
            return
        logger.warning(
            "the API server has gone back to an older state, and everything is listed and watched again",
            extra=about(kind=self._kind.title, found=version, known=self._seen_version),
        )
        self._cache.versions.rewind()
        self._watches.rewind()
        self._rewound = self._findings.rewound = True


def _version(body: client.JsonObject) -> tuple[str, int]:
    return str(body["metadata"]["uid"]), version_of(body["metadata"])


EVERY_S = 300.0
_UNLISTED_AGAIN_S = 30.0
#: How long the first lists wait for the watches to begin, all lists together.
_WATCHES_BEGIN_S = 10.0
_LOOK_S = 0.05


class Relister:
    """Lists the cluster: at start until that succeeds, every five minutes, and a kind when events may have been missed.

    No watch repeats a deletion. So if a watch may have missed one, its kind is listed. A watch shows only what happens
    after the version at which it begins. So at start each kind is listed once its watch has begun, or after a while if
    it has not. The lists every five minutes compare versions only. If something newer of a kind exists, the kind is
    then listed in full.

    One task on the controller's event loop, which runs until it is cancelled. An optional kind that cannot be listed is
    left out and tried again. Nothing else waits for that kind.

    Args:
        api: The API server.
        cache: Stores what is listed.
        watches: The state of each watch.
        drop: As in ``sweep``.
        begin: Awaited before the first list, and again if that list fails.
        after: Called after each list with its result.
        watched: The kinds that are watched.

    Attributes:
        complete: True once every kind was listed.
        unserved: The own kinds that were never listed. Without them, nothing can be decided.
        again_s: Pause in seconds after lists that failed.
        gaps_together_s: How many seconds gaps wait for others: an outage ends for all kinds at about the same time.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        watches: WatchState,
        drop: Callable[[str], Set[str]],
        begin: Callable[[], Awaitable[None]],
        after: Callable[[Swept], None],
        watched: Set[objects.Kind] = ALWAYS,
    ) -> None:
        self._api = api
        self._cache = cache
        self._watches = watches
        self._drop = drop
        self._begin = begin
        self._after = after
        self._watched = watched
        self._listed: set[objects.Kind] = set()
        self._unlisted: set[objects.Kind] = set()  # kinds that could not be listed, and keep nothing else waiting
        self._gaps: dict[objects.Kind, bool] = {}  # kinds whose events may have been missed; False: only deletions
        self._gap = asyncio.Event()
        self._findings = Findings()  # what was not passed to ``after`` yet
        self._all_at = 0.0  # when all kinds are listed next, by the loop's clock
        self.again_s = 2.0
        self.gaps_together_s = 1.0
        self._watched_at = 0.0  # until when lists wait for watches, by the loop's clock

    @property
    def complete(self) -> bool:
        return self._listed == self._watched

    @property
    def unserved(self) -> Set[objects.Kind]:
        return (OWN & self._watched) - self._listed

    def look_again(self, kind: objects.Kind, *, in_full: bool = True) -> None:
        """Lists the kind soon.

        Args:
            kind: The kind.
            in_full: False if only deletions may have been missed.
        """
        self._gaps[kind] = in_full or self._gaps.get(kind, False)
        self._gap.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        kinds: Set[objects.Kind] = self._watched
        in_full = True
        self._watched_at = asyncio.get_running_loop().time() + _WATCHES_BEGIN_S
        while True:
            try:
                if not self._listed:
                    await self._begin()
                began_s = asyncio.get_running_loop().time()
                swept = await sweep(
                    self._api,
                    self._cache,
                    self._drop,
                    self._watches,
                    kinds,
                    functools.partial(self._list_begins, in_full=in_full),
                    findings=self._findings,
                    metadata_only=not in_full,
                )
                self._watches.swept(asyncio.get_running_loop().time() - began_s, whole=kinds == self._watched)
            except client.KubeError as error:
                logger.warning("the cluster cannot be listed", extra=about(error=str(error)))
                await asyncio.sleep(self.again_s)
                continue
            self._listed |= kinds - swept.unlisted - swept.changed
            self._unlisted = (self._unlisted - kinds) | swept.unlisted
            self._after(swept)
            self._findings = Findings()
            if kinds == self._watched:
                self._all_at = asyncio.get_running_loop().time() + EVERY_S
            kinds, in_full = await self._next_kinds(swept, in_full)

    async def _list_begins(self, kind: objects.Kind, in_full: bool) -> None:
        """Waits until the kind's watch has begun, but only for a while after the start."""
        loop = asyncio.get_running_loop()
        if kind not in OPTIONAL:
            while not self._watches.has_begun(kind) and loop.time() < self._watched_at:  # noqa: ASYNC110  another thread
                await asyncio.sleep(_LOOK_S)
        if in_full or not self._gaps.get(kind, False):
            self._gaps.pop(kind, None)  # what was missed until now will be in the list

    async def _next_kinds(self, swept: Swept, was_full: bool) -> tuple[Set[objects.Kind], bool]:
        """Waits until kinds must be listed again. Returns which, and whether in full."""
        if swept.rewound:
            return self._watched, True
        if swept.changed:
            return swept.changed, True
        if was_full and self._gaps_with(in_full=False):
            return self._gaps_with(in_full=False), False  # their turn now, as lists in full go first
        loop = asyncio.get_running_loop()
        wait_s = self._all_at - loop.time()
        if self._unlisted:
            wait_s = min(wait_s, self.again_s if self.unserved else _UNLISTED_AGAIN_S)
        if self._gaps:
            self._gap.set()
        else:
            self._gap.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._gap.wait()
                await asyncio.sleep(self.gaps_together_s)
        self._gap.clear()
        if loop.time() >= self._all_at:
            return self._watched, False
        in_full = self._gaps_with(in_full=True) | self._unlisted
        return (in_full, True) if in_full else (self._gaps_with(in_full=False), False)

    def _gaps_with(self, *, in_full: bool) -> set[objects.Kind]:
        """The kinds that have to be listed because of a gap, either in full or only for deletions."""
        return {kind for kind, full in self._gaps.items() if full == in_full}


_WITHIN_S = 2.0
_BACKOFF = client.RetryPauses(0.25, 0.5)


class WorkloadRefresh:
    """The workloads that are being read again, one task for each.

    A task ends with the API server's answer, or after a bounded time.

    Args:
        api: The API server.
        cache: Stores what is read.
        decide: Called with the workload's UID once it was read, or could not be.
    """

    def __init__(self, api: KubeClient, cache: ClusterCache, decide: Callable[[str], None]) -> None:
        self._api = api
        self._cache = cache
        self._decide = decide
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the workload's UID

    def begin(self, workload: WorkloadIdentity, jobs: Iterable[str], pod_uids: Iterable[str]) -> None:
        """Begins to read the workload, unless that is in progress. The pods are those that were deleted."""
        uid = workload.uid
        if uid not in self._tasks:
            self._tasks[uid] = asyncio.create_task(self._refresh(workload, jobs, pod_uids), name=f"check {uid}")

    def cancel(self) -> None:
        """Cancels all tasks."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _refresh(self, workload: WorkloadIdentity, jobs: Iterable[str], pod_uids: Iterable[str]) -> None:
        """Asks the API server. If it does not answer in time, what is known counts: deleted pods are disrupted ones."""
        uid = workload.uid

        async def read() -> None:
            try:
                await refresh_workload(self._api, self._cache, workload, jobs, pod_uids)
            except client.KubeError as error:
                logger.warning(
                    "a workload could not be read again yet", extra=about(workload=workload.name, error=str(error))
                )
                raise

        try:
            async with asyncio.timeout(_WITHIN_S):
                await _BACKOFF.retried(read, on=client.KubeError)
        except TimeoutError:
            logger.warning(
                "a workload was not read again in time, its deleted pods count as disrupted",
                extra=about(workload=workload.name, waited_s=_WITHIN_S),
            )
            self._cache.mark_checked(pod_uids)
            self._cache.suspensions.explain(self._cache.suspensions.of(uid))
        finally:
            del self._tasks[workload.uid]
        self._decide(workload.uid)


async def refresh_workload(
    api: KubeClient, cache: ClusterCache, workload: WorkloadIdentity, jobs: Iterable[str], pod_uids: Iterable[str] = ()
) -> None:
    """Reads the workload, these of its Jobs and Kueue's Workload into ``cache``, and notes the deleted pods as checked.

    A workload that lost the label by which it is watched becomes known by this read, until the next sweep.

    The namespace is read too. When it is being deleted, its pods, Jobs and workloads are deleted in any order, but the
    namespace shows this before the first of them is deleted.

    Raises:
        kube.KubeError: A request to the API server failed. Then nothing was noted.
    """
    kind = BY_NAME[workload.kind].kind
    try:
        body = await api.get(kind, workload.namespace, workload.name)
        cache.put(kind, body, listed=True, fresh=True)
        is_there = body["metadata"]["uid"] == workload.uid and cache.unreadable_objects.why(workload.uid) is not None
        gone_uids = [] if is_there or workload.uid in cache.objects.workloads else [workload.uid]
    except client.NotFound:
        gone_uids = [workload.uid]
    for name in jobs if BY_NAME[workload.kind].makes_jobs else ():
        job_uids = [
            job.uid for job in cache.objects.jobs.values() if (job.namespace, job.name) == (workload.namespace, name)
        ]
        try:
            body = await api.get(objects.JOBS, workload.namespace, name)
            cache.put(objects.JOBS, body, listed=True)
            gone_uids += [uid for uid in job_uids if uid != body["metadata"]["uid"]]
        except client.NotFound:
            gone_uids += job_uids
    for uid in gone_uids:
        cache.drop(uid)
    if workload.uid in gone_uids:
        cache.preemptions.mark_gone(workload.uid)
    await _explain_suspensions(api, cache, workload.uid)
    if await _is_being_deleted(api, workload.namespace):
        cache.doom(workload.uid)
    cache.mark_checked(pod_uids)


async def _explain_suspensions(api: KubeClient, cache: ClusterCache, workload_uid: str) -> None:
    """Reads Kueue's Workload if the workload is suspended: Kueue says there who took the quota, before it suspends."""
    suspended = cache.suspensions.of(workload_uid)  # before the reads: a later suspension needs another read
    if not suspended:
        return
    try:
        kind = await api.preferred(objects.KUEUE_WORKLOADS)
        for namespace, name in cache.suspensions.queue_entries(workload_uid):
            cache.put(objects.KUEUE_WORKLOADS, await api.get(kind, namespace, name), listed=True, fresh=True)
    except (client.NotFound, client.Refused) as error:
        logger.warning("why a workload is suspended could not be read from Kueue", extra=about(error=str(error)))
    cache.suspensions.explain(suspended)


async def _is_being_deleted(api: KubeClient, name: str) -> bool:
    try:
        return "deletionTimestamp" in (await api.get(objects.NAMESPACES, None, name))["metadata"]
    except client.NotFound:
        return True
