"""When time alone changes what is decided: not before the time that is told, and at that time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gracepoint_operator.decisions.decide import EXPIRE_AFTER_S, decide, next_decision_at
from gracepoint_operator.decisions.effective_signals import SIGNALS_COME_S
from gracepoint_operator.kube import objects as kinds
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, stamp
from tests.unit.operator.fakes.scene import Scene


def limited(scene: Scene) -> None:
    body = {"spec": {"activeDeadlineSeconds": 7300.0}, "status": {"startTime": stamp(NOW - 100)}}
    scene.seen(kinds.JOBS, objects.job() | body)


def maintained(scene: Scene) -> None:
    label = {"cloud.google.com/scheduled-maintenance-time": f"{NOW + 5000:.0f}"}
    scene.seen(kinds.NODES, objects.node(labels=label))


def told(scene: Scene) -> None:
    scene.recorded(deadline_at=NOW + 15)


def learned(scene: Scene) -> None:
    scene.seen(kinds.PREEMPTIONS, objects.preemption(cancelable=True, deadline_at=NOW + 300))


def told_and_trains_on(scene: Scene) -> None:
    scene.recorded(epoch=1, phase="Committed", created_at=NOW - 900, ended_at=NOW - 900)
    scene.recorded(epoch=2, deadline_at=NOW + 86_400, exits=False)


@pytest.mark.parametrize(
    ("change", "expected_at"),
    [
        pytest.param(limited, NOW + 7200 - 3600, id="a time limit comes nearer than the horizon"),
        pytest.param(told, NOW + 15 + EXPIRE_AFTER_S, id="an epoch expires"),
        pytest.param(learned, NOW + SIGNALS_COME_S, id="a signal that another replica saw does not come"),
    ],
)
def test_decision_changes_at_the_time_that_is_named_and_not_before(
    change: Callable[[Scene], None], expected_at: float
) -> None:
    scene = Scene()
    change(scene)
    gang = scene.cache.gang(JOBSET_UID)
    due_at = next_decision_at(gang, NOW)
    assert due_at is not None
    assert due_at == pytest.approx(expected_at, abs=0.01)
    before = decide(gang, NOW)
    for at in (NOW + 1, (NOW + due_at) / 2, due_at - 0.1):
        assert decide(gang, at) == before
    assert decide(gang, due_at) != before


@pytest.mark.parametrize("change", [limited, maintained, told, learned, told_and_trains_on])
def test_no_decision_changes_between_the_times_that_are_named(change: Callable[[Scene], None]) -> None:
    scene = Scene()
    change(scene)
    gang, now, times = scene.cache.gang(JOBSET_UID), NOW, []
    while (due_at := next_decision_at(gang, now)) is not None:
        kinds_before = [type(item) for item in decide(gang, now)]
        for part in range(1, 20):
            at = now + (due_at - now) * part / 20
            assert [type(item) for item in decide(gang, at)] == kinds_before, f"{at - NOW:.1f} s after the start"
        now = due_at
        times.append(due_at)
    assert times, "there is something that time changes"
    assert len(times) < 5


def test_a_gang_without_signals_waits_for_an_event() -> None:
    assert next_decision_at(Scene().cache.gang(JOBSET_UID), NOW) is None
