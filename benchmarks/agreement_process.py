"""One process of ``benchmarks.agreement``: what a sync point costs, and how soon all stop, ours and JAX's in one.

Argument: how many notices of ours. JAX's comes once, after them, as its service tells of one in its lifetime. The
steps are sleeps that end at the same moments in all processes, as those of synchronous training do, and take no CPU
from the notice's way. Moments are seconds of CLOCK_MONOTONIC, which is one clock for all processes of a host. A
notice is told by a thread of its own, as receivers do, by each process in turn, at any moment of a step.

Process 0 prints what all have found, as ``benchmarks.agreement.Measured``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable, Mapping

from benchmarks.agreement import MEASURED, Measured
from gracepoint.deadline import Deadline
from gracepoint.multihost import Agreement, meet
from gracepoint.multihost.ledger import Closed, Event, Noticed
from gracepoint.process_group import ProcessGroup
from gracepoint.settings import Settings
from tests.multiprocess.launcher import here

STEP_S = 0.010
_STEPS_BEFORE = (5, 10)  # until a notice is told
_HEAD_START_S = 0.02  # from the agreement on a first step to that step
_TIMEOUT_S = 30.0
_BLOCKS, _CALLS = 500, 200  # a block is over before the scheduler gives the CPU to another, mostly


def main() -> None:
    """Measures, and prints it in process 0."""
    here().initialize_jax()
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    meeting = meet(Settings())
    gang = meeting.gang
    observer = Observer()
    agreement = Agreement(meeting.store, gang, observer)
    idle: dict[str, list[float]] = {"agreement.arrive()": [], "reached(0)": []}
    for turn in range(gang.process_count):  # the others leave the CPU to it
        if turn == gang.process_index:
            measure_calls(idle, {"agreement": agreement, "reached": reached_preemption_sync_point})
        gang.barrier(f"idle/{turn}", timeout_s=_TIMEOUT_S)
    ours = [one_of_ours(agreement, observer, gang, number) for number in range(int(sys.argv[1]))]
    agreement.close()
    jaxs = one_of_jaxs(reached_preemption_sync_point, gang)
    if gang.process_index == 0:
        found = Measured(
            idle_ns=idle["agreement.arrive()"],
            jax_idle_ns=idle["reached(0)"],
            known_ms=[known for known, _ in ours],
            stopped_ms=[stopped for _, stopped in ours],
            jax_stopped_ms=[jaxs],
        )
        print(MEASURED + json.dumps(dataclasses.asdict(found)))


def measure_calls(durations_ns: dict[str, list[float]], names: Mapping[str, object]) -> None:
    """Adds the mean duration of each call, per block of calls; the blocks of the calls take turns."""
    timers = {call: timeit.Timer(call, globals=dict(names)) for call in durations_ns}
    for _ in range(_BLOCKS):
        for call, timer in timers.items():
            durations_ns[call].append(timer.timeit(_CALLS) / _CALLS * 1e9)


class Observer:
    """Starts at once; notes when it was told, and waits for the end. Written by the agreement's reading thread."""

    def __init__(self) -> None:
        self.known_s = 0.0
        self.closed = threading.Event()

    def heard(self, event: Event) -> None:
        match event:
            case Noticed():
                self.known_s = time.monotonic()
            case Closed():
                self.closed.set()

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        return 0.0

    def time_left_s(self) -> float:
        return _TIMEOUT_S

    def position(self) -> tuple[int, bool]:
        return 0, True

    def looked(self) -> None:
        pass


def one_of_ours(agreement: Agreement, observer: Observer, gang: ProcessGroup, number: int) -> tuple[float, float]:
    """Milliseconds from a notice until all know of it, and until all are held at the agreed sync point."""
    observer.closed.clear()

    def tell() -> None:
        agreement.tell(f"drill {number}", "", remaining_s=0.0, drill=True, once=True)

    told_s, stopped_s = train(lambda step: agreement.arrive(), tell, gang, number)
    agreement.confirm(agreement.seat.ordinal, deadline=Deadline.after(_TIMEOUT_S, time.monotonic))
    agreement.end_epoch()
    if not observer.closed.wait(_TIMEOUT_S):
        raise TimeoutError(f"waited {_TIMEOUT_S:g} s for all processes to leave drill {number}")
    told_s, known_s, stopped_s = latest(gang, f"ours/{number}", told_s, observer.known_s, stopped_s)
    return 1e3 * (known_s - told_s), 1e3 * (stopped_s - told_s)


def one_of_jaxs(reached: Callable[[int], bool], gang: ProcessGroup) -> float:
    """Milliseconds from a SIGTERM in one process until JAX's sync point is reached in all."""
    own = os.getpid()
    told_s, stopped_s = train(reached, lambda: os.kill(own, signal.SIGTERM), gang, -1)
    told_s, stopped_s = latest(gang, "jaxs", told_s, stopped_s)
    return 1e3 * (stopped_s - told_s)


def train(
    sync_point: Callable[[int], bool], tell: Callable[[], None], gang: ProcessGroup, number: int
) -> tuple[float, float]:
    """Trains until the sync point says stop; returns when this process told of the notice (0: it did not), and when
    it stopped.
    """
    began = gang.broadcast(f"begin/{number}", str(time.monotonic() + _HEAD_START_S), timeout_s=_TIMEOUT_S)
    told_s = 0.0

    def tell_now() -> None:
        nonlocal told_s
        told_s = time.monotonic()
        tell()

    wait_s = float(began) - time.monotonic() + random.uniform(*_STEPS_BEFORE) * STEP_S
    speaker = threading.Timer(wait_s, tell_now)
    if number % gang.process_count == gang.process_index:
        speaker.start()
    for step in itertools.count(1):
        left_s = float(began) + step * STEP_S - time.monotonic()
        if left_s < -_TIMEOUT_S:
            raise TimeoutError(f"no sync point was agreed within {_TIMEOUT_S:g} s")
        time.sleep(max(0.0, left_s))
        if sync_point(step):
            break
    stopped_s = time.monotonic()
    if speaker.ident is not None:
        speaker.join(_TIMEOUT_S)
    return told_s, stopped_s


def latest(gang: ProcessGroup, key: str, *moments_s: float) -> list[float]:
    """The latest of each moment over all processes."""
    texts = gang.gather(f"latest/{key}", json.dumps(moments_s), timeout_s=_TIMEOUT_S)
    return [max(moments) for moments in zip(*map(json.loads, texts), strict=True)]


if __name__ == "__main__":
    main()
