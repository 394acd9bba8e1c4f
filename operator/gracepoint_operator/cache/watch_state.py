"""The state of each kind's watch: when the API server last answered it, and whether it fails now.

The threads that watch (``watches``) write here, each for its own kinds. The controller's loop and the health
port read. The controller also writes the results of its lists. One lock guards everything, and is held for a few
assignments at a time. The callbacks are called without the lock, in the thread that noticed the event.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics

logger = logging.getLogger(__name__)

#: A failure is logged once it has lasted for this time, in seconds: an API server that serves a kind for the first time
#: refuses some requests for it, and a second later it answers.
_LOGGED_AFTER_S = 5.0
#: Each thread that watches makes a request at least this often, unless it hangs.
HANGS_AFTER_S = 300.0


@dataclasses.dataclass
class _Watch:
    """The watch of one kind. If only some namespaces are watched, it is one of each of them.

    Attributes:
        answered_at: When the API server last answered a request for the kind or sent an event, by the clock, for each
            namespace. "": all of them.
        failing_since: When the first request failed after the last answer, by the clock, for the namespaces where that
            is so.
        logged: The namespaces of whose failure there is a log line.
        version: The highest resourceVersion from which the kind was watched, or at which it was listed.
        begun: Whether the watch knows the version after which it begins. If it begins later in another namespace, that
            is a gap.
    """

    answered_at: dict[str, float] = dataclasses.field(default_factory=dict)
    failing_since: dict[str, float] = dataclasses.field(default_factory=dict)
    logged: set[str] = dataclasses.field(default_factory=set)
    version: int = 0
    begun: bool = False


class WatchState:
    """The state of all watches.

    Args:
        metrics: Shows the ages and counts failures.
        clock: Seconds, of a clock that never goes back.
        namespaces: The namespaces that are watched. Empty: all.
        namespace_of: Kinds of which only one namespace is watched, whatever the others are.

    Attributes:
        namespaces: See above.
        on_gap: Called with a kind when events of it may have been missed, and with False if these can only be
            deletions.
        on_rewind: Called when the API server has gone back to an older state. Every watch must begin again.
    """

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        namespaces: Iterable[str] = (),
        on_gap: Callable[[Kind, bool], None] = lambda kind, any_event: None,
        namespace_of: Mapping[Kind, str] | None = None,
    ) -> None:
        self.namespaces = tuple(sorted(set(namespaces)))
        self._namespace_of = namespace_of or {}
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: dict[Kind, _Watch] = {}
        self._absent: set[Kind] = set()
        self._asked_at: dict[str, float] = {}  # by the name of the thread
        self._expected: set[Kind] = set()
        self.on_gap = on_gap
        self.on_rewind: Callable[[], None] = lambda: None

    def expect(self, expected: Iterable[Kind]) -> None:
        """Notes that these kinds will be watched."""
        with self._lock:
            self._expected.update(expected)

    def has_begun(self, kind: Kind) -> bool:
        """True if the kind's watch has begun, or the kind is not watched at all."""
        with self._lock:
            watch = self._watches.get(kind)
            return kind not in self._expected or (watch is not None and watch.begun)

    def asked(self, thread: str, kind: Kind | None = None, since: int = 0) -> None:
        """Notes that a thread sends a request.

        Args:
            thread: The thread's name.
            kind: The kind that it lists or watches. None: another request.
            since: The resourceVersion from which it watches. 0 if there is none.
        """
        with self._lock:
            self._asked_at[thread] = self._clock()
            if kind is not None:
                watch = self._watch(kind)
                watch.version = max(watch.version, since)

    def ended(self, thread: str) -> None:
        """Notes that the thread was stopped."""
        with self._lock:
            self._asked_at.pop(thread, None)

    def places(self, kind: Kind) -> tuple[str, ...]:
        """The namespaces in which the kind is watched. "": all of them, or it has none."""
        if kind in self._namespace_of:
            return (self._namespace_of[kind],)
        return self.namespaces if self.namespaces and kind.namespaced else ("",)

    def answered(self, kind: Kind, namespace: str = "", *, listed: bool = False) -> None:
        """Notes that the API server answered.

        Args:
            kind: The kind.
            namespace: The namespace that was asked for.
            listed: True if it answered with the version after which a watch begins. No event shows what happened
                before.
        """
        now = self._clock()
        with self._lock:
            watch = self._watch(kind)
            failing_since = watch.failing_since.pop(namespace, None)
            was_logged = namespace in watch.logged
            watch.logged.discard(namespace)
            watch.answered_at[namespace] = now
            was_absent = kind in self._absent
            self._absent.discard(kind)
        if failing_since is not None and was_logged:
            failed_for_s = round(now - failing_since, 1)
            logger.info("watched again", extra=about(kind=kind.title, **_named(namespace), failed_for_s=failed_for_s))
        if was_absent:
            logger.info("a kind is installed now, and watched", extra=about(kind=kind.title))
        if listed or failing_since is not None:
            self.on_gap(kind, listed)
        if listed:
            with self._lock:
                self._watch(kind).begun = True  # after the call: a list that waited for it fills the gap

    def seen(self, kind: Kind, namespace: str = "") -> None:
        """Notes that an event of an object arrived. ``namespace`` is the object's."""
        with self._lock:
            self._watch(kind).answered_at[namespace if namespace in self.places(kind) else ""] = self._clock()

    def left(self, kind: Kind, namespace: str) -> None:
        """Notes that the namespace does not exist, so that nothing of it is watched."""
        with self._lock:
            watch = self._watch(kind)
            watch.answered_at.pop(namespace, None)
            watch.failing_since.pop(namespace, None)
            watch.logged.discard(namespace)

    def failed(self, kind: Kind, error: str, namespace: str = "", *, optional: bool) -> None:
        """Notes that a request to list or watch the kind failed. It will be made again."""
        self._metrics.watch_failures.labels(kind=kind.title).inc()
        now = self._clock()
        with self._lock:
            watch = self._watch(kind)
            since = watch.failing_since.setdefault(namespace, now)
            must_log = namespace not in watch.logged and now - since >= _LOGGED_AFTER_S
            if must_log:
                watch.logged.add(namespace)
        if must_log:
            message = (
                "an optional kind is left out, and tried again" if optional else "a kind fails, and is tried again"
            )
            logger.warning(message, extra=about(kind=kind.title, **_named(namespace), error=error))

    def absent(self, kind: Kind, *, optional: bool) -> None:
        """Notes that the cluster does not have the kind. It is watched as soon as its CRD is installed."""
        with self._lock:
            watch = self._watches.pop(kind, None)
            must_log = not optional and kind not in self._absent
            if must_log:
                self._absent.add(kind)
        if watch is not None:
            self._metrics.watch_age_s.remove(kind.title)
        if must_log:
            logger.warning(
                "the cluster lacks a kind, which is watched once it is installed",
                extra=about(kind=kind.title, group=kind.group),
            )

    def is_absent(self, kind: Kind) -> bool:
        """True if the cluster lacks a kind that it must have."""
        with self._lock:
            return kind in self._absent

    def version(self, kind: Kind) -> int:
        """The highest resourceVersion from which the kind was watched, or at which it was listed."""
        with self._lock:
            watch = self._watches.get(kind)
            return 0 if watch is None else watch.version

    def listed_at(self, kind: Kind, version: int) -> None:
        """Notes that the kind was listed at that resourceVersion."""
        with self._lock:
            watch = self._watch(kind)
            watch.version = max(watch.version, version)

    def swept(self, duration_s: float, *, whole: bool) -> None:
        """Notes how long it took to list all kinds (``whole``) or some."""
        self._metrics.sweep_s.labels(extent="all" if whole else "some").observe(duration_s)

    def rewind(self) -> None:
        """Forgets all resourceVersions, because the API server has gone back to an older state."""
        with self._lock:
            for watch in self._watches.values():
                watch.version = 0
        self.on_rewind()

    def ages(self) -> dict[Kind, float]:
        """Seconds since the API server last answered for each kind that it has, where that is longest."""
        now = self._clock()
        with self._lock:
            return {kind: now - min(watch.answered_at.values(), default=now) for kind, watch in self._watches.items()}

    def hanging(self) -> list[str]:
        """The names of the threads that watch and have sent no request for ``HANGS_AFTER_S``."""
        now = self._clock()
        with self._lock:
            return [name for name, at in self._asked_at.items() if now - at > HANGS_AFTER_S]

    def _watch(self, kind: Kind) -> _Watch:
        if kind not in self._watches:
            self._watches[kind] = _Watch({place: self._clock() for place in self.places(kind)})
            self._metrics.watch_age_s.labels(kind=kind.title).set_function(lambda: self._age(kind))
        return self._watches[kind]

    def _age(self, kind: Kind) -> float:
        return self.ages().get(kind, 0.0)


def _named(namespace: str) -> dict[str, str]:
    """What a log line says of it."""
    return {"namespace": namespace} if namespace else {}
