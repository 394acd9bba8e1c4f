"""A discrete-event model of the agreement, for more processes than one machine can run.

Each process waits for the notice, publishes where it is, waits for the entry after it, and is released by the last to
publish. What a request costs the service and what it costs the client, and what it takes a client to wake up, is
calibrated with one gang that really ran. CPUs are shared in the order of arrival. If all run on one host, the service
and the clients share its CPUs; on hosts of their own, the clients' work takes time, but no CPU of the service.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import simpy

from benchmarks.gang_scale_epochs import RUN_AHEAD

#: Requests of one process in a preemption that begins at once, up to its end, in which a drill ends for all.
_REQUESTS = 7.2
_NETWORK_S = 0.0005

_Steps = Generator[Any, Any, None]


@dataclasses.dataclass(frozen=True)
class Costs:
    """What is measured.

    Attributes:
        service_s: CPU time of the service for a request, or for an answer to one that waits.
        client_s: CPU time of a client for a request.
        wake_s: CPU time of a client from the answer of a request that waits until it has read it.
        cpus: How many CPUs serve.
        step_s: Seconds of a training step.
        one_host: Whether all processes share the CPUs with the service.
    """

    service_s: float
    client_s: float
    wake_s: float
    cpus: int
    step_s: float
    one_host: bool = True


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Seconds from the notice until 99 of 100 processes know of it, and until they have stopped."""

    known_s: float
    stopped_s: float


def calibrated(
    count: int, *, known_s: float, stopped_s: float, service_cpu_s: float, cpus: int, step_s: float
) -> Costs:
    """Returns the costs with which the model comes to what was measured of ``count`` processes.

    Args:
        count: How many processes there were.
        known_s: Seconds until 99 of 100 knew of the notice.
        stopped_s: Seconds until 99 of 100 had stopped.
        service_cpu_s: CPU time of the service in the whole preemption.
        cpus: CPUs of the host.
        step_s: Seconds of a training step.
    """
    service_s = service_cpu_s / (_REQUESTS * count)
    wake_s = max(0.0, known_s * cpus / count - service_s)
    # Between the two: two requests of each process, the second release, and the steps to the agreed point.
    rest_s = max(0.0, stopped_s - known_s - RUN_AHEAD * step_s / 2)
    client_s = max(0.0, (rest_s * cpus / count - 3 * service_s - wake_s) / 2)
    return Costs(service_s, client_s, wake_s, cpus, step_s)


def predict(count: int, costs: Costs) -> Predicted:
    """Runs the model with ``count`` processes."""
    return _Run(count, costs).run()


class _Run:
    """One notice that is acted upon at once."""

    def __init__(self, count: int, costs: Costs) -> None:
        self._count = count
        self._costs = costs
        self._env = simpy.Environment()
        self._cpus = simpy.Resource(self._env, costs.cpus)
        self._notice, self._agreed = self._env.event(), self._env.event()
        self._arrived = 0
        self._known_s: list[float] = []
        self._stopped_s: list[float] = []

    def run(self) -> Predicted:
        self._env.process(self._tell())
        for _ in range(self._count):
            self._env.process(self._process())
        self._env.run()
        return Predicted(_p99(self._known_s), _p99(self._stopped_s))

    def _tell(self) -> _Steps:
        yield from self._request()
        self._notice.succeed()

    def _process(self) -> _Steps:
        yield self._notice
        yield from self._woken()
        known_s = self._env.now
        self._known_s.append(known_s)
        yield from self._request()
        self._arrived += 1
        if self._arrived == self._count:
            yield from self._request()
            self._agreed.succeed()
        yield from self._request()
        yield self._agreed
        yield from self._woken()
        behind = min(RUN_AHEAD, int((self._known_s[-1] - known_s) / self._costs.step_s))
        yield self._env.timeout(behind * self._costs.step_s)
        self._stopped_s.append(self._env.now)

    def _request(self) -> _Steps:
        yield from self._client(self._costs.client_s)
        yield from self._work(self._costs.service_s)

    def _woken(self) -> _Steps:
        yield from self._work(self._costs.service_s)
        yield from self._client(self._costs.wake_s)

    def _client(self, seconds: float) -> _Steps:
        if self._costs.one_host:
            yield from self._work(seconds)
        else:
            yield self._env.timeout(seconds + _NETWORK_S)

    def _work(self, seconds: float) -> _Steps:
        with self._cpus.request() as turn:
            yield turn
            yield self._env.timeout(seconds)


def _p99(found_s: list[float]) -> float:
    return sorted(found_s)[int(0.99 * len(found_s))]
