"""No lost request, no death and no writer that wakes up late loses or changes a durable save without renames."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.checkpoint.steps.flat_machine import EVENTS, MOMENTS_OF_A_SAVE, FlatMachine

SETTINGS = settings(
    max_examples=40,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
WRONG = settings(SETTINGS, max_examples=400, phases=[Phase.generate], print_blob=False)


def test_no_request_that_is_lost_loses_a_durable_save() -> None:
    run_state_machine_as_test(FlatMachine, settings=SETTINGS)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("again", [False, True], ids=["new", "saved before"])
def test_a_step_is_whole_whenever_something_happens(event: str, processes: int, again: bool) -> None:
    for moment in range(MOMENTS_OF_A_SAVE):
        machine = FlatMachine()
        if again:
            machine.save(step=3, processes=1, event="nothing", moment=0)
        machine.save(step=3, processes=processes, event=event, moment=moment)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("processes", [1, 2])
def test_remains_of_a_dead_save_give_way(event: str, processes: int) -> None:
    for died in (5, 11):
        for moment in range(0, MOMENTS_OF_A_SAVE, 3):
            machine = FlatMachine()
            machine.save(step=3, processes=processes, event="dies", moment=died)
            machine.save(step=3, processes=processes, event=event, moment=moment)
