"""No lost request, no death and no writer that wakes up late loses or changes a durable save without renames."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Claim
from gracepoint.checkpoint.steps.object_steps import Placement
from gracepoint.checkpoint.storage.storage_path import Generation
from tests.hypothesis_profiles import portion
from tests.unit.checkpoint.steps.fakes.flat_machine import EVENTS, MOMENTS_OF_A_SAVE, DigestMachine, FlatMachine
from tests.unit.checkpoint.storage.fakes.flat import FlatPath

# Whole saves, one for every moment at which a process can die.
pytestmark = pytest.mark.integration

SETTINGS = settings(
    max_examples=40,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("machine", [FlatMachine, DigestMachine], ids=["numbers", "digests"])
def test_no_request_that_is_lost_loses_a_durable_save(machine: type[FlatMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("again", [False, True], ids=["new", "saved before"])
def test_a_step_is_whole_whenever_something_happens(event: str, processes: int, again: bool) -> None:
    for moment in portion(range(MOMENTS_OF_A_SAVE)):
        machine = FlatMachine()
        if again:
            machine.save(step=3, processes=1, event="nothing", moment=0)
        machine.save(step=3, processes=processes, event=event, moment=moment)


@pytest.mark.parametrize("machine", [FlatMachine, DigestMachine], ids=["numbers", "digests"])
def test_a_deletion_that_sleeps_leaves_later_saves_whole(machine: type[FlatMachine]) -> None:
    for moment in portion(range(MOMENTS_OF_A_SAVE)):
        sleeper = machine()
        for step in (1, 2, 3):
            sleeper.save(step=step, processes=1, event="nothing", moment=0)
        sleeper.retain(keep=1, event="sleeps", moment=moment)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("processes", [1, 2])
def test_remains_of_a_dead_save_give_way(event: str, processes: int) -> None:
    for died in (5, 11):
        for moment in portion(range(0, MOMENTS_OF_A_SAVE, 3)):
            machine = FlatMachine()
            machine.save(step=3, processes=processes, event="dies", moment=died)
            machine.save(step=3, processes=processes, event=event, moment=moment)


# --- what is wrong on purpose is found


def everything() -> None:
    """Runs what finds the mistakes below: each event at each request, over a step, over remains, and on new ones."""
    # The event changes first, as each mistake is found soon by one of them, and late or never by the others.
    orders = itertools.product((None, 5), (1, 2), range(MOMENTS_OF_A_SAVE), ("sleeps", "another starts", "dies"))
    for died, processes, moment, event in orders:
        machine = FlatMachine()
        if died is not None:
            machine.save(step=3, processes=processes, event="dies", moment=died)
        else:
            machine.save(step=3, processes=1, event="nothing", moment=0)
        machine.save(step=3, processes=processes, event=event, moment=moment)
    machine = FlatMachine()
    for step in range(4):
        machine.save(step=step, processes=1, event="nothing", moment=0)
    machine.retain(keep=1, event="nothing", moment=0)


def test_an_overwriting_save_that_claims_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "own", lambda self: True)
    monkeypatch.setattr(Claim, "is_later", lambda self, other: False)
    with pytest.raises(AssertionError, match="step 3 holds"):
        everything()


def test_a_manifest_without_a_condition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: FlatPath, data: bytes) -> Generation:
        self.put(data)
        return self.read().generation

    def replace(self: FlatPath, data: bytes, generation: Generation) -> Generation:
        return create(self, data)

    monkeypatch.setattr(FlatPath, "create", create)
    monkeypatch.setattr(FlatPath, "replace", replace)
    monkeypatch.setattr(Claim, "is_later", lambda self, other: False)
    with pytest.raises(AssertionError, match="step 3 holds"):
        everything()


def test_a_replacement_before_the_save_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Placement.__init__

    def in_place(self: Placement, temporary: Any, claim: Claim, *, staged: bool) -> None:
        real(self, temporary, claim, staged=False)

    def own(self: Placement) -> bool:
        place = self._temporary.target / layout.MANIFEST
        place.put(self._claim.to_bytes())
        return True

    monkeypatch.setattr(Placement, "__init__", in_place)
    monkeypatch.setattr(Placement, "own", own)
    with pytest.raises(AssertionError, match="step 3 is lost"):
        everything()
