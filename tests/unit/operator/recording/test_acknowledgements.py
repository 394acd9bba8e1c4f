"""Latencies of acknowledgements."""

from __future__ import annotations

from gracepoint_operator.recording.preemption_writer import AcknowledgementLog
from gracepoint_operator.workloads import read_pod
from tests.unit.operator.fakes import objects

KEY = ("team-a", "one")


async def test_a_latency_is_observed_once_however_often_a_pod_reconnects() -> None:
    receipts, pod = AcknowledgementLog(), read_pod(objects.pod())
    assert [receipts.notified(KEY, pod, at) for at in (1.0, 9.0)] == [True, False]
    assert [receipts.acknowledged(KEY, pod, at) for at in (2.0, 9.0)] == [True, False]
    assert receipts.notified_at(KEY, pod.uid) == 1.0
    assert receipts.first_acknowledged_at(KEY) == 2.0
