"""The operator's command: what it refuses to start with."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gracepoint_operator import __main__ as operator_main
from gracepoint_operator.__main__ import main
from gracepoint_operator.kube.client import KubeClient


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
    monkeypatch.setattr(operator_main, "Certificates", lambda *_, **__: None)
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
