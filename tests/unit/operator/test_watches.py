"""kopf's settings: it watches and leaves no trace on any object."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from gracepoint_operator import __main__ as operator_main
from gracepoint_operator.__main__ import main
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.observability.logs import JsonFormatter, PlainFormatter, about
from gracepoint_operator.watches import handlers, kopf_run


def test_the_api_server_filters_what_is_no_part_of_a_jobset() -> None:
    selectors = {str(key): value for key, value in handlers.settings().watching.label_selectors.items()}
    assert sorted(selectors.values()) == [
        "gracepoint.dev/policy",
        "jobset.sigs.k8s.io/jobset-uid",
        "jobset.sigs.k8s.io/jobset-uid",
    ]


def test_kopf_posts_nothing_peers_with_nobody_and_waits_for_nothing_for_a_minute() -> None:
    settings = handlers.settings()
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.execution.default_backoff <= 5
    assert max(settings.queueing.error_delays) <= 5
    for timeout in (settings.networking.request_timeout, settings.networking.connect_timeout):
        assert timeout is not None
        assert timeout <= 10


def test_the_watches_end_after_whole_seconds_as_the_api_server_takes_no_fractions() -> None:
    assert str(handlers.settings().watching.server_timeout).isdigit()


def test_a_replica_without_certificates_or_a_cluster_says_so_and_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        status = main(["--service-url", "https://x.y.svc:443", "--tls-directory", str(tmp_path)])
    finally:
        root.handlers[:], root.level = before
    assert status == 1
    assert "run inside a cluster" in capsys.readouterr().err


def test_a_replica_whose_webhooks_could_be_guessed_says_so_and_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_main, "Certificates", lambda directory: None)
    monkeypatch.setattr(KubeClient, "connect", lambda *_: None)
    (tmp_path / "token").write_text("short\n")
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        status = main(["--service-url", "https://x.y.svc:443", "--webhook-token", str(tmp_path / "token")])
    finally:
        root.handlers[:], root.level = before
    assert status == 1
    assert "found 5 characters, expected a secret of 16 or more" in capsys.readouterr().err


def test_logs_are_constant_messages_with_fields() -> None:
    record = logging.getLogger("x").makeRecord(
        "x", logging.INFO, "f", 1, "preemption noticed", (), None, extra=about(preemption="train-1", pods=2)
    )
    assert PlainFormatter().format(record).endswith('x preemption noticed preemption="train-1" pods=2')
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["preemption"], line["pods"]) == ("preemption noticed", "train-1", 2)


def test_no_field_of_a_log_line_takes_the_place_of_its_message() -> None:
    record = logging.getLogger("x").makeRecord(
        "x", logging.INFO, "f", 1, "moved on", (), None, extra=about(message="other", level="none")
    )
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"]) == ("moved on", "INFO")


def test_the_watches_say_to_the_api_server_who_asks() -> None:
    headers = kopf_run.Connection(server="https://localhost", token="t").as_http_headers()
    assert headers["User-Agent"].startswith("gracepoint-operator/")
    assert headers["Authorization"] == "Bearer t"
