"""However long training goes on, what it keeps in the coordination service and in memory does not grow.

On JAX's own coordination service, whose clients need no backend: each "process" is a thread with a client of its own.
"""

from __future__ import annotations

import gc
import math
import threading
import time
import tracemalloc
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxlib import _jax

from gracepoint.checkpoint.saving.schedule import SaveInterval, SaveSchedule
from gracepoint.deadline import Deadline
from gracepoint.multihost import Agreement, JaxStore, StoreProcessGroup
from gracepoint.multihost.ledger import Broken, Closed, Event, Noticed, Retracted
from gracepoint.process_group import ProcessGroup
from gracepoint.session.periodic_saves import PeriodicSaves
from tests.ports import held_ports
from tests.unit.checkpoint.fakes.engine import engine
from tests.unit.preemption.fakes.reporters import without_operator

COUNT = 2
LONG_S = 3600


@pytest.fixture
def clients() -> Iterator[list[Any]]:
    with held_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        service = _jax.get_distributed_runtime_service(address, COUNT, heartbeat_timeout=LONG_S)
    made = [
        _jax.get_distributed_runtime_client(
            address, index, heartbeat_timeout=LONG_S, shutdown_on_destruction=False, shutdown_timeout=30
        )
        for index in range(COUNT)
    ]
    together([client.connect for client in made])
    yield made
    together([client.shutdown for client in made])
    service.shutdown()


def together(calls: list[Callable[[], Any]], timeout_s: float = 120) -> list[Any]:
    outcomes: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001 - raised below
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for index, thread in enumerate(threads):
        thread.join(timeout_s)
        assert not thread.is_alive(), f"process {index} did not end within {timeout_s} s"
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def keys(clients: list[Any]) -> list[str]:
    """All keys in the store. One that is there must be among them, else the question was wrong."""
    clients[0].key_value_set("job/here", "yes", allow_overwrite=True)
    found = {key for key, _ in clients[0].key_value_dir_get("job/")}
    assert "job/here" in found
    return sorted(found - {"job/here"})


class Clock:
    """One second a look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Quiet:
    """An agreement in which nothing happens."""

    noticed = in_epoch = False
    sync_point = 1

    def __init__(self) -> None:
        self.reporter = without_operator()


def in_each(clients: list[Any], function: Callable[[ProcessGroup], Any]) -> list[Any]:
    gangs = [StoreProcessGroup(JaxStore(client, "job"), index, COUNT) for index, client in enumerate(clients)]
    return together([lambda gang=gang: function(gang) for gang in gangs])  # type: ignore[misc]


@pytest.mark.long
def test_a_day_of_timed_saves_leaves_store_and_memory_unchanged(clients: list[Any]) -> None:
    sizes: list[tuple[int, int]] = []
    measured = threading.Barrier(COUNT)

    def train(gang: ProcessGroup) -> int:
        clock = Clock()
        due = SaveInterval(SaveSchedule(every_s=60, hastens=True), gang=gang, key="cadence", clock=lambda: clock.now_s)
        saves = 0
        for step in range(1, 20_001):
            clock.now_s += 1.0
            if due.is_due(step):
                due.saved()
                saves += 1
            if step % 5000 == 0:
                measured.wait(60)
                if gang.process_index == 0:
                    gc.collect()
                    sizes.append((len(keys(clients)), tracemalloc.get_traced_memory()[0]))
                measured.wait(60)
        return saves

    tracemalloc.start()
    try:
        first, second = in_each(clients, train)
    finally:
        tracemalloc.stop()
    assert first == second > 300
    assert max(count for count, _ in sizes) < 80
    assert sizes[-1][1] - sizes[0][1] < 64 * 1024


@pytest.mark.long
def test_hundreds_of_saves_leave_store_and_memory_unchanged(clients: list[Any], tmp_path: Path) -> None:
    state = {"w": np.arange(8.0)}
    found: dict[int, list[str]] = {}
    remembered: list[int] = []

    def train(gang: ProcessGroup) -> None:
        checkpointer = engine(tmp_path, gang, save_every_steps=1)
        saves = PeriodicSaves(checkpointer, Quiet())  # type: ignore[arg-type]
        for step in range(1, 201):
            if step % 50 == 0:  # as in a drill
                checkpointer.save(
                    step, state, {}, deadline=Deadline.after(60, time.monotonic), on_stage=lambda stage: None
                )
            else:
                if saves.begins(step):
                    checkpointer.save_in_background(step, state, {})
            if step % 40 == 0:
                checkpointer.executor.wait_until_finished(60)
                gang.barrier(f"measured/{step}", timeout_s=60)
                if gang.process_index == 0:
                    found[step] = [key for key in keys(clients) if "measured" not in key]
                    remembered.append(sum(len(each) for each in vars(gang).values() if isinstance(each, Collection)))
                gang.barrier(f"measured/{step} too", timeout_s=60)
        checkpointer.close(60)

    in_each(clients, train)
    assert len(found[200]) <= len(found[40]) + 1, found[200]
    assert remembered[-1] <= remembered[0] + 10, remembered  # two of each measurement
    assert len(found[200]) < 20, found[200]


class Observer:
    """Starts at once; notes what is dealt with."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.dealt_with = 0
        self.stands = False
        self.start_s = LONG_S

    def heard(self, event: Event) -> None:
        assert not isinstance(event, Broken), event
        with self.changed:
            self.stands = isinstance(event, Noticed) or (self.stands and not isinstance(event, Retracted | Closed))
            self.dealt_with += isinstance(event, Retracted | Closed)
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60), (self.dealt_with, self.stands)

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        return float(self.start_s)

    def time_left_s(self) -> float:
        return 60.0

    def position(self) -> tuple[int, bool]:
        return 0, True

    def looked(self) -> None:
        pass


@pytest.mark.long
@pytest.mark.parametrize("kind", ["drills", "notices that are taken back"])
def test_hundreds_of_epochs_and_notices_leave_the_store_as_it_was(clients: list[Any], kind: str) -> None:
    found: list[list[str]] = []
    turn = threading.Barrier(COUNT)

    def train(gang: ProcessGroup) -> None:
        observer = Observer()
        agreement = Agreement(JaxStore(clients[gang.process_index], "job"), gang, observer)
        if kind == "drills":
            observer.start_s = 0
        for number in range(1, 401):
            if gang.process_index == number % COUNT:
                agreement.tell(f"signal {number}", "", remaining_s=60.0, drill=True)
                if kind != "drills":
                    agreement.take_back(f"signal {number}", "it went away")
            if kind == "drills":
                while not agreement.arrive():
                    time.sleep(0.001)  # a step
                agreement.confirm(number, deadline=Deadline.after(60, time.monotonic))
                agreement.end_epoch()
            observer.wait_until(lambda number=number: observer.dealt_with == number)  # type: ignore[misc]
            turn.wait(60)
            if gang.process_index == 0 and number % 100 == 0:
                found.append(keys(clients))
            turn.wait(60)
        agreement.close()

    in_each(clients, train)
    assert all(len(left) < 3 * 64 for left in found), [len(left) for left in found]
    assert len([key for key in found[-1] if "/epoch/" in key]) == 0, found[-1]
