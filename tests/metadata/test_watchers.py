"""What all watchers have in common: finding the cloud, bad servers, no server, and their end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from gracepoint.receivers import metadata as module
from tests.metadata.conftest import Watch
from tests.metadata.servers import AwsServer, AzureServer, GceServer, MetadataServer
from tests.unit.receivers.fakes.heard import Heard

SERVERS: dict[str, type[MetadataServer]] = {"gce": GceServer, "aws": AwsServer, "azure": AzureServer}
#: A request that each cloud's watcher makes at every look.
ASKED = {"gce": "instance/preempted", "aws": "spot/instance-action", "azure": "scheduledevents"}


@pytest.fixture(params=SERVERS)
def cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(cloud: str) -> Iterator[MetadataServer]:
    with SERVERS[cloud]() as server:
        yield server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BACKOFF_S", 0.02)


def test_auto_finds_out_which_cloud_this_is(cloud: str, server: MetadataServer, watch: Watch) -> None:
    watch("auto", server.url)
    server.wait_for_requests(ASKED[cloud])


def test_auto_gives_up_where_nothing_answers(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    watch("auto", f"http://127.0.0.1:{port}")  # nobody listens there any more
    deadline_s = time.monotonic() + 60
    while "no cloud's metadata is watched" not in caplog.text:
        assert time.monotonic() < deadline_s, caplog.text
        time.sleep(0.005)


def test_failing_server_does_not_flood_the_log(
    cloud: str, server: MetadataServer, heard: Heard, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch(cloud, server.url)
    server.wait_for_requests(ASKED[cloud], 2)
    server.update(lambda: setattr(server, "failing", True))
    server.wait_for_requests(ASKED[cloud] if cloud != "gce" else "preempted", 5)
    server.update(lambda: setattr(server, "failing", False))
    deadline_s = time.monotonic() + 60
    while "metadata can be read again" not in caplog.text:
        assert time.monotonic() < deadline_s, caplog.text
        time.sleep(0.005)
    said = [record.getMessage() for record in caplog.records if "cannot read" in record.getMessage()]
    assert said
    assert len(set(said)) == len(said), "each reason once, however often it is tried"
    assert (heard.posts, heard.retracted) == ([], [])


@pytest.mark.parametrize("garbage", ["", "<html>", "[1, 2]", '{"Events": [7]}', "null", "\x00\xff"])
def test_garbage_notifies_nobody(cloud: str, server: MetadataServer, heard: Heard, watch: Watch, garbage: str) -> None:
    server.garbled = garbage
    watch(cloud, server.url)
    server.wait_for_requests("/metadata/" if cloud == "azure" else ASKED[cloud], 2)
    assert (heard.posts, heard.retracted) == ([], [])


def test_closing_is_quick_though_a_server_never_answers(cloud: str, watch: Watch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        watchers = watch(cloud, f"http://127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        connection.settimeout(60)
        assert connection.recv(10), "a request is under way"
        watchers.close()
        watchers.close()
        connection.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("gracepoint-metadata")]


def test_closing_while_the_cloud_is_sought_leaves_nothing_behind(watch: Watch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        watchers = watch("auto", f"http://127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        watchers.close()
        connection.close()
