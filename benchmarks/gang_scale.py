"""The agreement and the save's meetings at size: thousands of real clients of the real coordination service.

    python -m benchmarks.gang_scale [--counts 64,512,2048,4096] [--idle-s 60] [--json FILE]

The library's own agreement and process group run on clients that ``jaxlib`` connects to its coordination service, many
in each process of this host, with threads of their own; JAX's backends are not initialised, and nothing is computed.
Each gang goes through the preemptions of ``EPOCHS``: notices that act at once and later, a background save under way, a
process that is late, one that never answers, a retraction, drills and a preemption. Then it is idle.

Everything runs on this host: the figures hold the clients' time as well, which thousands of hosts would share.

A discrete-event model (``gang_scale_model``), whose costs are measured here with one size, predicts the others and
16,384 processes. Its predictions are printed beside what was measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import gang_scale_model, report
from benchmarks.gang_scale_epochs import STEP_S, Epoch, Times
from benchmarks.report import Figure

COUNTS = (64, 512, 2048, 4096)
MODELLED_COUNT = 16_384
#: The model's costs are measured with the first of these sizes that was run.
CALIBRATED_WITH = (512, 64)
_WORKERS = {64: 1, 128: 1, 256: 2, 512: 2}
_MORE_WORKERS = 4
_START_TIMEOUT_S = 120.0
_REQUESTS_GOAL = 8
_BYTES_GOAL = 64 << 10
#: Seconds until all but one in a hundred processes know of the notice, and until they have stopped.
_GOALS_S = {512: (0.3, 1.0), 4096: (2.0, 5.0)}
_LATE_S = 5.0


def epochs(count: int) -> list[Epoch]:
    """Returns what a gang goes through. The last one is a preemption, which ends it."""
    slow, dead = count // 2, count // 3
    return [
        Epoch("first", start_in_s=1.0),
        Epoch("second", start_in_s=1.0),
        Epoch("at once"),
        Epoch("saving", start_in_s=1.0, meets=True),
        Epoch("late", late=[slow], late_s=_LATE_S),
        Epoch("retracted", start_in_s=30.0, take_back_s=0.5),
        Epoch("death", left_s=4.0, late=[dead], late_s=12.0),
        Epoch("preemption", start_in_s=1.0, drill=False),
    ]


class _Child:
    """A process of this host that answers each line with one."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)

    def send(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self._process.args!r}: expected an answer, found its end: {''.join(self._errors[-20:])}"
            )
        return line

    def cpu_s(self) -> float:
        """Returns the CPU time that it has used."""
        with open(f"/proc/{self._process.pid}/stat") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Returns the memory that it has now."""
        with open(f"/proc/{self._process.pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        with self._process:  # closes the pipes
            self._process.kill()
            self._reader.join(10)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was measured of one preemption.

    Attributes:
        preemption: The preemption.
        told_s: When the notice was told.
        times: Of each process.
        errors: What processes raised at their sync point.
        service_cpu_s: CPU time of the service.
    """

    epoch: Epoch
    told_s: float
    times: Sequence[Times]
    errors: Sequence[str]
    service_cpu_s: float

    def after_s(self, stage: str, part: float) -> float:
        """Returns the seconds after the notice in which this part of the processes had reached a stage."""
        found: list[float] = sorted(getattr(times, stage) - self.told_s for times in self.times)
        return found[min(len(found) - 1, int(part * len(found)))]

    def requests(self) -> float:
        """Returns the mean number of requests of a process."""
        return statistics.fmean(times.requests for times in self.times)


class Gang:
    """A service and its clients, in processes of this host."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._service = _Child("gang_scale_service", count)
        address = self._service.read().strip()
        workers = _WORKERS.get(count, _MORE_WORKERS)
        here = count // workers
        with tempfile.NamedTemporaryFile(delete=False) as paces:
            paces.write(bytes(8 * workers))
        self._paces = paces.name
        self._workers = [
            _Child("gang_scale_worker", address, place * here, here, count, self._paces) for place in range(workers)
        ]
        self.connected_s = max(json.loads(worker.read())["connected_s"] for worker in self._workers)

    def run(self, epoch: Epoch) -> Seen:
        """Goes through one preemption."""
        plain = dataclasses.asdict(epoch)
        self._all("begin", epoch=plain)
        cpu_s = self._service.cpu_s()
        self._workers[0].send("tell", by=1, epoch=plain)
        told_s = json.loads(self._workers[0].read())["told_s"]
        answers = self._all("results", timeout_s=60.0)
        cpu_s = self._service.cpu_s() - cpu_s
        late = [index for answer in answers for index in answer["late"]]
        if late:
            raise TimeoutError(f"epoch {epoch.name!r}: waited 60 s for {len(late)} of {self.count}, as {late[:5]}")
        times = [Times(*each) for answer in answers for each in answer["times"]]
        time.sleep(epoch.late_s - epoch.left_s if epoch.late_s > epoch.left_s else 0.5)  # until the late one is back
        return Seen(epoch, told_s, times, [e for answer in answers for e in answer["errors"]], cpu_s)

    def idle(self, seconds: float) -> int:
        """Returns how many requests all processes make in this time while nothing happens."""
        before = self._requests()
        time.sleep(seconds)
        return self._requests() - before

    def service_bytes(self) -> int:
        """Returns the service's memory."""
        return self._service.resident_bytes()

    def end(self) -> None:
        """Ends all its processes."""
        for child in (*self._workers, self._service):
            child.end()
        os.unlink(self._paces)

    def _requests(self) -> int:
        return sum(answer["requests"] for answer in self._all("requests"))

    def _all(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        for worker in self._workers:
            worker.send(do, **arguments)
        return [json.loads(worker.read()) for worker in self._workers]


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="processes (%(default)s)")
    parser.add_argument("--idle-s", type=float, default=60.0, help="seconds without anything (%(default)s)")
    flags = parser.parse_args()
    load = os.getloadavg()[0]  # before there is any of our own
    print(f"load average of the last minute: {load:.2f} on {os.cpu_count()} CPUs", flush=True)
    by_count: dict[int, list[Seen]] = {}
    told: list[Figure] = []
    for count in map(int, flags.counts.split(",")):
        seen, more = measure(count, flags.idle_s)
        by_count[count] = seen
        told += [figure for each in seen for figure in figures(count, each)] + more
    told += modelled(by_count)
    report.publish(told, flags.json, load_average=load)
    return 1 if any(figure.met is False for figure in told) else 0


def measure(count: int, idle_s: float) -> tuple[list[Seen], list[Figure]]:
    """Runs one gang through everything."""
    gang = Gang(count)
    try:
        print(f"{count} processes connected within {gang.connected_s:.1f} s", flush=True)
        before_bytes = gang.service_bytes()
        seen: list[Seen] = []
        idle: int | None = None
        for epoch in epochs(count):
            if not epoch.drill:
                idle = gang.idle(idle_s)
            seen.append(gang.run(epoch))
            one = seen[-1]
            print(f"  {epoch.name}: {one.requests():.2f} requests a process, {len(one.errors)} errors", flush=True)
        grown = gang.service_bytes() - before_bytes
    finally:
        gang.end()
    on_time, late = (next(s for s in seen if s.epoch.name == name) for name in ("at once", "late"))
    others = [t.requests - t.ahead for i, t in enumerate(late.times) if i not in late.epoch.late]
    more = [
        Figure(f"{count}: requests of all in {idle_s:g} s without anything", idle, "requests", 0),
        Figure(
            f"{count}: requests that a late process adds to the others, median",
            statistics.median(others) - statistics.median(t.requests - t.ahead for t in on_time.times),
            "requests",
            0,
        ),
        Figure(f"{count}: memory of the service, grown in all epochs", grown / 2**20, "MiB"),
    ]
    return seen, more


def figures(count: int, seen: Seen) -> list[Figure]:
    """Tells of one preemption."""
    epoch, name = seen.epoch, f"{count}, {seen.epoch.name}"
    measured = epoch.name in ("at once", "preemption")
    known_s, stopped_s = _GOALS_S.get(count, (None, None)) if measured else (None, None)
    told = [Figure(f"{name}: known, p99", seen.after_s("known_s", 0.99), "s", known_s)]
    start_s = epoch.start_in_s or 0.0
    if epoch.name == "death":
        told.append(Figure(f"{name}: given up, after the deadline", seen.after_s("ended_s", 0.98) - epoch.left_s, "s"))
    elif epoch.take_back_s is not None:
        told.append(Figure(f"{name}: retracted in all, p99", seen.after_s("ended_s", 0.99) - epoch.take_back_s, "s"))
    else:
        told += [
            Figure(f"{name}: stopped, p99", seen.after_s("stopped_s", 0.99) - start_s, "s", stopped_s),
            Figure(f"{name}: committed, p99", seen.after_s("committed_s", 0.99) - start_s, "s"),
        ]
    # A drill ends for all together, by two requests more than a preemption.
    goal = _REQUESTS_GOAL if epoch.name == "preemption" else None
    return [
        *told,
        Figure(f"{name}: requests a process", seen.requests(), "requests", goal),
        Figure(f"{name}: largest number of bytes of a process", max(t.bytes for t in seen.times), "bytes"),
        Figure(
            f"{name}: bytes a process",
            statistics.fmean(t.bytes for t in seen.times),
            "bytes",
            _BYTES_GOAL if goal is not None else None,
        ),
        Figure(f"{name}: CPU of process 0's service", seen.service_cpu_s, "s"),
    ]


def modelled(by_count: dict[int, list[Seen]]) -> list[Figure]:
    """Tells what the model predicts, beside what was measured."""
    calibrated = next((count for count in CALIBRATED_WITH if count in by_count), None)
    if calibrated is None:
        return []
    real = {count: next(s for s in seen if s.epoch.name == "at once") for count, seen in by_count.items()}
    one = real[calibrated]
    costs = gang_scale_model.calibrated(
        calibrated,
        known_s=one.after_s("known_s", 0.99),
        stopped_s=one.after_s("stopped_s", 0.99),
        service_cpu_s=one.service_cpu_s,
        cpus=os.cpu_count() or 1,
        step_s=STEP_S,
    )
    told = [
        Figure(f"model, calibrated with {calibrated}: a request, the service's CPU", 1e3 * costs.service_s, "ms"),
        Figure(f"model, calibrated with {calibrated}: a request, the client's CPU", 1e3 * costs.client_s, "ms"),
        Figure(f"model, calibrated with {calibrated}: a client that wakes up", 1e3 * costs.wake_s, "ms"),
    ]
    for count in (*real, MODELLED_COUNT):
        predicted = gang_scale_model.predict(count, costs)
        told += [
            Figure(f"model, {count}: known, p99", predicted.known_s, "s"),
            Figure(f"model, {count}: stopped, p99", predicted.stopped_s, "s"),
        ]
        if count in real:
            told += [
                Figure(f"real, {count}: known, p99", real[count].after_s("known_s", 0.99), "s"),
                Figure(f"real, {count}: stopped, p99", real[count].after_s("stopped_s", 0.99), "s"),
            ]
    apart = dataclasses.replace(costs, one_host=False)
    for count in (*COUNTS, MODELLED_COUNT):
        predicted = gang_scale_model.predict(count, apart)
        told += [
            Figure(f"model, {count} on hosts of their own: known, p99", predicted.known_s, "s"),
            Figure(f"model, {count} on hosts of their own: stopped, p99", predicted.stopped_s, "s"),
        ]
    return told


if __name__ == "__main__":
    sys.exit(main())
