"""Which preemptions count as lost."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import EndReason, PreemptionRecord
from gracepoint_operator.recording import preemption_writer
from gracepoint_operator.signals import Cause
from tests.unit.operator.fakes import objects

ALERTS = Path(__file__).parents[4] / "charts/gracepoint/files/alerts.yaml"


def lost(metrics: Metrics) -> dict[str, float]:
    """The series that the alert GracepointPreemptionLost reads: cause and phase -> value."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text()) for rule in group["rules"]]
    (expression,) = [rule["expr"] for rule in rules if rule["alert"] == "GracepointPreemptionLost"]
    ((name, selector),) = re.findall(r"(gracepoint_\w+)\{(.*?)\}", expression)
    wanted = re.findall(r'(\w+)=~?"(.*?)"', selector)
    samples = [s for family in metrics.registry.collect() for s in family.samples if s.name == name]
    return {
        f"{s.labels['cause']} {s.labels['phase']}": s.value
        for s in samples
        if all(re.fullmatch(pattern, s.labels[label]) for label, pattern in wanted)
    }


@pytest.mark.parametrize("mode", Mode)
def test_a_preemption_counts_as_lost_only_if_it_was_to_be_saved(mode: Mode) -> None:
    metrics, before = Metrics(), PreemptionRecord.of(objects.preemption(mode=str(mode)))
    preemption_writer.show_losses(metrics)
    ended = preemption_status.ended(before.status, Phase.EXPIRED, EndReason.DEADLINE_PASSED, "told here", objects.NOW)
    preemption_writer.count_outcome(metrics, before, dataclasses.replace(before, status=ended), pods_live=False)
    assert lost(metrics)["SpotTermination Expired"] == (mode is Mode.ENFORCE)
    labels = {"phase": "Expired", "cause": "SpotTermination", "mode": str(mode)}
    assert metrics.registry.get_sample_value("gracepoint_preemption_phases_total", labels) == 1


def test_the_alert_about_lost_preemptions_has_every_cause_from_the_beginning() -> None:
    metrics = Metrics()
    preemption_writer.show_losses(metrics)
    causes = [*Cause, preemption_writer.REQUESTED]
    assert lost(metrics) == {f"{cause} {phase}": 0 for cause in causes for phase in ("Expired", "Failed")}


def test_failed_drills_have_every_cause_from_the_beginning() -> None:
    metrics = Metrics()
    preemption_writer.show_losses(metrics)
    for cause in (*Cause, preemption_writer.REQUESTED):
        for phase in ("Expired", "Failed"):
            labels = {"phase": phase, "cause": str(cause), "mode": "Drill"}
            assert metrics.registry.get_sample_value("gracepoint_preemption_phases_total", labels) == 0


@pytest.mark.parametrize(("mode", "late"), [(Mode.ENFORCE, 1), (Mode.DRILL, 0)])
def test_a_drill_that_is_late_does_not_count_as_late(mode: Mode, late: int) -> None:
    metrics, before = Metrics(), PreemptionRecord.of(objects.preemption(mode=str(mode)))
    status = before.status.model_copy(update={"phase": Phase.COMMITTED, "seconds_to_spare": -3.0})
    preemption_writer.count_outcome(metrics, before, dataclasses.replace(before, status=status), pods_live=True)
    assert metrics.registry.get_sample_value("gracepoint_spare_seconds_bucket", {"le": "0.0"}) == late


@pytest.mark.parametrize(
    ("mode", "phase", "pods", "after_s", "missing"),
    [
        pytest.param(Mode.DRILL, Phase.RETRACTED, 2, 0.2, 0, id="a disruption ends a drill at once"),
        pytest.param(Mode.ENFORCE, Phase.RETRACTED, 4000, 10.0, 0, id="a notice to a large gang is taken back soon"),
        pytest.param(Mode.DRILL, Phase.COMMITTED, 2, 3.0, 2, id="nobody has answered in a whole drill"),
        pytest.param(Mode.ENFORCE, Phase.RETRACTED, 4000, 30.0, 4000, id="nobody of a large gang has answered"),
        pytest.param(Mode.ENFORCE, Phase.EXPIRED, 2, 15.0, 2, id="nobody has answered by the deadline"),
    ],
)
def test_receipts_are_missed_once_they_were_due(
    mode: Mode, phase: Phase, pods: int, after_s: float, missing: int
) -> None:
    metrics, before = Metrics(), PreemptionRecord.of(objects.preemption(mode=str(mode)))
    status = preemption_status.noticed(pods, before.spec)
    before = dataclasses.replace(before, status=status)
    at = before.spec.observed_at.timestamp() + after_s
    ended = preemption_status.ended(status, phase, EndReason.SIGNAL_WENT_AWAY, "told here", at)
    preemption_writer.count_receipts(metrics, before, dataclasses.replace(before, status=ended))
    assert metrics.registry.get_sample_value("gracepoint_notices_undelivered_total") == missing
