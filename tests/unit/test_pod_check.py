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
from gracepoint.pod_check import check_pod
from gracepoint.wire.names import PATH_SUBSCRIBE, Env

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
def test_what_fails_is_named_and_the_rest_goes_on(
    environment: dict[str, str], change: dict[str, str], check: str, words: str
) -> None:
    found = states(environment | change)
    assert found[check][0] == "FAILED"
    assert words in found[check][1]
    assert {state for name, (state, _) in found.items() if name != check} == {"ok"}


def test_the_result_is_written_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"--json={tmp_path / 'result'}"]) == 1  # this process was not prepared
    assert "FAILED  channel" in capsys.readouterr().out
    assert [item["name"] for item in json.loads((tmp_path / "result").read_text())] == ["library", "channel", "storage"]
