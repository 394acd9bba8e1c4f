"""The AWS watcher against Amazon's own mock of its metadata service, version 2 only; ``conftest`` says when it runs."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.receivers.metadata import aws
from tests.metadata.conftest import GRACE_PERIOD_S, Watch
from tests.unit.receivers.fakes.heard import Heard

#: Enough for the watcher's first look to come before what is announced.
DELAY_S = 3


@contextlib.contextmanager
def mock(folder: Path, *arguments: str) -> Iterator[str]:
    """The running program's address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [os.environ["AEMM"], *arguments, "--imdsv2", "--hostname", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"HOME": str(folder)}, cwd=folder)
    try:
        give_up_at_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < give_up_at_s
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def moment(in_s: float) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("cloud", ["aws", "auto"])
def test_a_spot_interruption_and_no_rebalance_recommendation_is_announced(
    heard: Heard, watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture, cloud: str
) -> None:
    caplog.set_level("INFO")
    with mock(tmp_path, "spot", "--time", moment(120), "--mock-delay-sec", str(DELAY_S)) as url:
        watch(cloud, url)
        (post,) = heard.wait_for_posts()
    assert (post.cause, "spot/instance-action terminate" in post.signal) == ("SpotTermination", True)
    assert 60 < post.remaining_s <= 121
    assert "training continues signal=aws events/recommendations/rebalance" in caplog.text


@pytest.mark.parametrize("code", ["instance-stop", "system-reboot", "instance-retirement"])
def test_a_scheduled_event_is_announced(heard: Heard, watch: Watch, tmp_path: Path, code: str) -> None:
    with mock(tmp_path, "events", "--code", code, "--not-before", moment(900)) as url:
        watch("aws", url)
        (post,) = heard.wait_for_posts()
    assert post.signal.startswith(f"aws events/maintenance/scheduled {code} instance-event-1234567890abcdef0")
    assert 800 < post.remaining_s <= 901


def test_an_event_that_was_cancelled_is_not(heard: Heard, watch: Watch, tmp_path: Path) -> None:
    with mock(tmp_path, "events", "--state", "canceled", "--not-before", moment(900)) as url:
        watch("aws", url)
        log = tmp_path / "log"
        give_up_at_s = time.monotonic() + 60
        while log.read_text().count("sent request to mock scheduled event") < 2:
            assert time.monotonic() < give_up_at_s, log.read_text()
            time.sleep(0.01)
    assert heard.posts == []


def test_the_end_of_an_instance_by_its_group_is_reported(heard: Heard, watch: Watch, tmp_path: Path) -> None:
    with mock(tmp_path, "asglifecycle", "--asg-termination-delay-sec", str(DELAY_S)) as url:
        watch("aws", url)
        (post,) = heard.wait_for_posts()
    assert (post.cause, post.remaining_s) == ("ScaleDown", GRACE_PERIOD_S)


def test_a_token_that_is_over_is_renewed(
    heard: Heard, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "TOKEN_TTL_HEADERS", {"X-aws-ec2-metadata-token-ttl-seconds": "1"})
    with mock(tmp_path, "spot", "--time", moment(120), "--mock-delay-sec", str(DELAY_S)) as url:
        watch("aws", url)
        assert len(heard.wait_for_posts()) == 1
