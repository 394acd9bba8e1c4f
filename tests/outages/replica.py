"""One replica's core and watches in the test's process, against a real API server.

Threads: one for the core's loop, and the watches' own; ``replica`` ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.watches import REQUEST_BACKOFFS, Watches
from tests.testcluster.shell import wait_until

WAIT_S = 30.0


class Replica:
    """What a test asks of it. The world is only read from here, one attribute at a time."""

    def __init__(self, kubeconfig: Path, backoffs: Iterable[float]) -> None:
        self.metrics = Metrics()
        self.api = KubeClient.connect(str(kubeconfig))
        self.core = Controller(self.api, self.metrics, time.time, ControllerSettings("replica-a"))
        self.watches = Watches(self.core, self.api, self.metrics, replica="replica-a", backoffs=backoffs)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._running = threading.Event()

    def start(self) -> None:
        self._thread.start()
        assert self._running.wait(60), "waited 60 s for the core's loop"
        self.watches.start()

    def close(self) -> None:
        self.watches.close(10)
        self._loop.call_soon_threadsafe(self._task.cancel)  # type: ignore[union-attr]
        self._thread.join(60)
        self.api.close()

    def knows_nodes(self, *names: str) -> None:
        """Waits until it knows these nodes and no others."""
        self.until(
            lambda: self.core.cache.objects.nodes.keys() == set(names), f"nodes {names}", lambda: str(self.nodes)
        )

    @property
    def nodes(self) -> list[str]:
        return sorted(self.core.cache.objects.nodes.copy())

    def count(self, name: str, **labels: str) -> float:
        return float(self.metrics.registry.get_sample_value(name, labels) or 0)

    def until(
        self,
        holds: Callable[[], bool],
        what: str,
        hint: Callable[[], str] = lambda: "",
        timeout_s: float = WAIT_S,
    ) -> None:
        wait_until(what, holds, timeout_s=timeout_s, every_s=0.05, hint=hint)

    def _main(self) -> None:
        async def run() -> None:
            self._task = asyncio.current_task()
            self._loop.call_soon(self._running.set)  # after the first step of the core
            await self.core.run()

        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(run())
        self._loop.close()


@contextlib.contextmanager
def replica(
    kubeconfig: Path,
    *,
    backoffs: Iterable[float] = REQUEST_BACKOFFS,
    ready: bool = True,
) -> Iterator[Replica]:
    """A replica that runs; ``ready``: that is waited for."""
    made = Replica(kubeconfig, backoffs)
    made.start()
    try:
        if ready:
            made.until(lambda: made.core.ready, "the replica to be ready")
        yield made
    finally:
        made.close()
