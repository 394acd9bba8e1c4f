"""Amazon EC2's items, against a server that wants a token as theirs does."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

import pytest

from tests.metadata.conftest import GRACE_PERIOD_S, HOST, Watch
from tests.metadata.servers import AwsServer
from tests.unit.receivers.fakes.heard import Heard

ACTION = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"
SCHEDULED = "events/maintenance/scheduled"
LIFECYCLE = "autoscaling/target-lifecycle-state"


@pytest.fixture
def server() -> Iterator[AwsServer]:
    with AwsServer() as server:
        yield server


def moment(server: AwsServer, in_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(server.now_s() + in_s, datetime.UTC)


def action(server: AwsServer, in_s: float) -> str:
    return json.dumps({"action": "terminate", "time": moment(server, in_s).strftime("%Y-%m-%dT%H:%M:%SZ")})


def scheduled(server: AwsServer, in_s: float, **changes: str) -> str:
    """As in Amazon's document on scheduled events."""
    form = "%d %b %Y %H:%M:%S GMT"
    event = {
        "NotBefore": moment(server, in_s).strftime(form),
        "Code": "system-reboot",
        "Description": "scheduled reboot",
        "EventId": "instance-event-0d59937288b749b32",
        "NotAfter": moment(server, in_s + 900).strftime(form),
        "State": "active",
        **changes,
    }
    return json.dumps([event])


def looked(server: AwsServer) -> None:
    """All items were asked for, after what was done before."""
    server.wait_for_requests(LIFECYCLE, 2)


def test_spot_interruption_uses_time_left_on_the_servers_clock(server: AwsServer, heard: Heard, watch: Watch) -> None:
    server.clock_ahead_s = 5000.0
    watch("aws", server.url)
    looked(server)
    server.set(ACTION, action(server, in_s=120))
    (post,) = heard.wait_for_posts()
    assert (post.preemption, post.cause) == ("", "SpotTermination")
    assert post.signal == f"aws spot/instance-action terminate on {HOST}"
    assert 60 < post.remaining_s <= 121


def test_a_spot_interruption_is_never_taken_back(server: AwsServer, heard: Heard, watch: Watch) -> None:
    server.set(ACTION, action(server, in_s=120))
    watch("aws", server.url)
    heard.wait_for_posts()
    server.set(ACTION, None)
    looked(server)
    assert heard.retracted == []


def test_a_spot_interruption_is_announced_once(server: AwsServer, heard: Heard, watch: Watch) -> None:
    server.set(ACTION, action(server, in_s=120))
    watch("aws", server.url)
    heard.wait_for_posts()
    looked(server)
    assert len(heard.posts) == 1


def test_a_rebalance_recommendation_stops_nobody(
    server: AwsServer, heard: Heard, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.set(REBALANCE, json.dumps({"noticeTime": "2026-01-01T00:00:00Z"}))
    watch("aws", server.url)
    looked(server)
    assert heard.posts == []
    assert (
        caplog.text.count(
            "the cloud announces a possible disruption, training continues signal=aws events/recommendations/rebalance"
        )
        == 1
    )


def test_scheduled_maintenance_is_announced_and_retracted_when_it_is_cancelled(
    server: AwsServer, heard: Heard, watch: Watch
) -> None:
    server.set(SCHEDULED, scheduled(server, in_s=900))
    watch("aws", server.url)
    (post,) = heard.wait_for_posts()
    assert post.cause == "Maintenance"
    assert "system-reboot instance-event-0d59937288b749b32" in post.signal
    assert 800 < post.remaining_s <= 901
    server.set(SCHEDULED, scheduled(server, in_s=900, State="canceled", Description="[Canceled] scheduled reboot"))
    assert heard.wait_for_retraction() == post.signal


def test_end_by_instance_group_has_the_grace_period(server: AwsServer, heard: Heard, watch: Watch) -> None:
    watch("aws", server.url)
    looked(server)
    server.set(LIFECYCLE, "Terminated")
    (post,) = heard.wait_for_posts()
    assert (post.cause, post.remaining_s) == ("ScaleDown", GRACE_PERIOD_S)


def test_a_token_that_is_over_is_renewed(server: AwsServer, heard: Heard, watch: Watch) -> None:
    watch("aws", server.url)
    looked(server)
    server.forget_tokens()
    server.set(ACTION, action(server, in_s=120))
    assert len(heard.wait_for_posts()) == 1


def test_one_item_that_cannot_be_read_does_not_hide_the_others(
    server: AwsServer, heard: Heard, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    server.set(SCHEDULED, "not JSON")
    watch("aws", server.url)
    looked(server)
    server.set(ACTION, action(server, in_s=120))
    assert len(heard.wait_for_posts()) == 1
    looked(server)
    assert caplog.text.count("events/maintenance/scheduled: expected JSON, found 'not JSON'") == 1, "logged once"
