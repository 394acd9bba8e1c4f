"""Latencies of acknowledgements."""

from __future__ import annotations

import pytest

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


def test_the_entry_of_a_large_gang_stays_for_seconds_but_for_the_first_and_the_last_receipt() -> None:
    receipts, pods = AcknowledgementLog(), [read_pod(objects.pod(index)) for index in range(1000)]

    def seen(now_s: float, *, newest: bool = False) -> tuple[int, int]:
        entry = receipts.replica(KEY, "one", now_s, newest=newest)
        return entry.told, entry.acknowledged

    def acknowledged(begin: int, end: int) -> None:
        for pod in pods[begin:end]:
            receipts.acknowledged(KEY, pod, 1.0)

    assert (seen(0.0), receipts.waits_s(KEY, 0.0)) == ((0, 0), 0.0)
    for pod in pods:
        receipts.notified(KEY, pod, 1.0)
    assert seen(10.0) == (1000, 0)
    acknowledged(0, 1)
    assert (receipts.waits_s(KEY, 10.1), seen(10.1)) == (0.0, (1000, 1))
    acknowledged(1, 900)
    assert receipts.waits_s(KEY, 10.6) == pytest.approx(1.5)
    assert (seen(12.0), seen(12.0, newest=True)) == ((1000, 1), (1000, 900))
    acknowledged(900, 950)
    assert (seen(13.9), seen(14.1)) == ((1000, 900), (1000, 950))
    acknowledged(950, 1000)
    assert (receipts.waits_s(KEY, 14.2), seen(14.2)) == (0.0, (1000, 1000))


@pytest.mark.parametrize("told", [0, 100])
def test_receipts_of_pods_that_the_other_replica_has_notified_wait_too(told: int) -> None:
    receipts, pods = AcknowledgementLog(), [read_pod(objects.pod(index)) for index in range(1000)]
    for pod in pods[:told]:
        receipts.notified(KEY, pod, 1.0)
    for pod in pods[:600]:
        receipts.acknowledged(KEY, pod, 1.0)
    assert receipts.replica(KEY, "one", 10.0).acknowledged == 600
    receipts.acknowledged(KEY, pods[600], 1.0)
    assert receipts.waits_s(KEY, 10.2) == pytest.approx(1.0)
    receipts.notified(KEY, pods[700], 1.0)
    assert receipts.waits_s(KEY, 10.2) == 0.0, "notices come within a second, and stages depend on their number"


def test_the_entry_of_a_small_gang_is_as_new_as_a_write_a_second_can_be() -> None:
    receipts, pods = AcknowledgementLog(), [read_pod(objects.pod(index)) for index in range(500)]
    for pod in pods:
        receipts.notified(KEY, pod, 1.0)
    receipts.replica(KEY, "one", 10.0)
    for pod in pods[:2]:
        receipts.acknowledged(KEY, pod, 1.0)
    receipts.replica(KEY, "one", 10.1)
    assert receipts.waits_s(KEY, 10.2) <= 1.0
