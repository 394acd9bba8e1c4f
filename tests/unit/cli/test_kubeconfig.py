"""What is wrong with a kubeconfig is said with what to do; the options of kubectl reach the API server."""

from __future__ import annotations

import http.server
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint_cli.app import run
from tests.command_line import command

Json = dict[str, Any]


def config(user: Json, **cluster: str) -> Json:
    return {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9", **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "here",
    }


def login(program: str, *arguments: str) -> Json:
    version = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": version, "command": program, "args": arguments, "interactiveMode": "Never"}}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("found", "words", "todo"),
    [
        pytest.param("{", "expected a kubeconfig", "", id="no YAML"),
        pytest.param("- a", "expected a kubeconfig, found a list", "", id="no object"),
        pytest.param("", "found no kubeconfig with a context", "--kubeconfig", id="empty"),
        pytest.param(config({}) | {"current-context": None}, "no current context", "here", id="no current context"),
        pytest.param(config({}) | {"clusters": []}, "Expected object with name c", "--kubeconfig", id="no cluster"),
        pytest.param(
            config({}, **{"certificate-authority": "/none.crt"}), "/none.crt", "--kubeconfig", id="no authority"
        ),
        pytest.param(
            config(login("no-such-plugin")), "'no-such-plugin'", "kubectl get namespaces", id="no login program"
        ),
        pytest.param(config(login("false")), "process returned 1", "log in again", id="a login that fails"),
        pytest.param(config(login("echo", "hello")), "failed to decode", "log in again", id="a login without a token"),
        pytest.param(config({"token": "x"}), "does not answer: Connection refused", "VPN", id="nobody listens"),
        pytest.param(
            config({"token": "x"}, server="https://no-such-host.invalid"), "does not answer: ", "VPN", id="no such host"
        ),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_an_error_that_says_what_to_do(
    tmp_path: Path, found: Json | str, words: str, todo: str
) -> None:
    file = tmp_path / "config"
    file.write_text(found if isinstance(found, str) else json.dumps(found))
    done = command("status", "--kubeconfig", file)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: ")
    assert words in done.err
    assert todo in done.err
    assert len(done.err.splitlines()) <= 3  # what happened, and what to do


class ApiServer(http.server.ThreadingHTTPServer):
    """Answers every list with the same objects, or not at all. Keeps who asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.policies: list[Json] = []
        self.users: set[str | None] = set()
        self.groups: set[tuple[str, ...]] = set()
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        self.server.users.add(self.headers.get("Impersonate-User"))
        self.server.groups.add(tuple(self.headers.get_all("Impersonate-Group", ())))
        self.server.may_answer.wait(30)
        items = self.server.policies if "checkpointpolicies" in self.path else []
        body = json.dumps({"items": items, "metadata": {}}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join(30)


@pytest.fixture
def kubeconfig(api_server: ApiServer, tmp_path: Path) -> Path:
    file = tmp_path / "config"
    file.write_text(json.dumps(config({"token": "x"}, server=f"http://127.0.0.1:{api_server.server_port}")))
    return file


def pause_with(monkeypatch: pytest.MonkeyPatch, pause: Callable[[float], None]) -> None:
    """Pauses of this thread are `pause`. Those of other threads, which earlier tests may have left, stay."""
    tested, sleep = threading.get_ident(), time.sleep
    monkeypatch.setattr(time, "sleep", lambda length_s: (pause if threading.get_ident() == tested else sleep)(length_s))


def policy(name: str) -> Json:
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {}}


@pytest.mark.integration
def test_all_requests_are_made_as_the_user_that_is_given(api_server: ApiServer, kubeconfig: Path) -> None:
    assert command("status", "--kubeconfig", kubeconfig).code == 0
    assert api_server.users == {None}
    api_server.users.clear()
    assert command("status", "--kubeconfig", kubeconfig, "--as", "system:serviceaccount:team:ci").code == 0
    assert api_server.users == {"system:serviceaccount:team:ci"}
    assert api_server.groups == {()}
    api_server.groups.clear()
    groups = ("--as-group", "team", "--as-group", "system:authenticated")
    assert command("status", "--kubeconfig", kubeconfig, "--as", "ci", *groups).code == 0
    assert api_server.groups == {("team", "system:authenticated")}
    done = command("status", "--kubeconfig", kubeconfig, *groups)
    assert (done.code, "Name one with --as" in done.err) == (2, True), done


@pytest.mark.integration
def test_a_request_takes_no_longer_than_is_asked(api_server: ApiServer, kubeconfig: Path) -> None:
    api_server.may_answer.clear()
    done = command("status", "--kubeconfig", kubeconfig, "--request-timeout", "50ms")
    assert (done.code, "does not answer" in done.err) == (3, True), done
    api_server.may_answer.set()
    for limit in ("0", "30", "1m30s"):
        assert command("status", "--kubeconfig", kubeconfig, "--request-timeout", limit).code == 0


@pytest.mark.integration
def test_each_change_is_shown_until_the_user_ends_it(
    api_server: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([[policy("first")], [policy("first")], [policy("first"), policy("second")]])

    def pause(_: float) -> None:
        if (found := next(answers, None)) is None:
            raise KeyboardInterrupt
        api_server.policies = found

    pause_with(monkeypatch, pause)
    api_server.policies = []  # those of other tests
    done = command("status", "--kubeconfig", kubeconfig, "-w", "-o", "wide")
    assert done.code == 130
    before, *pages = done.out.split("NAMESPACE   POLICY")
    assert before.startswith("There is no CheckpointPolicy")
    assert [page.count("default ") for page in pages] == [1, 2]


@pytest.mark.integration
def test_a_watch_continues_after_a_request_that_failed_and_separates_documents(
    api_server: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.policies = [policy("first")]
    steps = iter([(403, []), (200, [policy("second")])])

    def pause(_: float) -> None:
        if (step := next(steps, None)) is None:
            raise KeyboardInterrupt
        api_server.status, api_server.policies = step

    pause_with(monkeypatch, pause)
    done = command("status", "--kubeconfig", kubeconfig, "-w", "-o", "yaml")
    assert (done.code, "error: the API server refused" in done.err) == (130, True), done
    names = [document["policies"][0]["name"] for document in yaml.safe_load_all(done.out)]
    assert names == ["first", "second"]
    api_server.status = 403
    assert command("status", "--kubeconfig", kubeconfig, "-w").code == 3, "nothing was right yet"


@pytest.mark.integration
@pytest.mark.parametrize("form", ["table", "json"])
def test_a_pipe_gets_each_answer_of_a_watch_before_the_next_is_looked_for(
    api_server: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    api_server.policies = [policy("first")]
    pipe = io.BytesIO()

    def pause(_: float) -> None:
        raise KeyboardInterrupt

    pause_with(monkeypatch, pause)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe))
    with pytest.raises(SystemExit):
        run("gracepoint", ["status", "--kubeconfig", str(kubeconfig), "-w", "-o", form])
    assert b"first" in pipe.getvalue()


@pytest.mark.integration
def test_what_is_shown_at_a_time_that_is_no_change_is_not_shown_again(
    api_server: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.policies = [policy("first")]
    pauses = iter(range(3))

    def pause(_: float) -> None:
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    pause_with(monkeypatch, pause)
    done = command("status", "--kubeconfig", kubeconfig, "--watch", "-o", "yaml")
    assert done.out.count("policies:") == 1
