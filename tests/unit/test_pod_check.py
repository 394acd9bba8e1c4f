"""``python -m gracepoint check``: what a pod finds out about its channel and its storage."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from gracepoint.__main__ import main
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.objects import object_store
from gracepoint.pod_check import check_pod
from gracepoint.wire.names import PATH_SUBSCRIBE, Env
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Fault, How, Rule
from tests.object_stores.servers import Bucket
from tests.waiting import FastTime

pytestmark = pytest.mark.integration

STRANGER = trustme.CA().cert_pem.bytes().decode()


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers as the operator does to a message that is none."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(400 if self.path == PATH_SUBSCRIBE else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a prepared pod; the server behind them ends with the test."""
    authority = trustme.CA()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        context = trustme_context(authority)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield {
            Env.OPERATOR_URL: f"https://localhost:{server.server_port}",
            Env.CA_CERTIFICATE: authority.cert_pem.bytes().decode(),
            Env.DIRECTORY: str(tmp_path / "checkpoints"),
        }
        server.shutdown()
        thread.join(30)


def trustme_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


def states(environment: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {item["name"]: (item["state"], item["message"]) for item in check_pod(environment)}


def test_a_pod_that_reaches_everything_is_good(environment: dict[str, str], tmp_path: Path) -> None:
    found = states(environment)
    assert {state for state, _ in found.values()} == {"ok"}, found
    assert list((tmp_path / "checkpoints").iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        pytest.param({Env.OPERATOR_URL: ""}, "channel", "the pod was not prepared", id="not prepared"),
        pytest.param({Env.OPERATOR_URL: "https://localhost:1"}, "channel", "NetworkPolicies", id="nobody listens"),
        pytest.param(
            {Env.CA_CERTIFICATE: trustme.CA().cert_pem.bytes().decode()}, "channel", "not trusted", id="trust"
        ),
        pytest.param({Env.DIRECTORY: ""}, "storage", "the pod was not prepared", id="no directory"),
        pytest.param({Env.DIRECTORY: "/proc/checkpoints"}, "storage", "the right to write there", id="no right"),
        pytest.param({Env.DIRECTORY: "relative"}, "storage", "expected an absolute path", id="no directory at all"),
    ],
)
def test_what_fails_is_named_and_the_rest_continues(
    environment: dict[str, str], change: dict[str, str], check: str, words: str
) -> None:
    found = states(environment | change)
    assert found[check][0] == "FAILED"
    assert words in found[check][1]
    assert {state for name, (state, _) in found.items() if name != check} == {"ok"}


def test_a_bucket_is_written_read_and_left_clean(environment: dict[str, str], bucket: Bucket) -> None:
    found = states(environment | {Env.DIRECTORY: f"{bucket.uri}/runs/llm"})
    assert found["storage"] == ("ok", f"{bucket.uri}/runs/llm: written, read and deleted")
    assert not storage_path(f"{bucket.uri}/runs").is_folder()


def test_a_bucket_that_does_not_exist_is_no_matter_of_rights(environment: dict[str, str], bucket: Bucket) -> None:
    state, message = states(environment | {Env.DIRECTORY: f"{bucket.scheme}://not-{bucket.name}/runs"})["storage"]
    assert (state, "The bucket does not exist" in message, "the right to write" in message) == ("FAILED", True, False)


def test_a_bucket_that_refuses_writes_needs_a_right(
    environment: dict[str, str], far: Bucket, store_proxy: FaultProxy
) -> None:
    with store_proxy.rules(Rule(Fault(How.ANSWER, status=403), kinds=("write",))):
        state, message = states(environment | {Env.DIRECTORY: f"{far.uri}/runs"})["storage"]
    assert (state, "or its service account, the right to write there" in message) == ("FAILED", True), message


@pytest.mark.timeout(45)  # less than the patience with a store that does not answer
def test_what_cannot_be_deleted_either_is_not_waited_for(
    environment: dict[str, str], far: Bucket, store_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "time", FastTime(20.0))
    with store_proxy.rules(
        Rule(Fault(How.ANSWER, status=403), kinds=("write",)), Rule(Fault(How.REFUSE), kinds=("delete",))
    ):
        assert states(environment | {Env.DIRECTORY: f"{far.uri}/runs"})["storage"][0] == "FAILED"


def test_each_result_is_reported_before_the_next_check(environment: dict[str, str]) -> None:
    seen: list[list[str]] = []
    check_pod(environment, lambda found: seen.append([item["name"] for item in found]))
    assert seen == [["library"], ["library", "channel"], ["library", "channel", "storage"]]


def test_the_result_is_written_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"--json={tmp_path / 'result'}"]) == 1  # this process was not prepared
    assert "FAILED  channel" in capsys.readouterr().out
    assert [item["name"] for item in json.loads((tmp_path / "result").read_text())] == ["library", "channel", "storage"]
