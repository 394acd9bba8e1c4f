"""How the watch of each kind fares: when the API server last answered it, and whether it fails now.

The threads that watch (``handlers``) write here, each of its own kinds; the core's loop and the health port read, and
the core writes what its own listings come to. One lock guards all of it, held for a few assignments at a time. The
callbacks are called without it, from the thread that noticed.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics

log = logging.getLogger(__name__)

#: Each thread that watches makes a request at least this often, unless it hangs.
HANGS_AFTER_S = 300.0


@dataclasses.dataclass
class _Watch:
    """One kind's.

    Attributes:
        answered_at: When the API server last answered a request for it, or sent an event.
        failing_since: When the first of the requests failed of which none was answered since; None: it works.
        version: The highest resourceVersion from which it was watched, or at which it was listed.
    """

    answered_at: float
    failing_since: float | None = None
    version: int = 0


class WatchState:
    """See the module.

    Args:
        metrics: Shows the ages and counts failures.
        clock: Seconds, of a clock that never goes back.

    Attributes:
        on_gap: Called with a kind of which events, deletions among them, may have been missed.
        on_rewind: Called when the API server has gone back to an older state; every watch is to begin anew.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: dict[Kind, _Watch] = {}
        self._asked_at: dict[str, float] = {}  # by the name of the thread
        self.on_gap: Callable[[Kind], None] = lambda kind: None
        self.on_rewind: Callable[[], None] = lambda: None

    def asked(self, thread: str, kind: Kind | None = None, since: int = 0) -> None:
        """A thread that watches sends a request.

        Args:
            thread: Its name.
            kind: The kind that it lists or watches; None: it asks for something else.
            since: The resourceVersion from which it watches; 0 where there is none.
        """
        with self._lock:
            self._asked_at[thread] = self._clock()
            if kind is not None:
                watch = self._watch(kind)
                watch.version = max(watch.version, since)

    def ended(self, thread: str) -> None:
        """The thread watches no more, as it was told to."""
        with self._lock:
            self._asked_at.pop(thread, None)

    def answered(self, kind: Kind, *, listed: bool = False) -> None:
        """The API server answered.

        ``listed``: with a list, from which a watch goes on; what was deleted before it is nowhere told of.
        """
        now = self._clock()
        with self._lock:
            watch = self._watch(kind)
            failing_since, watch.failing_since = watch.failing_since, None
            watch.answered_at = now
        if failing_since is not None:
            log.info("watched again", extra=about(kind=kind.plural, failed_for_s=round(now - failing_since, 1)))
        if listed or failing_since is not None:
            self.on_gap(kind)

    def seen(self, kind: Kind) -> None:
        """An event came."""
        with self._lock:
            self._watch(kind).answered_at = self._clock()

    def failed(self, kind: Kind, error: str, *, optional: bool) -> None:
        """A request to list or watch the kind failed, and is going to be made again."""
        self._metrics.watch_failures.labels(kind=kind.plural).inc()
        with self._lock:
            watch = self._watch(kind)
            first = watch.failing_since is None
            if first:
                watch.failing_since = self._clock()
        if first:
            message = (
                "an optional kind is left out, and tried again" if optional else "a kind fails, and is tried again"
            )
            log.warning(message, extra=about(kind=kind.plural, error=error))

    def absent(self, kind: Kind) -> None:
        """The cluster does not have the kind."""
        with self._lock:
            known = self._watches.pop(kind, None)
        if known is not None:
            self._metrics.watch_age_s.remove(kind.plural)

    def version(self, kind: Kind) -> int:
        """The highest resourceVersion from which the kind was watched, or at which it was listed."""
        with self._lock:
            known = self._watches.get(kind)
            return 0 if known is None else known.version

    def listed_at(self, kind: Kind, version: int) -> None:
        """The kind was listed at that resourceVersion."""
        with self._lock:
            watch = self._watch(kind)
            watch.version = max(watch.version, version)

    def rewind(self) -> None:
        """The API server has gone back to an older state: resourceVersions of before say nothing."""
        with self._lock:
            for watch in self._watches.values():
                watch.version = 0
        self.on_rewind()

    def ages(self) -> dict[Kind, float]:
        """Seconds since the API server last answered for each kind that it has."""
        now = self._clock()
        with self._lock:
            return {kind: now - watch.answered_at for kind, watch in self._watches.items()}

    def hanging(self) -> list[str]:
        """The names of the threads that watch and have sent no request for ``HANGS_AFTER_S``."""
        now = self._clock()
        with self._lock:
            return [name for name, at in self._asked_at.items() if now - at > HANGS_AFTER_S]

    def _watch(self, kind: Kind) -> _Watch:
        if kind not in self._watches:
            self._watches[kind] = _Watch(answered_at=self._clock())
            self._metrics.watch_age_s.labels(kind=kind.plural).set_function(lambda: self._age(kind))
        return self._watches[kind]

    def _age(self, kind: Kind) -> float:
        return self.ages().get(kind, 0.0)
