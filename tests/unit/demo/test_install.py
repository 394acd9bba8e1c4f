from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from demo import install
from tests.testcluster.api import ClusterError
from tests.unit.demo.fakes.answers import Answers


class Webhooks(Answers):
    """An API server that says something else at each trial."""

    answers: list[str]

    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        assert args[:2] == ("create", "--dry-run=server")
        assert not check
        assert json.loads(stdin or "")["metadata"]["labels"] == {"gracepoint.dev/policy": "none"}
        return subprocess.CompletedProcess(args, 1, "", self.answers.pop(0))


def test_the_operator_serves_once_its_own_words_come_back(tmp_path: Path) -> None:
    cluster = Webhooks(tmp_path)
    cluster.answers = ["connection refused", "found 'none', expected the name of a CheckpointPolicy in", "not asked"]
    install.wait_for_webhooks(cluster)
    assert cluster.answers == ["not asked"]


def test_what_the_api_server_said_instead_is_in_the_error(tmp_path: Path) -> None:
    cluster = Webhooks(tmp_path)
    cluster.answers = ["no endpoints available for service"]
    with pytest.raises(ClusterError, match="no endpoints available"):
        install.wait_for_webhooks(cluster, within_s=0.0)
