"""Lists the cluster: at start until that succeeds, every five minutes, and a kind when events may have been missed.

No watch repeats a deletion. So if a watch may have missed one, its kind is listed. A watch shows only what happens
after the version at which it begins. So at start each kind is listed once its watch has begun, or after a while if it
has not. The lists every five minutes compare versions only. If something newer of a kind exists, the kind is then
listed in full.

One task on the controller's event loop, which runs until it is cancelled. An optional kind that cannot be listed is
left out and tried again. Nothing else waits for that kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Set

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.listing.resync import ALWAYS, OPTIONAL, OWN, Findings, Swept, sweep
from gracepoint_operator.cache.listing.watch_state import WatchState
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

EVERY_S = 300.0
_AGAIN_S = 2.0
_UNLISTED_AGAIN_S = 30.0
#: An outage ends for all kinds at about the same time.
_GAPS_TOGETHER_S = 1.0
#: How long the first lists wait for the watches to begin, all lists together.
_WATCHES_BEGIN_S = 10.0
_LOOK_S = 0.05


class Relister:
    """Lists the cluster.

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
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        watches: WatchState,
        drop: Callable[[str], Set[str]],
        begin: Callable[[], Awaitable[None]],
        after: Callable[[Swept], None],
        watched: Set[kinds.Kind] = ALWAYS,
    ) -> None:
        self._api = api
        self._cache = cache
        self._watches = watches
        self._drop = drop
        self._begin = begin
        self._after = after
        self._watched = watched
        self._listed: set[kinds.Kind] = set()
        self._unlisted: set[kinds.Kind] = set()  # kinds that could not be listed, and keep nothing else waiting
        self._gaps: dict[kinds.Kind, bool] = {}  # kinds whose events may have been missed; False: only deletions
        self._gap = asyncio.Event()
        self._findings = Findings()  # what ``after`` was not told of yet
        self._all_at = 0.0  # when all kinds are listed next, by the loop's clock
        self._watched_at = 0.0  # until when lists wait for watches, by the loop's clock

    @property
    def complete(self) -> bool:
        return self._listed == self._watched

    @property
    def unserved(self) -> Set[kinds.Kind]:
        return (OWN & self._watched) - self._listed

    def look_again(self, kind: kinds.Kind, *, in_full: bool = True) -> None:
        """Lists the kind soon.

        Args:
            kind: The kind.
            in_full: False if only deletions may have been missed.
        """
        self._gaps[kind] = in_full or self._gaps.get(kind, False)
        self._gap.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        wanted: Set[kinds.Kind] = self._watched
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
                    wanted,
                    functools.partial(self._list_begins, in_full=in_full),
                    findings=self._findings,
                    metadata_only=not in_full,
                )
                self._watches.swept(asyncio.get_running_loop().time() - began_s, whole=wanted == self._watched)
            except client.KubeError as error:
                log.warning("the cluster cannot be listed", extra=about(error=str(error)))
                await asyncio.sleep(_AGAIN_S)
                continue
            self._listed |= wanted - swept.unlisted - swept.changed
            self._unlisted = (self._unlisted - wanted) | swept.unlisted
            self._after(swept)
            self._findings = Findings()
            if wanted == self._watched:
                self._all_at = asyncio.get_running_loop().time() + EVERY_S
            wanted, in_full = await self._next_wanted(swept, in_full)

    async def _list_begins(self, kind: kinds.Kind, in_full: bool) -> None:
        """Waits until the kind's watch has begun, but only for a while after the start."""
        loop = asyncio.get_running_loop()
        if kind not in OPTIONAL:
            while not self._watches.has_begun(kind) and loop.time() < self._watched_at:  # noqa: ASYNC110  another thread
                await asyncio.sleep(_LOOK_S)
        if in_full or not self._gaps.get(kind, False):
            self._gaps.pop(kind, None)  # what was missed until now will be in the list

    async def _next_wanted(self, swept: Swept, was_full: bool) -> tuple[Set[kinds.Kind], bool]:
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
            wait_s = min(wait_s, _AGAIN_S if self.unserved else _UNLISTED_AGAIN_S)
        if self._gaps:
            self._gap.set()
        else:
            self._gap.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._gap.wait()
                await asyncio.sleep(_GAPS_TOGETHER_S)
        self._gap.clear()
        if loop.time() >= self._all_at:
            return self._watched, False
        in_full = self._gaps_with(in_full=True) | self._unlisted
        return (in_full, True) if in_full else (self._gaps_with(in_full=False), False)

    def _gaps_with(self, *, in_full: bool) -> set[kinds.Kind]:
        """The kinds that have to be listed because of a gap, either in full or only for deletions."""
        return {kind for kind, full in self._gaps.items() if full == in_full}
