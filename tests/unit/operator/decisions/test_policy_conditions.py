"""The status of a policy."""

from __future__ import annotations

from gracepoint_operator.decisions import policy_conditions
from gracepoint_operator.model.preemption_record import PreemptionRecord
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import NOW


def test_last_save_of_a_policy_may_be_a_promoted_snapshot() -> None:
    preemptions = []
    for number, (phase, step) in enumerate([("Committed", 40), ("Promoted", 70), ("Failed", 90)], start=1):
        body = objects.preemption(number, phase=phase, ended_at=NOW + number)
        body["status"]["step"] = step
        preemptions.append(PreemptionRecord.of(body))
    saved = policy_conditions.last_save(preemptions, None)
    assert saved is not None
    assert (saved.step, saved.preemption) == (70, preemptions[1].name)
    assert policy_conditions.last_save(preemptions[:1], saved) == saved, "also when its record was deleted"
    assert policy_conditions.last_save(preemptions, policy_conditions.last_save(preemptions[:1], None)) == saved


def test_step_that_is_only_in_memory_is_no_last_save_of_a_policy() -> None:
    preemptions = []
    for number, phase in enumerate(["Committed", "Evacuated"], start=1):
        body = objects.preemption(number, phase=phase, ended_at=NOW + number)
        body["status"].update(step=40 * number)
        preemptions.append(PreemptionRecord.of(body))
    saved = policy_conditions.last_save(preemptions, None)
    assert saved is not None
    assert saved.step == 40


def test_replicas_choose_the_same_of_two_saves_of_one_moment() -> None:
    preemptions = []
    for number in (1, 2):
        body = objects.preemption(number, phase="Committed", ended_at=NOW)
        body["status"]["step"] = 40
        preemptions.append(PreemptionRecord.of(body))
    saved = policy_conditions.last_save(preemptions, None)
    assert policy_conditions.last_save(preemptions[::-1], None) == saved
    assert policy_conditions.last_save(preemptions[:1], saved) == saved
    assert policy_conditions.last_save(preemptions, policy_conditions.last_save(preemptions[:1], None)) == saved
