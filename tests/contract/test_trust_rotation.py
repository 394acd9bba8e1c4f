"""The authority of the operator's certificate changes while pods are connected, over real TLS on loopback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from gracepoint.deadline import Backoff
from gracepoint_operator.trust import certificates
from tests.contract.fakes.replicas import NAME, Replica
from tests.contract.fakes.rotation import (
    Pod,
    add_pods,
    can_connect,
    change_authority,
    distrusting,
    pods,
    renew_certificate,
    served_certificate,
)
from tests.unit.operator.fakes.api import MemoryApi
from tests.waiting import until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "POLL_S", 0.1)
    monkeypatch.setattr(Backoff, "next_s", lambda self: 0.05)


@pytest.mark.timeout(300)  # two handshakes of each pod, both sides of each in this process
# The second is a large job, or several.
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.variant)])
def test_many_pods_stay_connected_through_new_certificate_and_authority(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path, authority: trustme.CA, count: int
) -> None:
    add_pods(api, count)
    replica = start(api)
    with pods(replica, count) as connected:
        before = set(replica.core.subscribers.all())
        renewed = renew_certificate(tmp_path, authority)
        until(lambda: served_certificate(replica) == renewed, "the renewed certificate to be served")
        assert distrusting(replica, connected) == []

        new = change_authority(tmp_path)
        until(lambda: all(pod.authorities != replica.ca for pod in connected), "all pods to be told")
        assert served_certificate(replica) == renewed, "nobody is cut off before all were told"
        assert can_connect(replica, replica.core_trusts), "and a pod that starts now trusts both"
        replica.certificates.overlap_s = 0.0  # that time is over
        until(lambda: can_connect(replica, new), "the certificate of the new authority")
        assert not can_connect(replica, replica.ca)
        assert distrusting(replica, connected) == []
        assert set(replica.core.subscribers.all()) == before, "every stream went on"

        replica.core_loop.call_soon_threadsafe(replica.core.subscribers.close)
        until(
            lambda: len(after := set(replica.core.subscribers.all())) == count and not after & before,
            "every pod to connect anew, with the new authority",
            timeout_s=150.0,
        )
        replica.taint()
        until(lambda: all(pod.told == [NAME] for pod in connected), "the notice")


def test_an_older_library_is_sent_no_frame_it_does_not_know(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = start(api, overlap_s=0.2)
    pod = Pod(replica, 0, replica.ca, old_library=True)
    try:
        assert pod.subscriber.wait_until_connected(20.0)
        new = change_authority(tmp_path)
        until(lambda: can_connect(replica, new), "the certificate of the new authority")
        replica.taint()
        until(lambda: pod.told == [NAME], "the notice")
    finally:
        pod.subscriber.close()
    assert "cannot read" not in caplog.text


def test_pods_that_connect_during_the_overlap_are_notified(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path
) -> None:
    replica = start(api)
    change_authority(tmp_path)
    until(lambda: replica.core_trusts != replica.ca, "the operator to know the new authority")
    with pods(replica, 2) as connected:
        until(lambda: all(pod.authorities == replica.core_trusts for pod in connected), "both pods to be told")
