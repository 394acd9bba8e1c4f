"""128 real clients of the real coordination service go through what ``benchmarks.gang_scale`` does with thousands."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from benchmarks import gang_scale_model
from benchmarks.gang_scale import Gang, Seen
from benchmarks.gang_scale_epochs import Epoch

pytestmark = pytest.mark.multiprocess

COUNT = 128


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    made = Gang(COUNT)
    try:
        yield made
    finally:
        made.end()


def stopped_together(seen: Seen) -> None:
    """All stopped, at the same sync point."""
    assert seen.errors == []
    assert len({times.stopped_at for times in seen.times}) == 1
    assert seen.times[0].stopped_at > 0


def median(seen: Seen, *, without: int | None = None) -> float:
    """The requests of a process. On a busy machine, some are far ahead of the one that started the epoch."""
    return statistics.median(t.requests - t.ahead for index, t in enumerate(seen.times) if index != without)


@pytest.mark.timeout(180)
def test_many_processes_agree_in_few_requests_whatever_happens(gang: Gang) -> None:
    quiet = gang.run(Epoch("quiet"))
    stopped_together(quiet)

    later = gang.run(Epoch("later", start_in_s=0.5))
    stopped_together(later)

    saving = gang.run(Epoch("saving", meets=True))
    stopped_together(saving)

    late = gang.run(Epoch("late", late=[COUNT // 2], late_s=3.0))
    stopped_together(late)
    # If the others polled while they wait, each would look six times. On a busy machine two may write the start.
    assert median(late, without=COUNT // 2) <= median(quiet) + 2

    retracted = gang.run(Epoch("retracted", start_in_s=30.0, take_back_s=0.1))
    assert retracted.errors == []
    assert {times.stopped_at for times in retracted.times} == {0}

    dead = gang.run(Epoch("death", left_s=2.0, late=[COUNT // 3], late_s=6.0))
    assert {times.stopped_at for times in dead.times} == {0}
    assert dead.requests() < 4

    assert gang.idle(2.0) == 0

    preempted = gang.run(Epoch("preemption", start_in_s=0.5, drill=False))
    stopped_together(preempted)
    # Most processes need 6. A few hand on for others. If two write the start, all read one more.
    assert median(preempted) <= median(quiet) + 2
    assert preempted.requests() <= median(preempted) + 2
    assert max(times.bytes for times in preempted.times) <= 64 << 10


def test_model_takes_twice_as_long_with_twice_as_many_processes() -> None:
    costs = gang_scale_model.calibrated(512, known_s=0.1, stopped_s=0.5, service_cpu_s=0.2, cpus=2, step_s=0.2)
    few, many = (gang_scale_model.predict(count, costs) for count in (512, 1024))
    assert few.known_s == pytest.approx(0.1, rel=0.1)
    assert few.stopped_s == pytest.approx(0.5, rel=0.5)
    assert many.known_s == pytest.approx(2 * few.known_s, rel=0.1)
