"""Waiting for a rollout does not believe a status that is older than its pods."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.testcluster.api import ClusterError
from tests.testcluster.waiting import wait_for_rollout
from tests.unit.demo.fakes.answers import Answers

READY: dict[str, Any] = {"metadata": {"name": "new"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
STARTING: dict[str, Any] = {
    "metadata": {"name": "new"},
    "status": {"conditions": [{"type": "Ready", "status": "False"}]},
}
GOING: dict[str, Any] = {
    "metadata": {"name": "old", "deletionTimestamp": "2026-01-01T00:00:00Z"},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}
DEPLOYMENT = {"kind": "Deployment", "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b", "c": "d"}}}}
DAEMON_SET = {
    "kind": "DaemonSet",
    "spec": {"selector": {"matchLabels": {"a": "b", "c": "d"}}},
    "status": {"desiredNumberScheduled": 1},
}


class Killed(Answers):
    """An API server whose status of a workload is always well. ``looks`` are the pods, look for look."""

    workload: dict[str, Any]
    looks: list[list[dict[str, Any]]]

    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        found: dict[str, Any] = {}
        if args[:2] == ("get", "pods"):
            assert "--selector=a=b,c=d" in args
            found = {"items": self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]}
        elif args[0] == "get":
            found = {"status": {}} | self.workload
        return subprocess.CompletedProcess(args, 0, json.dumps(found), "")


@pytest.mark.parametrize("workload", [DEPLOYMENT, DAEMON_SET], ids=lambda each: each["kind"])
def test_pods_that_go_or_are_not_ready_yet_are_waited_for(tmp_path: Path, workload: dict[str, Any]) -> None:
    cluster = Killed(tmp_path)
    cluster.workload = workload
    cluster.looks = [[GOING], [], [STARTING], [GOING, STARTING], [GOING, READY], []]
    wait_for_rollout(cluster, "any/dns", namespace="system", timeout_s=30)
    assert cluster.looks == [[]]


def test_the_error_says_which_pods_are_ready(tmp_path: Path) -> None:
    cluster = Killed(tmp_path)
    cluster.workload = {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "replicas": 2}}  # type: ignore[dict-item]
    cluster.looks = [[READY]]
    with pytest.raises(ClusterError, match="2 ready pods of deployment/dns in system, in vain; ready: new"):
        wait_for_rollout(cluster, "deployment/dns", namespace="system", timeout_s=0.0)
