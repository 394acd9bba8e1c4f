"""What ``helm test`` runs, against a replica over its real ports."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from gracepoint_operator.self_test import main
from tests.contract.fakes.replicas import Replica
from tests.unit.operator.fakes.api import MemoryApi


def run(replica: Replica, folder: Path, *, channel: int | None = None, authorities: str | None = None) -> int:
    trust = folder / "ca-bundle.crt"
    trust.write_text(authorities or replica.core_trusts)
    return main(
        [
            f"--service-url=https://localhost:{channel or replica.server.https_port}",
            f"--webhook-url=https://localhost:{replica.server.webhook_port}",
            f"--authorities={trust}",
        ]
    )


def test_a_sound_installation_passes(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(start(api), tmp_path) == 0
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["ok"] * 3


def test_a_certificate_that_pods_do_not_trust_fails(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = trustme.CA().cert_pem.bytes().decode()
    assert run(start(api), tmp_path, authorities=other) == 1
    assert "pods do not trust the certificate" in capsys.readouterr().out


def test_an_operator_that_does_not_answer_fails(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    assert run(start(api), tmp_path, channel=port) == 1
    said = capsys.readouterr().out
    assert "ConnectionRefusedError" in said
    assert "ok      the webhooks' port answers" in said


def test_an_operator_that_never_started_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--service-url=https://localhost:1", f"--authorities={tmp_path / 'none'}"])
    assert status == 1
    assert "has the operator started?" in capsys.readouterr().out


def test_a_snapshot_server_that_pods_do_not_trust_fails(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only its certificate is looked at, so the operator's own port stands for a server here."""
    replica = start(api)
    trust = tmp_path / "ca-bundle.crt"
    trust.write_text(replica.core_trusts)
    url = f"--snapshots-url=https://localhost:{replica.server.https_port}"
    assert main([f"--service-url=https://localhost:{replica.server.https_port}", url, f"--authorities={trust}"]) == 0
    assert "ok      snapshot server: the certificate is trusted" in capsys.readouterr().out
    trust.write_text(trustme.CA().cert_pem.bytes().decode())
    assert main([f"--service-url=https://localhost:{replica.server.https_port}", url, f"--authorities={trust}"]) == 1
    assert capsys.readouterr().out.count("pods do not trust the certificate") == 3
