"""Azure's Scheduled Events, against a server that answers as in Microsoft's document."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.metadata.conftest import GRACE_PERIOD_S, HOST, Watch
from tests.metadata.servers import AzureServer
from tests.unit.receivers.fakes.heard import Heard

EVENTS = "scheduledevents"


@pytest.fixture
def server() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server
        assert server.approved == [], "an approval shortens the time of all VMs that the event names"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("Preempt", "SpotTermination"),
        ("Terminate", "ScaleDown"),
        ("Reboot", "Maintenance"),
        ("Redeploy", "Maintenance"),
    ],
)
def test_event_of_this_vm_is_reported_with_server_time_left(
    server: AzureServer, heard: Heard, watch: Watch, kind: str, cause: str
) -> None:
    server.clock_ahead_s = -5000.0
    watch("azure", server.url)
    server.wait_for_requests(EVENTS, 2)
    server.schedule(server.event(kind, in_s=400))
    (post,) = heard.wait_for_posts()
    assert post.cause == cause
    assert post.signal == f"azure scheduledevents {kind} C7061BAC-AFDC-4513-B24B-AA5F13A16123 on {HOST}"
    assert 340 < post.remaining_s <= 401


def test_an_event_of_another_vm_of_the_set_is_not_ours(server: AzureServer, heard: Heard, watch: Watch) -> None:
    server.schedule(server.event("Preempt", in_s=30, Resources=["aks-train-12345-vmss_4"]))
    watch("azure", server.url)
    server.wait_for_requests(EVENTS, 2)
    assert heard.posts == []


@pytest.mark.parametrize("kind", ["Freeze", "SomethingNew"])
def test_what_loses_nothing_or_is_not_known_stops_nobody(
    server: AzureServer, heard: Heard, watch: Watch, kind: str
) -> None:
    server.schedule(server.event(kind, in_s=900))
    watch("azure", server.url)
    server.wait_for_requests(EVENTS, 2)
    assert heard.posts == []


def test_an_event_that_is_cancelled_is_retracted(server: AzureServer, heard: Heard, watch: Watch) -> None:
    server.schedule(server.event("Redeploy", in_s=600))
    watch("azure", server.url)
    (post,) = heard.wait_for_posts()
    server.schedule()
    assert heard.wait_for_retraction() == post.signal


def test_an_event_that_has_started_keeps_the_deadline_that_it_had(
    server: AzureServer, heard: Heard, watch: Watch
) -> None:
    server.schedule(server.event("Redeploy", in_s=600))
    watch("azure", server.url)
    heard.wait_for_posts()
    server.schedule(server.event("Redeploy", in_s=None))
    server.wait_for_requests(EVENTS, 2)
    assert len(heard.posts) == 1
    assert heard.retracted == []


def test_an_event_that_starts_without_notice_is_announced_with_the_grace_period(
    server: AzureServer, heard: Heard, watch: Watch
) -> None:
    watch("azure", server.url)
    server.wait_for_requests(EVENTS, 2)
    server.schedule(server.event("Reboot", in_s=None))
    (post,) = heard.wait_for_posts()
    assert post.remaining_s == GRACE_PERIOD_S


def test_a_reboot_that_this_process_comes_after_does_not_stop_it(
    server: AzureServer, heard: Heard, watch: Watch
) -> None:
    server.schedule(server.event("Reboot", in_s=None))
    watch("azure", server.url)
    server.wait_for_requests(EVENTS, 2)
    assert heard.posts == []
    assert heard.retracted == []
