"""Nothing is torn and nothing is lost if a process dies after any request of a save, a salvage, or a retention.

``make cuts`` cuts after every request, with and without the reply to it. Otherwise only some of the cuts are made, and
every other one only without the reply.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator

import pytest

from gracepoint.checkpoint.format.layout import Temporary
from gracepoint.checkpoint.steps import commit, retention
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.errors import CheckpointCorrupt, SaveFailed
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.servers import Server
from tests.unit.checkpoint.steps.fakes.bucket_machine import BucketMachine
from tests.unit.checkpoint.steps.fakes.flat_machine import NotCommitted

pytestmark = pytest.mark.long  # each cut is a save, a start and a restore in a store that is asked over HTTP

EVERY = int(os.environ.get("CUT_EVERY", "17"))
RACES = int(os.environ.get("RACES", "12"))
MOST_REQUESTS = 120


@pytest.fixture(autouse=True)
def environment(object_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)  # botocore reads its credentials there


def save(machine: BucketMachine, step: int, processes: int) -> str:
    """Saves ``step`` in this thread. Returns its contents."""
    ordinal = next(machine.ordinals)
    contents = f"{step}:{ordinal}"
    machine.save_as(machine.paths.temporary(step, machine.attempt, ordinal), contents, processes, ordinal)
    return contents


def cuts(object_server: Server, store_proxy: FaultProxy) -> Iterator[tuple[BucketMachine, int, bool]]:
    """Yields a new machine for each cut, until a cut comes after all requests."""
    for number, request in enumerate(range(0, MOST_REQUESTS, EVERY)):
        for lost in (False, True) if EVERY == 1 or number % 2 else (True,):
            machine = BucketMachine(object_server, store_proxy)
            yield machine, request, lost
        if machine.is_past(request):
            assert request > 3, "no request was cut"
            return
    raise AssertionError(f"more than {MOST_REQUESTS} requests")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("again", [False, True], ids=["new", "replaces"])
def test_a_save_that_is_cut_anywhere_is_whole_or_not_there(
    object_server: Server, store_proxy: FaultProxy, processes: int, again: bool
) -> None:
    for machine, request, lost in cuts(object_server, store_proxy):
        if again:
            save(machine, 3, 1)
        ended = machine.cut(functools.partial(save, machine, 3, processes), request, lose_last_reply=lost)
        machine.check_after(ended)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_save_over_the_remains_of_another_is_whole(
    object_server: Server, store_proxy: FaultProxy, processes: int
) -> None:
    for machine, request, lost in cuts(object_server, store_proxy):
        machine.cut(functools.partial(save, machine, 3, processes), 3, lose_last_reply=False)
        machine.start_again()
        ended = machine.cut(functools.partial(save, machine, 3, processes), request, lose_last_reply=lost)
        machine.check_after(ended)


@pytest.mark.parametrize("again", [False, True], ids=["new", "replaces"])
def test_a_salvage_that_is_cut_anywhere_is_finished_later(
    object_server: Server, store_proxy: FaultProxy, again: bool
) -> None:
    for machine, request, lost in cuts(object_server, store_proxy):
        if again:
            save(machine, 3, 1)
        real = ManifestCommit.finalize
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ManifestCommit, "finalize", lambda *_, **__: False)
            with pytest.raises(NotCommitted):
                save(machine, 3, 2)
        assert ManifestCommit.finalize is real
        machine.cut(machine.start_again, request, lose_last_reply=lost)
        machine.check_after(False)


def test_a_retention_that_is_cut_anywhere_tears_nothing(object_server: Server, store_proxy: FaultProxy) -> None:
    for machine, request, lost in cuts(object_server, store_proxy):
        for step in (1, 2, 3):
            save(machine, step, 1)
        for step in (1, 2):
            machine.model[step].required = False

        def act(machine: BucketMachine = machine) -> None:
            retention.apply(machine.paths, Retention(1), newest_good=3, attempt=machine.attempt, ordinal=9)
            commit.of(machine.paths).empty_trash()

        ended = machine.cut(act, request, lose_last_reply=lost)
        if ended:
            del machine.model[1], machine.model[2]
        machine.check_after(ended)


def race(
    machine: BucketMachine, temporary: Temporary, start: threading.Barrier, found: dict[int, bool], racer: int
) -> None:
    start.wait(10)
    try:
        found[racer] = commit.of(machine.paths).finalize(temporary, replace=False)
    except (CheckpointCorrupt, SaveFailed):
        found[racer] = False


def test_of_committers_that_race_one_wins(object_server: Server, store_proxy: FaultProxy) -> None:
    machine = BucketMachine(object_server, store_proxy)
    for step in range(RACES):
        ordinals = [next(machine.ordinals) for _ in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ManifestCommit, "finalize", lambda *_, **__: False)
            for attempt, ordinal in zip(("job-a", "job-b"), ordinals, strict=True):
                temporary = machine.paths.temporary(step, attempt, ordinal)
                with pytest.raises(NotCommitted):
                    machine.save_as(temporary, f"{step}:{attempt}", 1, ordinal)
        start, found = threading.Barrier(4), dict[int, bool]()

        racers = [(("job-a", "job-b")[racer % 2], ordinals[racer % 2]) for racer in range(4)]
        racing = [machine.paths.temporary(step, attempt, ordinal) for attempt, ordinal in racers]
        threads = [
            threading.Thread(target=race, args=(machine, temporary, start, found, racer))
            for racer, temporary in enumerate(racing)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        winners = {("job-a", "job-b")[racer % 2] for racer, won in found.items() if won}
        assert len(winners) == 1, f"step {step}: {found}"
        contents = dict(machine.restorable())[step]
        assert contents == f"{step}:{winners.pop()}"
        commit.of(machine.paths).discard(machine.paths.step(step), machine.paths.trash(step, "job", 1))
        commit.of(machine.paths).empty_trash()
