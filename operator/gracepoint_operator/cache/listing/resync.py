"""Lists the API server's objects, instead of waiting for its watches.

``sweep`` lists all kinds, or some. At start, it tells when this replica knows the cluster. Later it finds what was
deleted while a watch had lost its place, which no watch ever reports. It also finds that the API server has gone back
to an older state, as after etcd was restored from a backup: then known versions are higher than the newest ones.

Objects are listed page by page and read in the threads of ``KubeClient``, so that whole objects are held for a moment
only. For the later sweeps the metadata of the objects are enough.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Set
from typing import TypeVar

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.listing.watch_state import WatchState
from gracepoint_operator.cache.resource_versions import version_of
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.answers import ListPage
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.model.requests import LABEL_ENDED_AT
from gracepoint_operator.observability.logs import about
from gracepoint_operator.workloads import BY_PLACE, JOB_LABEL, POD_LABEL

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: The watched kinds, each with the selector of its objects. Preemptions come before what they explain.
SELECTORS: dict[kinds.Kind, str | None] = {
    kinds.PREEMPTIONS: None,
    kinds.REQUESTS: f"!{LABEL_ENDED_AT}",
    kinds.NAMESPACES: None,
    kinds.CLUSTER_POLICIES: None,
    kinds.POLICIES: None,
    **{place: known.selector for place, known in BY_PLACE.items()},
    kinds.JOBS: JOB_LABEL,
    kinds.NODES: None,
    kinds.NODE_CLAIMS: None,
    kinds.KUEUE_WORKLOADS: None,
    kinds.EVICTIONS: None,
    kinds.RESOURCE_SLICES: None,
    kinds.DEVICE_TAINT_RULES: None,
    kinds.RESOURCE_CLAIMS: None,
    kinds.PODS: POD_LABEL,
}

#: The kinds that are watched in any case. The others need rights that an administrator may give to the operator.
ALWAYS: Set[kinds.Kind] = SELECTORS.keys() - kinds.DEVICES


#: Kinds that a cluster may not have. A failure of one of them delays nothing else.
OPTIONAL: frozenset[kinds.Kind] = kinds.DEVICES | {kinds.NODE_CLAIMS, kinds.KUEUE_WORKLOADS, kinds.EVICTIONS}

#: What the operator decides by. If a cluster stops serving one, as when CRDs of another version are installed, that
#: does not mean that its objects are gone.
OWN: frozenset[kinds.Kind] = frozenset({kinds.PREEMPTIONS, kinds.REQUESTS, kinds.CLUSTER_POLICIES, kinds.POLICIES})


#: How long the watch may take to bring what changed during a list.
_EVENTS_COME_S = 5.0


async def _nothing(kind: kinds.Kind) -> None:
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

    unlisted: frozenset[kinds.Kind]
    changed: frozenset[kinds.Kind]
    affected: frozenset[str]
    rewound: bool
    whole: bool


async def sweep(
    api: KubeClient,
    cache: ClusterCache,
    drop: Callable[[str], Set[str]],
    watches: WatchState,
    wanted: Collection[kinds.Kind] = ALWAYS,
    begins: Callable[[kinds.Kind], Awaitable[None]] = _nothing,
    *,
    findings: Findings | None = None,
    metadata_only: bool = False,
) -> Swept:
    """Lists kinds into ``cache``. A kind that the cluster does not have yet has no objects, but for those in ``OWN``.

    Args:
        api: The API server.
        cache: Stores what is listed.
        drop: Removes the object with a UID, which no longer exists. Returns the UIDs of the affected workloads.
        watches: Has the version up to which each kind was watched. Is told of failures.
        wanted: The kinds to list.
        begins: Awaited before a kind is listed.
        findings: What sweeps that failed have found. This sweep adds what it finds at once. None: nothing was found.
        metadata_only: If True, the sweep only finds what no longer exists, and which kinds have changed.

    Raises:
        kube.KubeError: The API server cannot be asked for a kind that is not optional.
    """
    unlisted: set[kinds.Kind] = set()
    changed: set[kinds.Kind] = set()
    findings = Findings() if findings is None else findings
    for kind in (kind for kind in SELECTORS if kind in wanted):
        await begins(kind)
        listing = _Listing(api, cache, watches, kind, findings)
        try:
            found = await (listing.compared() if metadata_only else listing.stored())
        except client.NotFound:
            watches.absent(kind, optional=kind in OPTIONAL)
            if kind in OWN:
                unlisted.add(kind)
                continue
            found = set()
        except client.KubeError as error:
            if kind not in OPTIONAL:
                raise
            watches.failed(kind, str(error), optional=True)
            unlisted.add(kind)
            continue
        for uid in listing.gone(found):
            findings.affected |= drop(uid)
        if listing.behind:
            changed.add(kind)
    affected, rewound = frozenset(findings.affected), findings.rewound
    return Swept(frozenset(unlisted), frozenset(changed), affected, rewound, whole=set(wanted) >= ALWAYS)


class _Listing:
    """The list of one kind.

    If only some namespaces are watched, these are listed one after the other. Of one that may not be listed, what is
    known stays, and the others are listed all the same.

    Attributes:
        before: The versions of the objects that were known when the list began, by UID.
        behind: True if an object was listed in a version that is not known here.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, watches: WatchState, kind: kinds.Kind, findings: Findings
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
        reader, found, metadata = self._cache.reader, set(), {}
        async for page in self._pages(lambda body: reader.read(self._kind, body)):
            readings = [reading for reading in page.items if reading is not None]
            self._check(page.metadata, ((reading.uid, reading.version) for reading in readings))
            for reading in readings:
                found.add(reading.uid)
                is_new = reading.version == 0 or reading.version != self._cache.versions.of(reading.uid)
                # Fresh: an object that seemed deleted while its kind was not served is back in the same version.
                affected = self._cache.store(reading, listed=True, fresh=True)
                if is_new:
                    self._findings.affected |= affected
            metadata = page.metadata
        if metadata:
            self._watches.listed_at(self._kind, version_of(metadata))
        return found

    async def compared(self) -> set[str]:
        """Compares the versions of all objects with the known ones. Returns their UIDs."""
        found: dict[str, int] = {}
        async for page in self._pages(_version, metadata_only=True):
            self._check(page.metadata, page.items)
            found.update(page.items)
        if self._is_behind(found):
            await asyncio.sleep(_EVENTS_COME_S)  # what changed during the list comes from the watch
            self.behind = self._is_behind(found)
        return set(found)

    def gone(self, found: Set[str]) -> set[str]:
        """The UIDs of the known objects that are not among those that were found, and do not exist any more."""
        gone = self.before.keys() - found
        if self._unlisted:
            places = {uid: self._cache.place(uid) for uid in gone}
            gone = {uid for uid, place in places.items() if place is None or place[1] not in self._unlisted}
        return set(gone)

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
            await self._api.get(kinds.NAMESPACES, None, namespace)
        except client.NotFound:
            return True
        return False

    def _is_behind(self, found: Mapping[str, int]) -> bool:
        return any(self._cache.versions.is_behind(uid, version) for uid, version in found.items())

    def _check(self, metadata: client.JsonObject, versions: Iterable[tuple[str, int]]) -> None:
        """Notes if a page is older than what was known at the time of the request."""
        version, known = version_of(metadata), self.before
        if self._rewound or not (
            0 < version < self._newest or any(version < known.get(uid, 0) for uid, version in versions)
        ):
            return
        log.warning(
            "the API server has gone back to an older state, and all is listed and watched anew",
            extra=about(kind=self._kind.title, found=version, known=self._seen_version),
        )
        self._cache.versions.rewind()
        self._watches.rewind()
        self._rewound = self._findings.rewound = True


def _version(body: client.JsonObject) -> tuple[str, int]:
    return str(body["metadata"]["uid"]), version_of(body["metadata"])
