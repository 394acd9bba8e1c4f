"""Google Compute Engine's keys, against a server that waits for changes as theirs does."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

import pytest

from tests.metadata.conftest import HOST, Watch
from tests.metadata.servers import GceServer
from tests.unit.receivers.fakes.heard import Heard

PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"
UPCOMING = "instance/upcoming-maintenance/"


@pytest.fixture
def server() -> Iterator[GceServer]:
    with GceServer() as server:
        yield server


def window(server: GceServer, in_s: float, **changes: str) -> str:
    """A planned maintenance, as the metadata server writes it."""
    start = datetime.datetime.fromtimestamp(server.now_s() + in_s, datetime.UTC)
    end = start + datetime.timedelta(hours=2)
    return json.dumps(
        {
            "can_reschedule": "true",
            "latest_window_start_time": start.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "maintenance_status": "PENDING",
            "type": "SCHEDULED",
            "window_end_time": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "window_start_time": start.strftime("%Y-%m-%dT%H:%M:%SZ"),
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("in_pod", "notice_s", "remaining_s"),
    [
        pytest.param(True, 0.0, 15.0, id="in a pod"),
        pytest.param(False, 0.0, 30.0, id="on a bare VM"),
        pytest.param(True, 120.0, 135.0, id="with a preemptionNoticeDuration"),
    ],
)
def test_a_preemption_is_announced_while_the_request_is_held_back(
    server: GceServer, heard: Heard, watch: Watch, in_pod: bool, notice_s: float, remaining_s: float
) -> None:
    watch("gce", server.url, in_pod=in_pod, gce_notice_s=notice_s)
    server.wait_until_held(PREEMPTED, MAINTENANCE)
    server.set(PREEMPTED, "TRUE")
    (post,) = heard.wait_for_posts()
    assert (post.preemption, post.cause, post.remaining_s) == ("", "SpotTermination", remaining_s)
    assert post.signal == f"gce instance/preempted on {HOST}"


def test_host_maintenance_that_ends_the_vm_is_reported_and_retractable(
    server: GceServer, heard: Heard, watch: Watch
) -> None:
    watch("gce", server.url)
    server.wait_until_held(MAINTENANCE)
    server.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    (post,) = heard.wait_for_posts()
    assert (post.cause, post.remaining_s) == ("Maintenance", 60.0)
    server.wait_until_held(MAINTENANCE)
    server.set(MAINTENANCE, "NONE")
    assert heard.wait_for_retraction() == post.signal


def test_a_live_migration_stops_nobody(
    server: GceServer, heard: Heard, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch("gce", server.url)
    server.wait_until_held(MAINTENANCE)
    server.set(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    server.wait_for_requests(MAINTENANCE)  # it was seen
    assert heard.posts == []
    assert "training continues signal=gce instance/maintenance-event MIGRATE_ON_HOST_MAINTENANCE" in caplog.text


def test_planned_maintenance_uses_server_time_and_follows_its_window(
    server: GceServer, heard: Heard, watch: Watch
) -> None:
    server.clock_ahead_s = -7200.0  # this machine's clock is two hours ahead
    watch("gce", server.url)
    server.wait_for_requests("upcoming-maintenance", 2)
    server.set(UPCOMING, window(server, in_s=600))
    (post,) = heard.wait_for_posts()
    assert 540 < post.remaining_s <= 601
    server.set(UPCOMING, window(server, in_s=300))
    assert heard.wait_for_posts(2)[1].remaining_s <= 301


def test_maintenance_that_is_days_ahead_is_not_announced_yet(server: GceServer, heard: Heard, watch: Watch) -> None:
    server.set(UPCOMING, window(server, in_s=86400))
    watch("gce", server.url)
    server.wait_until_held(UPCOMING)
    assert heard.posts == []


def test_a_window_of_a_vm_that_is_moved_alive_stops_nobody(server: GceServer, heard: Heard, watch: Watch) -> None:
    server.set("instance/scheduling/on-host-maintenance", "MIGRATE")
    server.set(UPCOMING, window(server, in_s=600))
    watch("gce", server.url)
    server.wait_until_held(UPCOMING)
    assert heard.posts == []


def test_a_maintenance_that_was_there_before_this_process_does_not_stop_it(
    server: GceServer, heard: Heard, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    server.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    watch("gce", server.url)
    server.wait_until_held(MAINTENANCE)
    assert heard.posts == []
    assert "ignored an event that is older than this process" in caplog.text
