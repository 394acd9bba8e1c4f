"""Some of the processes of ``benchmarks.gang_scale``, all in one process of the system: threads on real clients.

Arguments: the service's address, the first process index, how many are here, how many there are in all, and a file that
all workers map. Each process has a client of its own, connected by a thread of its own, and the library's agreement and
process group on it. JAX itself is not initialised. Training is synchronous, as the collectives of a step make it: no
process is more than ``RUN_AHEAD`` steps ahead of the slowest of all, which the workers tell each other in the file.

Threads: the agreement's two for each process; one that stands for training where it waits (``_Process.run``); and one
that passes the sync points of all processes here (``tick``), as they cost nothing while nothing is wrong. The main
thread reads commands, one line of JSON each, and answers each with one line.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import mmap
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gang_scale_epochs import RUN_AHEAD, STEP_S, Epoch, Times
from gracepoint.deadline import Deadline
from gracepoint.multihost import Agreement, StoreProcessGroup
from gracepoint.multihost import agreement as timekeeper
from gracepoint.multihost.ledger import Broken, Closed, Event, Noticed, Opened, Retracted
from gracepoint.multihost.protocol import Verdict
from gracepoint.multihost.store import JaxStore
from gracepoint.preemption.emergency_save import _STAGES_OF

_TIMEOUT_S = 120.0
_STAGES = "x" * 120  # as long as ``Stages`` are as text
_SITUATION = "x" * 380  # as long as ``deadline_plan.Situation`` is as text


class CountingStore(JaxStore):
    """Counts requests, and the bytes of keys and values in both directions."""

    def __init__(self, client: Any, root: str) -> None:
        super().__init__(client, root)
        self.requests = 0
        self.bytes = 0
        self.ahead = 0
        self._lock = threading.Lock()

    def count(self, *texts: str | None) -> None:
        with self._lock:
            self.requests += 1
            self.bytes += sum(len(text) for text in texts if text) + len(self._root)

    def set(self, key: str, value: str) -> None:
        self.count(key, value)
        self.ahead += "/ahead/" in key
        super().set(key, value)

    def get(self, key: str, *, timeout_s: float) -> str:
        self.count(key)
        value = super().get(key, timeout_s=timeout_s)
        self.bytes += len(value)
        return value

    def try_get(self, key: str) -> str | None:
        value = super().try_get(key)
        self.count(key, value)
        return value

    def increment(self, key: str, by: int = 1) -> int:
        value = super().increment(key, by)
        self.count(key, str(by), str(value))
        return value

    def list(self, folder: str) -> dict[str, str]:
        found = super().list(folder)
        self.count(folder, *found.keys(), *found.values())
        return found

    def delete_folder(self, folder: str) -> None:
        self.count(folder)
        super().delete_folder(folder)


class _Process:
    """One process of the gang; an observer of its own agreement."""

    def __init__(self, client: Any, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self.epoch = Epoch("none")
        self.times = Times()
        self.done = threading.Event()
        self.until_s = math.inf
        self.start_at_s = math.inf
        self.held = threading.Semaphore(0)
        self.training = True
        self.error: str | None = None
        self._began = (0, 0, 0)
        self.store = CountingStore(client, "gracepoint/scale")
        self.gang = StoreProcessGroup(self.store, index, count)
        self.agreement = Agreement(self.store, self.gang, self)
        threading.Thread(target=self.run, daemon=True).start()

    def begin(self, epoch: Epoch) -> None:
        """Makes ready for a preemption that is about to come."""
        self.epoch, self.times, self.error = epoch, Times(), None
        self.done.clear()
        self._began = (self.store.requests, self.store.bytes, self.store.ahead)
        self.until_s = time.monotonic() + epoch.left_s
        self.start_at_s = -math.inf if epoch.start_in_s is None else time.monotonic() + epoch.start_in_s

    def tick(self) -> None:
        """Passes a sync point. Where the agreement would hold it, ``run`` goes on."""
        if self.training:
            self.agreement.seat.ordinal += 1  # the two lines of ``Agreement.arrive``
            if self.agreement.seat.epoch is not None:
                self.training = False
                self.held.release()

    def run(self) -> None:
        while self.held.acquire():
            try:
                if self.agreement._held() is Verdict.SAVE:
                    self.save()
            except Exception as error:  # noqa: BLE001 - told with the times
                self.error = f"{type(error).__name__}: {error}"
                if self.epoch.drill:
                    self.agreement.end_epoch()
            self.training = True

    def save(self) -> None:
        """What ``EmergencySave`` asks of the other processes."""
        times, epoch = self.times, self.agreement.seat.epoch
        times.stopped_s, times.stopped_at = time.monotonic(), self.agreement.seat.ordinal
        deadline = Deadline.after(_TIMEOUT_S, time.monotonic)
        self.agreement.confirm(self.agreement.seat.ordinal, _SITUATION, lambda words: words[0], deadline=deadline)
        times.met_s = time.monotonic()
        self.gang.barrier(f"epoch/{epoch}/commit", timeout_s=_TIMEOUT_S, on_last=lambda: None)
        times.committed_s = time.monotonic()
        some = range(0, self.count, -(-self.count // _STAGES_OF))
        if self.index in some:
            self.gang.gather(f"epoch/{epoch}/stages", _STAGES, timeout_s=_TIMEOUT_S, processes=some)
        if not self.epoch.drill:
            self.finished()
        self.agreement.end_epoch()

    def finished(self) -> None:
        self.times.ended_s = time.monotonic()
        requests, size, ahead = self._began
        self.times.requests = self.store.requests - requests
        self.times.bytes = self.store.bytes - size
        self.times.ahead = self.store.ahead - ahead
        self.done.set()

    # As ``multihost.Observer``.

    def heard(self, event: Event) -> None:
        match event:
            case Noticed():
                self.times.known_s = time.monotonic()
            case Opened():
                self.times.opened_s = time.monotonic()
                if self.index in self.epoch.late:
                    time.sleep(self.epoch.late_s)
            case Closed() | Retracted() | Broken():
                self.finished()

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        return self.start_at_s - time.monotonic()

    def time_left_s(self) -> float:
        return self.until_s - time.monotonic()

    def position(self) -> tuple[int, bool]:
        return self.agreement.seat.ordinal, self.epoch.meets

    def looked(self) -> None:
        pass


class Worker:
    """All processes here."""

    def __init__(self, address: str, first: int, here: int, count: int, paces: str) -> None:
        from jaxlib import _jax

        clients = [
            _jax.get_distributed_runtime_client(address, index, init_timeout=60, use_compression=False)
            for index in range(first, first + here)
        ]
        began_s = time.monotonic()
        _each(clients, lambda client: client.connect())
        self.connected_s = time.monotonic() - began_s
        self.processes = [_Process(client, first + place, count) for place, client in enumerate(clients)]
        self._clients = clients
        self._place = first // here
        with open(paces, "r+b") as file:
            self._slowest = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")  # of each worker
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        while True:
            time.sleep(STEP_S * random.uniform(0.5, 1.5))
            self._slowest[self._place] = min(process.agreement.seat.ordinal for process in self.processes)
            limit = min(self._slowest) + RUN_AHEAD
            for process in self.processes:
                if process.agreement.seat.ordinal < limit:
                    process.tick()

    def begin(self, epoch: Epoch) -> dict[str, Any]:
        """Makes all processes here ready."""
        for process in self.processes:
            process.begin(epoch)
        return {}

    def tell(self, by: int, epoch: Epoch) -> dict[str, Any]:
        """Tells of the notice, in one process."""
        agreement = self._process(by).agreement
        told_s = time.monotonic()
        agreement.tell(epoch.name, "", remaining_s=epoch.left_s, drill=epoch.drill, once=True)
        if epoch.take_back_s is not None:
            time.sleep(epoch.take_back_s)
            agreement.take_back(epoch.name, "told so")
        return {"told_s": told_s}

    def results(self, timeout_s: float) -> dict[str, Any]:
        """Waits until the preemption is over in all processes here."""
        until_s = time.monotonic() + timeout_s
        late = [p.index for p in self.processes if not p.done.wait(max(0.0, until_s - time.monotonic()))]
        return {
            "times": [dataclasses.astuple(p.times) for p in self.processes],
            "errors": [p.error for p in self.processes if p.error],
            "late": late,
        }

    def requests(self) -> dict[str, Any]:
        """How many there were so far, and how large this process is."""
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {"requests": sum(p.store.requests for p in self.processes), "resident_bytes": size}

    def _process(self, index: int) -> _Process:
        return self.processes[index - self.processes[0].index]


def _each(items: list[Any], call: Callable[[Any], Any]) -> None:
    """Calls with each item, all at the same time."""
    threads = [threading.Thread(target=call, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Obeys until the input ends."""
    logging.disable(logging.WARNING)
    threading.stack_size(256 << 10)
    sys.setswitchinterval(0.5)  # every thread that waits for the interpreter's lock wakes up so often
    address, first, here, count = sys.argv[1], *map(int, sys.argv[2:5])
    timekeeper._LOOK_EVERY_S = max(0.5, count / 1000)  # these looks ask nobody, and here two cores do them for all
    worker = Worker(address, first, here, count, sys.argv[5])
    print(json.dumps({"connected_s": worker.connected_s}), flush=True)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        do = command.pop("do")
        if "epoch" in command:
            command["epoch"] = Epoch(**command["epoch"])
        print(json.dumps(getattr(worker, do)(**command)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
