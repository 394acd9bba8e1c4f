"""The operator's command: what it refuses to start with."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
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


@pytest.mark.integration
def test_a_replica_that_was_stopped_for_a_while_goes_on_until_it_is_told_to_end() -> None:
    """As under a debugger, and where a node or a container is frozen."""
    waits = (
        "import signal, threading; from gracepoint_operator import __main__ as replica\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, replica._ENDING)\n"
        "print('waits', flush=True)\n"
        "print(replica.wait_for_end(threading.Event()))"
    )
    with subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waits\n"
        time.sleep(0.2)  # most likely it waits now; if not, the test proves less
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * operator_main._LOOK_S)
        child.send_signal(signal.SIGCONT)
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=60)[0] == f"{signal.SIGTERM.value}\n"
