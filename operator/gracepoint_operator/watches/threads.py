"""The threads that watch the cluster.

One thread watches most of the required kinds. Each optional kind has a thread of its own, because kopf ends all its
watches when one of them meets an error that kopf does not retry. So has each kind that is a subset of a resource
(``Kind.subset``).
``Watches.start`` starts them from the main thread. Each runs kopf on an event loop of its own. Whatever ends kopf, the
thread runs it again after a pause. Only ``Watches.close`` ends a thread. While the API server cannot be reached, or
answers with an error, kopf retries each request without end. ``WatchState`` holds the state of each watch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable

import kopf

from gracepoint_operator.cache.listing.resync import OPTIONAL
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.retry_pauses import RetryPauses
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.watches.handlers import REQUEST_BACKOFFS, watch_all
from gracepoint_operator.watches.kopf_run import run_kopf
from gracepoint_operator.watches.pauses import Pauses
from gracepoint_operator.watches.request_trace import request_trace

log = logging.getLogger(__name__)

#: The pauses in seconds before kopf is run again, or logs in again.
_RUN_PAUSES = RetryPauses(0.5, 30.0)


class Watches:
    """All watches. Each group of kinds has a thread of its own.

    Args:
        controller: Gets every object.
        api: Its credentials are used.
        metrics: Counts how often kopf was run again.
        replica: This replica's name. By default kopf would use the user's name, which a container may not have.
        backoffs: The pauses in seconds between the attempts of one request.
    """

    def __init__(
        self,
        controller: Controller,
        api: KubeClient,
        metrics: Metrics,
        *,
        replica: str,
        backoffs: Iterable[float] = REQUEST_BACKOFFS,
    ) -> None:
        # kopf has one label selector for each resource, so kinds at the same place cannot share a run.
        apart = {kind for kind in controller.watched if kind in OPTIONAL or kind.subset}
        groups = {"required": controller.watched - apart} | {kind.title: {kind} for kind in apart}
        self._threads = [
            _WatchThread(controller, api, metrics, name, watched, replica=replica, backoffs=backoffs)
            for name, watched in sorted(groups.items())
        ]
        controller.watches.on_rewind = self.begin_anew
        controller.watches.expect(controller.watched)

    def start(self) -> None:
        """Starts all threads."""
        for thread in self._threads:
            thread.start()

    def begin_anew(self) -> None:
        """Lists and watches everything again. Callable from any thread. Returns at once."""
        for thread in self._threads:
            thread.begin_anew()

    def close(self, timeout_s: float) -> None:
        """Ends all watches. Waits for at most ``timeout_s`` seconds for all of them together."""
        for thread in self._threads:
            thread.stop()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is None:
                continue  # never started
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.error("watches did not end", extra=about(thread=thread.name, waited_s=timeout_s))


class _WatchThread(threading.Thread):
    """Runs kopf for some kinds, again and again. Other threads call ``stop`` and ``begin_anew``.

    Args:
        controller: Gets every object.
        api: Its credentials are used.
        metrics: Counts how often kopf was run again.
        name: Which kinds these are, for the thread's name.
        watched: The kinds.
        replica: This replica's name.
        backoffs: The pauses in seconds between the attempts of one request.
    """

    def __init__(
        self,
        controller: Controller,
        api: KubeClient,
        metrics: Metrics,
        name: str,
        watched: Collection[kinds.Kind],
        *,
        replica: str,
        backoffs: Iterable[float],
    ) -> None:
        super().__init__(name=f"watch {name}", daemon=True)
        self._controller = controller
        self._api = api
        self._metrics = metrics
        metrics.watch_restarts.labels(thread=self.name)  # from 0 on, so that increase() sees the first restarts
        self._watched = watched
        self._replica = replica
        self._backoffs = backoffs
        self._stopped = threading.Event()
        self._run_ends = threading.Event()  # ends the current run of kopf; each run has its own

    def stop(self) -> None:
        self._stopped.set()
        self._run_ends.set()

    def begin_anew(self) -> None:
        self._run_ends.set()

    def run(self) -> None:
        self._controller.watches.asked(self.name)
        pauses = Pauses(_RUN_PAUSES)
        while not self._stopped.is_set():
            self._run_ends = threading.Event()
            if self._stopped.is_set():  # set between the two lines above, on the event of the run before
                break
            error = self._run_once(self._run_ends)
            if self._stopped.is_set():
                break
            pause_s = pauses.next_s()
            self._metrics.watch_restarts.labels(thread=self.name).inc()
            log.error(
                "watches ended, and begin anew", extra=about(thread=self.name, error=error, in_s=round(pause_s, 1))
            )
            self._controller.watches.asked(self.name)
            self._stopped.wait(pause_s)
        self._controller.watches.ended(self.name)

    def _run_once(self, ends: threading.Event) -> str:
        """Returns why it ended."""
        registry = kopf.OperatorRegistry()
        watch_all(registry, self._controller, self._watched)
        return run_kopf(
            registry,
            self._api,
            request_trace(self.name, self._controller.watches, self._watched),
            Pauses(_RUN_PAUSES),
            ends,
            replica=self._replica,
            watched=self._watched,
            namespaces=self._controller.watches.namespaces,
            backoffs=self._backoffs,
        )
