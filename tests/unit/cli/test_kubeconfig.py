"""What is wrong with a kubeconfig is said with what to do, and without a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
def test_a_kubeconfig_that_leads_nowhere(tmp_path: Path, found: Json | str, words: str, todo: str) -> None:
    file = tmp_path / "config"
    file.write_text(found if isinstance(found, str) else json.dumps(found))
    done = command("status", "--kubeconfig", file)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: ")
    assert words in done.err
    assert todo in done.err
    assert len(done.err.splitlines()) <= 3  # what happened, and what to do
