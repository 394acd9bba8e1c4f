"""Manifests fit what a real API server takes, those of ``examples`` also what Gracepoint asks of a JobSet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli.lint.job_checks import check
from gracepoint_cli.lint.manifests import objects, of_kind
from gracepoint_operator.resources import CheckpointPolicy
from tests.chart.__main__ import NAMESPACE, write_manifests
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path.name for path in (EXAMPLES / "manifests").glob("*.yaml"))
#: Other projects, where their sources have the definitions of their resources, and what begins the API group.
OTHERS = {"kueue": ("config/components/crd/bases", "kueue."), "trainer": ("manifests/base/crds", "trainer.")}


def examples() -> Iterator[Any]:
    """Each file of manifests, and the other project whose definitions it needs."""
    for path in sorted(EXAMPLES.rglob("*.yaml")):
        bodies = list(yaml.safe_load_all(path.read_text()))
        if all("apiVersion" in body for body in bodies):  # not the chart's values
            of = [name for name, (_, group) in OTHERS.items() if any(b["apiVersion"].startswith(group) for b in bodies)]
            marks = [pytest.mark.controllers] if of else []
            yield pytest.param(path, "".join(of), marks=marks, id=path.relative_to(EXAMPLES).as_posix())


@pytest.fixture
def other(request: pytest.FixtureRequest, server: ApiServer) -> Iterator[str]:
    """The other project, whose definitions the API server has meanwhile. Empty: none."""
    name: str = request.param
    folder = parts.module_folder(name) / OTHERS[name][0] if name else None
    definitions = [f"--filename={path}" for path in folder.glob(f"{OTHERS[name][1]}*.yaml")] if folder else []
    if definitions:
        server.kubectl("create", *definitions)
        server.define()
    yield name
    if definitions:
        server.kubectl("delete", *definitions)


@pytest.mark.parametrize(("path", "other"), list(examples()), indirect=["other"])
def test_manifests_are_taken_by_the_api_server(server: ApiServer, path: Path, other: str) -> None:
    bodies = objects(path.read_text(), path.name)
    for namespace in {body["metadata"].get("namespace", "default") for body in bodies}:
        server.kubectl("create", "namespace", namespace, check=False)  # it stays
    flags = ("--dry-run=server", "--validate=strict", "--filename=-")
    created = server.kubectl("create", *flags, stdin=yaml.safe_dump_all(bodies)).stdout
    assert len(created.splitlines()) == len(bodies), other


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
