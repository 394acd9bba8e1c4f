"""Lists the cluster: at start until that succeeds, every five minutes, and a kind when events may have been missed.

No watch repeats a deletion. So after a watch may have missed one, its kind is listed.

One task on the controller's event loop, which runs until it is cancelled. An optional kind that cannot be listed is
left out and tried again. Nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Set

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.resync import SELECTORS, Swept, sweep
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

EVERY_S = 300.0
_AGAIN_S = 2.0
_LEFT_OUT_AGAIN_S = 30.0
#: An outage ends for all kinds at about the same time.
_GAPS_TOGETHER_S = 1.0


class Sweeper:
    """Lists the cluster.

    Args:
        api: The API server.
        cache: Stores what is listed.
        watches: The state of each watch.
        drop: Called with the UID of each object that no longer exists.
        begin: Awaited before the first list, and again if that list fails.
        after: Called after each list with its result.

    Attributes:
        complete: True once every kind was listed.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        watches: WatchState,
        drop: Callable[[str], object],
        begin: Callable[[], Awaitable[None]],
        after: Callable[[Swept], None],
    ) -> None:
        self._api = api
        self._cache = cache
        self._watches = watches
        self._drop = drop
        self._begin = begin
        self._after = after
        self._listed: set[kinds.Kind] = set()
        self._gaps: set[kinds.Kind] = set()  # kinds of which events may have been missed
        self._gap = asyncio.Event()
        self._all_at = 0.0  # when all kinds are listed next, by the loop's clock

    @property
    def complete(self) -> bool:
        return self._listed == SELECTORS.keys()

    def look_again(self, kind: kinds.Kind) -> None:
        """Lists the kind soon."""
        self._gaps.add(kind)
        self._gap.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        wanted: Set[kinds.Kind] = SELECTORS.keys()
        while True:
            try:
                if not self._listed:
                    await self._begin()
                began_s = asyncio.get_running_loop().time()
                swept = await sweep(self._api, self._cache, self._drop, self._watches, wanted)
                self._watches.swept(asyncio.get_running_loop().time() - began_s, whole=wanted == SELECTORS.keys())
            except client.KubeError as error:
                log.warning("the cluster cannot be listed", extra=about(error=str(error)))
                await asyncio.sleep(_AGAIN_S)
                continue
            self._listed |= wanted - swept.left_out
            self._after(swept)
            if wanted == SELECTORS.keys():
                self._all_at = asyncio.get_running_loop().time() + EVERY_S
            wanted = await self._next_wanted(swept)

    async def _next_wanted(self, swept: Swept) -> Set[kinds.Kind]:
        """Waits until kinds must be listed again. Returns which."""
        if swept.rewound:
            return SELECTORS.keys()
        loop = asyncio.get_running_loop()
        wait_s = self._all_at - loop.time()
        if swept.left_out:
            wait_s = min(wait_s, _LEFT_OUT_AGAIN_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._gap.wait()
                await asyncio.sleep(_GAPS_TOGETHER_S)
        self._gap.clear()
        gaps, self._gaps = self._gaps, set()
        if loop.time() >= self._all_at:
            return SELECTORS.keys()
        return (gaps & SELECTORS.keys()) | swept.left_out
