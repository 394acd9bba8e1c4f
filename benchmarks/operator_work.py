"""What each piece of work costs the controller's event loop, in CPU seconds, in a large cluster.

    python -m benchmarks.operator_work [--scale 1.0] [--top 3] [--json FILE]
    python -m benchmarks.operator_work --scrapes 5000 [--json FILE]

A real controller runs over an API server in memory, with as many objects as in ``benchmarks.operator_scale``, times
``--scale``. Nothing goes over a network, and the API server's work is done in another thread. Each callback of the
controller's loop is measured in CPU time of its thread, so other work on the machine changes the figures little. The
figure that counts is the longest callback of each phase: so long nothing else on the loop can run. With ``--scrapes``
there are so many JobSets of four pods, and all that is measured is what scrapes of the metrics cost.

Threads: the controller's loop, one for the streams of the pods, one for the API server. All end with the process.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import gc
import heapq
import statistics
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from benchmarks import report
from benchmarks.operator_scale_objects import Gang, Size, gangs
from benchmarks.operator_work_api import StoredApi
from gracepoint.version import __version__
from gracepoint.wire.messages import Acknowledgement, Subscription
from gracepoint_operator import event_loop
from gracepoint_operator.__main__ import _THREADS_TAKE_TURNS_S
from gracepoint_operator.cache.relister import sweep
from gracepoint_operator.channel.notifier import Subscriber
from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.event_loop import LoopCalls
from gracepoint_operator.kube import objects
from gracepoint_operator.metrics import Metrics

_TAINT = "aws-node-termination-handler/scheduled-maintenance"
_SMALL = 20
_TIMEOUT_S = 300.0
_QUIET_S = 0.3
_LONGEST_S = 0.1
_SCRAPE_S = 0.05
_SCRAPES = 5

_T = TypeVar("_T")


@dataclasses.dataclass
class Phase:
    """What the loop did in one phase.

    Attributes:
        wall_s: How long it lasted.
        cpu_s: CPU of all callbacks.
        callbacks: How many there were.
        longest: The longest ones: CPU seconds and what they were.
    """

    name: str
    wall_s: float
    cpu_s: float
    callbacks: int
    longest: list[tuple[float, str]]


class Meter:
    """Measures the callbacks of one thread's loop.

    Args:
        thread: The name of the thread.
        top: How many of the longest callbacks are kept.
    """

    def __init__(self, thread: str, top: int) -> None:
        self._thread = thread
        self._top = top
        self._cpu_s = 0.0
        self._callbacks = 0
        self._longest: list[tuple[float, int, str]] = []
        self._began_s = time.monotonic()
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            if threading.current_thread().name != thread:
                run(handle)
                return
            what = handle._callback  # type: ignore[attr-defined]
            worked_s = time.thread_time()
            run(handle)
            worked_s = time.thread_time() - worked_s
            self._cpu_s += worked_s
            self._callbacks += 1
            if len(self._longest) < top:
                heapq.heappush(self._longest, (worked_s, self._callbacks, _named(what)))
            elif worked_s > self._longest[0][0]:
                heapq.heapreplace(self._longest, (worked_s, self._callbacks, _named(what)))

        asyncio.Handle._run = measured  # type: ignore[assignment,method-assign]

    def take(self, name: str) -> Phase:
        """Ends a phase."""
        longest = [(worked_s, what) for worked_s, _, what in sorted(self._longest, reverse=True)]
        took_s = time.monotonic() - self._began_s
        phase = Phase(name, took_s, self._cpu_s, self._callbacks, longest)
        self._cpu_s, self._callbacks, self._longest, self._began_s = 0.0, 0, [], time.monotonic()
        said = "".join(f"\n      {worked_s * 1000:7.1f} ms  {what}" for worked_s, what in longest)
        print(f"{name}: {took_s:.1f} s, CPU {phase.cpu_s:.3f} s in {phase.callbacks} callbacks{said}", file=sys.stderr)
        return phase


def _named(callback: Any) -> str:
    while isinstance(callback, functools.partial):
        callback = callback.func
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_name().split(' (')[0]} {getattr(task.get_coro(), '__qualname__', '')}"
    return str(getattr(callback, "__qualname__", callback))


class _Run:
    """The controller and its pods.

    Args:
        size: How many objects there are.
        top: As for ``Meter``.
    """

    def __init__(self, size: Size, top: int) -> None:
        self.gangs = gangs(size)
        self.api = StoredApi(size)
        self.metrics = Metrics()
        self.core = Controller(self.api, self.metrics, time.time, ControllerSettings("one", replicas=2))
        self.api.on_change = self._seen
        self.meter = Meter("controller", top)
        self.streams = asyncio.new_event_loop()
        self.told: collections.Counter[str] = collections.Counter()
        self._subscribers: dict[str, Subscriber] = {}
        self._to_streams = LoopCalls(self.streams)
        threading.Thread(target=self.streams.run_forever, name="streams", daemon=True).start()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._main, name="controller", daemon=True).start()

    def on_core(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_TIMEOUT_S)

    def connect(self, gang: Gang, index: int) -> None:
        hello = Subscription(
            namespace=gang.namespace,
            pod_name=gang.pod_name(index),
            pod_uid=gang.pod_uid(index),
            session=f"session-{gang.pod_uid(index)}",
            workload_uid=gang.uid,
            restart_attempt=0,
            process_index=index,
            process_count=gang.count,
            library_version=__version__,
            takes_hints=False,
        )
        subscriber = self._subscribers[hello.pod_uid] = Subscriber(hello, self._to_streams)
        asyncio.run_coroutine_threadsafe(self._stream(subscriber), self.streams)

    def acknowledge(self, gang: Gang, index: int) -> None:
        uid = gang.pod_uid(index)
        (preemption,) = self._subscribers[uid].sent_deadlines
        receipt = Acknowledgement(pod_uid=uid, session=f"session-{uid}", preemption=preemption, process_index=index)
        asyncio.run_coroutine_threadsafe(self._acknowledged(receipt), self.streams)

    def taint(self, gang: Gang, value: str | None) -> None:
        taints = [] if value is None else [{"key": _TAINT, "value": value, "effect": "NoSchedule"}]
        body = self.api.merged(objects.NODES, None, gang.node(0), {"spec": {"taints": taints}})
        self.core.feed(objects.NODES, "MODIFIED", body)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + _TIMEOUT_S
        while not holds():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{what}: not after {_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def settle(self) -> None:
        """Waits until nothing is to be decided or written."""
        quiet_since = time.monotonic()

        def quiet() -> bool:
            nonlocal quiet_since
            if self._busy():
                quiet_since = time.monotonic()
            return time.monotonic() - quiet_since > _QUIET_S

        self.until(quiet, "the end of all work")

    def _busy(self) -> bool:
        core = self.core
        queues = [core.writers.preemptions._write_queue, core.writers.policies._write_queue]
        return bool(core._decisions._waiting or core._decisions._round or any(queue._tasks for queue in queues))

    async def _stream(self, subscriber: Subscriber) -> None:
        await self.core.channel._on_core(self._admitted(subscriber))
        while (outgoing := await subscriber.next()) is not None:
            outgoing.make().to_json()
            self.told[subscriber.hello.workload_uid] += 1
            self.core.channel._post(outgoing.written)

    async def _acknowledged(self, receipt: Acknowledgement) -> None:
        await self.core.channel._on_core(self.core.channel._take_in("", receipt))

    async def _admitted(self, subscriber: Subscriber) -> None:
        token = self.api.token_of(subscriber.hello.namespace, subscriber.hello.pod_uid)
        await self.core.channel._admit_subscriber(f"Bearer {token}", subscriber)
        self.core.channel._catch_up(subscriber)

    def _seen(self, kind: objects.Kind, event: str, body: dict[str, Any]) -> None:
        """A watch brings what was written."""
        self.core.feed(kind, event, body)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.core.run())


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of objects (%(default)s)")
    parser.add_argument("--top", type=int, default=3, help="name so many of the longest callbacks (%(default)s)")
    parser.add_argument("--scrapes", type=int, metavar="JOBSETS", help="measure scrapes alone, with so many JobSets")
    flags = parser.parse_args()
    event_loop.restrain()
    if flags.scrapes:
        count = flags.scrapes
        size = Size(nodes=count, pods=4 * count, jobsets=count, unrelated=0, records=2, big=4)
        found = scrapes(_Run(size, flags.top))
        report.publish(found, flags.json, jobsets=count)
        return 1 if any(figure.met is False for figure in found) else 0
    phases, others = measure(_Run(dataclasses.replace(Size.of(flags.scale), unrelated=0), flags.top))
    found = [*_figures(phases), *others]
    report.publish(found, flags.json, scale=flags.scale)
    return 1 if any(figure.met is False for figure in found) else 0


def measure(run: _Run) -> tuple[list[Phase], list[report.Figure]]:
    """Runs the phases."""
    meter, core, big = run.meter, run.core, run.gangs[0]
    run.until(lambda: core.ready, "the first list")
    phases = [meter.take("start: until ready")]
    event_loop.spare_what_is_known()
    run.settle()
    phases.append(meter.take("start: all are decided about"))
    time.sleep(10.0)
    phases.append(meter.take("idle, 10 s"))

    async def compared() -> None:
        await sweep(run.api, core.cache, lambda uid: set(), core.watches, metadata_only=True)

    run.on_core(compared())
    phases.append(meter.take("all versions compared"))
    members = [(big, index) for index in range(big.count)] + [(gang, 0) for gang in run.gangs[1:]]
    for gang, index in members:
        run.connect(gang, index)
    run.until(lambda: len(core.subscribers) == len(members), "all connected")
    run.settle()
    phases.append(meter.take(f"{len(members)} pods connect"))
    run.on_core(core.connection_writer.look())
    run.settle()
    phases.append(meter.take("connections counted and written"))
    run.on_core(core._garbage_collector.prune())
    phases.append(meter.take("old records looked through"))
    for gang in run.gangs[6 : 6 + _SMALL]:
        run.taint(gang, "0")
        run.until(lambda gang=gang: run.told[gang.uid] == 1, "the notice")  # type: ignore[misc]
        run.acknowledge(gang, 0)
    run.settle()
    phases.append(meter.take(f"{_SMALL} disruptions of {run.gangs[6].count} pods"))
    run.taint(big, "1")
    run.until(lambda: run.told[big.uid] == big.count, "all notices")
    phases.append(meter.take(f"{big.count} pods are told"))
    run.settle()
    phases.append(meter.take("that is recorded"))
    for index in range(big.count):
        run.acknowledge(big, index)
        if index % 100 == 99:
            time.sleep(0.1)  # a library spreads them
    run.settle()
    phases.append(meter.take(f"{big.count} acknowledge"))
    run.taint(big, None)
    run.until(lambda: run.told[big.uid] == 2 * big.count, "all retractions")
    run.settle()
    phases.append(meter.take(f"{big.count} are told that it is over"))
    for gang in run.gangs[30:50]:
        run.on_core(core.evictions.attempted(gang.namespace, gang.pod_name(0), None))
    run.on_core(core.evictions.attempted(big.namespace, big.pod_name(0), None))
    run.until(lambda: run.told[big.uid] == 3 * big.count, "all notices of the eviction")
    run.settle()
    phases.append(meter.take("21 evictions, one of the big gang"))
    return phases, _collections(run)


def scrapes(run: _Run) -> list[report.Figure]:
    """What it costs to tell the metrics with all accounts, as the health port does it."""
    sys.setswitchinterval(_THREADS_TAKE_TURNS_S)  # as in the operator
    run.until(lambda: run.core.ready, "the first list")
    event_loop.spare_what_is_known()
    run.settle()
    run.meter.take("start")
    late_s: list[float] = []

    async def measured() -> None:
        while True:
            due_at = run.loop.time() + 0.005
            await asyncio.sleep(0.005)
            late_s.append(run.loop.time() - due_at)

    async def scraped() -> tuple[float, bytes]:
        began_s = time.monotonic()
        await run.metrics.update_accounts()
        text = await asyncio.to_thread(run.metrics.text)
        return time.monotonic() - began_s, text

    found = []
    for what in ("nobody asks", "scrapes"):
        probe = asyncio.run_coroutine_threadsafe(measured(), run.loop)
        if what == "scrapes":
            took = [run.on_core(scraped()) for _ in range(_SCRAPES)]
        else:
            time.sleep(_SCRAPES)
        probe.cancel()
        phase, worst_s = run.meter.take(what), max(late_s)
        late_s.clear()
        goal_s = _SCRAPE_S if what == "scrapes" else None
        found.append(report.Figure(f"{what}: the loop was late at most", worst_s, "s", goal_s))
    series = sum(line.startswith(b"gracepoint_goodput_seconds{") for line in took[-1][1].splitlines())
    return [
        *found,
        report.Figure("scrapes: CPU of the longest callback", phase.longest[0][0], "s", _SCRAPE_S),
        report.Figure("scrapes: CPU of the loop for each", phase.cpu_s / _SCRAPES, "s"),
        report.Figure("scrapes: how long one takes", max(one for one, _ in took), "s"),
        report.Figure("scrapes: bytes of the text", float(len(took[-1][1])), ""),
        report.Figure("scrapes: series of accounts", float(series), ""),
    ]


def _collections(run: _Run) -> list[report.Figure]:
    """What garbage collections cost now."""

    async def collected(whole: bool) -> float:
        began_s = time.thread_time()
        event_loop._collect(whole)
        return time.thread_time() - began_s

    new_s = run.on_core(collected(False))
    again_s = statistics.median(run.on_core(collected(False)) for _ in range(3))
    whole_s = run.on_core(collected(True))
    return [
        report.Figure("garbage: what is new since the start, CPU", new_s, "s"),
        report.Figure("garbage: what is new, at once again, CPU", again_s, "s"),
        report.Figure("garbage: everything, CPU", whole_s, "s"),
        report.Figure("garbage: objects", float(gc.get_freeze_count()), ""),
    ]


def _figures(phases: Sequence[Phase]) -> list[report.Figure]:
    found = []
    for phase in phases:
        found.append(report.Figure(f"{phase.name}: CPU of the loop", phase.cpu_s, "s"))
        longest_s = phase.longest[0][0] if phase.longest else 0.0
        found.append(report.Figure(f"{phase.name}: CPU of the longest callback", longest_s, "s", _LONGEST_S))
    return found


if __name__ == "__main__":
    sys.exit(main())
