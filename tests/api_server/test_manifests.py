"""Manifests fit what a real API server takes, those of ``examples`` also what Gracepoint asks of a JobSet."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli.lint.job_checks import check
from gracepoint_cli.lint.manifests import objects, of_kind
from gracepoint_operator.resources import CheckpointPolicy
from tests.chart.__main__ import NAMESPACE, write_manifests
from tests.testcluster.api_server import ApiServer

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path.name for path in (EXAMPLES / "manifests").glob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_manifests_are_taken_by_the_api_server(server: ApiServer, name: str) -> None:
    bodies = objects((EXAMPLES / "manifests" / name).read_text(), name)
    flags = ("--dry-run=server", "--validate=strict", "--filename=-")
    assert server.kubectl("create", *flags, stdin=yaml.safe_dump_all(bodies)).returncode == 0


@pytest.mark.parametrize("name", FILES)
def test_jobsets_of_manifests_have_no_findings(name: str) -> None:
    bodies = objects((EXAMPLES / "manifests" / name).read_text(), name)
    policies = {body["metadata"]["name"]: CheckpointPolicy.of(body) for body in of_kind(bodies, "CheckpointPolicy")}
    claims = {body["metadata"]["name"]: body for body in of_kind(bodies, "PersistentVolumeClaim")}
    (jobset,) = of_kind(bodies, "JobSet")
    report = check(jobset, policies[jobset["metadata"]["labels"][LABEL_POLICY]], claims)
    assert report.findings == ()
    assert report.effects


def test_plain_manifests_of_the_chart_are_taken_by_the_api_server(server: ApiServer, tmp_path: Path) -> None:
    path = write_manifests(tmp_path, [])
    server.kubectl("create", "namespace", NAMESPACE)
    try:
        flags = ("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", f"--filename={path}")
        applied = server.kubectl("apply", *flags).stdout
        assert len(applied.splitlines()) == len([each for each in yaml.safe_load_all(path.read_text()) if each])
    finally:
        server.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
