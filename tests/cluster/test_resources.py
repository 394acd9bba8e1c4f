"""The custom resources at a real API server: what it refuses, what may change, what people see."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint_operator.kube.objects import format_time
from tests.testcluster.api import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NAMESPACE = "resources-test"
#: Yesterday, in seconds since the epoch: an operator on the same cluster deletes what ended more than 30 days ago.
OBSERVED = time.time() - 86_400

Json = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def namespace(installed: Cluster) -> Iterator[None]:
    """A namespace of these tests. The CRDs are the chart's: it takes over none that belong to no release."""
    installed.kubectl("create", "namespace", NAMESPACE)
    yield
    installed.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _to_the_second(at: float) -> str:
    return format_time(at).partition(".")[0]


def policy(name: str = "p", **spec: Any) -> Json:
    return {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"checkpoint": {"directory": "/checkpoints/{jobset}"}} | spec,
    }


def preemption(name: str) -> Json:
    return {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "Preemption",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "jobSet": {"name": "llm", "uid": "u-1"},
            "epoch": 1,
            "cause": "SpotTermination",
            "signal": "taint cloud.google.com/impending-node-termination",
            "confidence": "sure",
            "cancelable": False,
            "nodes": ["node-1"],
            "observedAt": format_time(OBSERVED),
            "deadline": format_time(OBSERVED + 60),
            "mode": "Enforce",
            "policy": {"name": "p", "spec": {}},
        },
    }


def _record(cluster: Cluster, name: str) -> None:
    """Makes a Preemption, as the operator does and an administrator may."""
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(preemption(name)))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({"checkpoint": {}}, ["spec.checkpoint.directory"], id="no directory"),
        pytest.param(
            {"checkpoint": {"directory": "/c/{job}"}},
            ["spec.checkpoint.directory", "{namespace} and {jobset}", "found /c/{job}"],
            id="unknown placeholder",
        ),
        pytest.param(
            {"checkpoint": {"directory": "az://bucket/c"}},
            ["spec.checkpoint.directory", "file://, gs:// or s3:// URI", "found az://bucket/c"],
            id="unknown scheme",
        ),
        pytest.param(
            {"checkpoint": {"directory": "s3://bucket/c", "objectStore": {"endpoint": "minio:9000"}}},
            ["spec.checkpoint.objectStore.endpoint", "expected http:// or https://", "found minio:9000"],
            id="endpoint without a scheme",
        ),
        pytest.param(
            {"checkpoint": {"directory": "/c", "objectStore": {"endpoint": "http://minio:9000"}}},
            ["spec.checkpoint", "only for a directory that is a gs:// or s3:// URI", "found /c"],
            id="endpoint for a path",
        ),
        pytest.param(
            {
                "checkpoint": {
                    "directory": "gs://bucket/c",
                    "objectStore": {"serverSideEncryption": {"algorithm": "AES256"}},
                }
            },
            ["spec.checkpoint", "only for a directory that is an s3:// URI", "found gs://bucket/c"],
            id="an algorithm for gs",
        ),
        pytest.param(
            {"checkpoint": {"directory": "s3://bucket/c", "objectStore": {"serverSideEncryption": {"keyId": "k"}}}},
            ["spec.checkpoint", "serverSideEncryption.keyId is only for", "found s3://bucket/c"],
            id="a key without an algorithm",
        ),
        pytest.param(
            {"compilationCache": {"directory": "programs"}},
            ["spec.compilationCache.directory", "expected an absolute path", "found programs"],
            id="relative path of programs",
        ),
        pytest.param({"mode": "enforce"}, ["spec.mode", '"Enforce", "Observe"'], id="unknown mode"),
        pytest.param({"signals": ["Taint"]}, ["spec.signals[0]", "NodeTaint"], id="unknown signal"),
        pytest.param({"deadline": {"margin": 0.5}}, ["spec.deadline.margin", "1"], id="margin below 1"),
        pytest.param({"afterSave": {"savedExitCode": 1}}, ["spec.afterSave.savedExitCode", "3"], id="code of a shell"),
        pytest.param({"afterSave": {"savedExitCode": 78}}, ["spec.afterSave", "must differ"], id="exit codes alike"),
        pytest.param({"cadence": 5}, ["spec.cadence"], id="unknown field"),
    ],
)
def test_the_api_server_refuses_a_bad_policy_naming_the_field(cluster: Cluster, spec: Json, words: list[str]) -> None:
    text = json.dumps(policy(**spec))
    done = cluster.kubectl("create", "--validate=strict", "-f", "-", stdin=text, check=False)
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr


def test_a_policy_whose_name_cannot_be_a_label_is_refused(cluster: Cluster) -> None:
    text = json.dumps(policy("p" * 64))
    done = cluster.kubectl("create", "-f", "-", stdin=text, check=False)
    assert done.returncode != 0
    assert "metadata.name is used as a label's value" in done.stderr


def test_defaults_are_stored_with_the_policy(cluster: Cluster) -> None:
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(policy("defaults")))
    shown = cluster.kubectl("get", "checkpointpolicy", "defaults", "-n", NAMESPACE, "-o", "json")
    spec = json.loads(shown.stdout)["spec"]
    assert spec["mode"] == "Enforce"
    assert spec["afterSave"] == {"savedExitCode": 77, "unsavedExitCode": 78}
    assert spec["checkpoint"]["everySteps"] == 100


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"epoch": 2}, "spec.epoch", id="epoch"),
        pytest.param({"jobSet": {"uid": "u-2"}}, "spec.jobSet", id="jobSet"),
        pytest.param({"mode": "Observe"}, "spec.mode", id="mode"),
        pytest.param({"observedAt": f"{_to_the_second(OBSERVED + 1)}Z"}, "spec.observedAt", id="observedAt"),
        pytest.param({"policy": {"spec": {"mode": "Observe"}}}, "spec.policy", id="policy"),
    ],
)
def test_what_a_preemption_is_about_cannot_be_changed(cluster: Cluster, change: Json, field: str) -> None:
    name = f"fixed-{field.lower().replace('.', '-')}"
    _record(cluster, name)
    done = _patch(cluster, name, change)
    assert done.returncode != 0
    assert f"{field}: Invalid value" in done.stderr
    assert "is immutable" in done.stderr


def _patch(cluster: Cluster, name: str, spec: Json) -> Any:
    patch = json.dumps({"spec": spec})
    return cluster.kubectl("patch", "preemption", name, "-n", NAMESPACE, "--type=merge", "-p", patch, check=False)


def test_a_later_signal_may_move_the_deadline_and_add_nodes(cluster: Cluster) -> None:
    _record(cluster, "moving")
    deadline = f"{_to_the_second(OBSERVED + 45)}.1Z"
    change = {"deadline": deadline, "nodes": ["node-1", "node-2"], "confidence": "likely"}
    done = _patch(cluster, "moving", change)
    assert done.returncode == 0, done.stderr


def test_each_replica_owns_its_own_entry_and_the_table_reads_well(cluster: Cluster) -> None:
    _record(cluster, "shown")
    for replica in ("op-a", "op-b"):
        status = {"phase": "Committed", "step": 41, "stepsLost": 0, "replicas": [{"name": replica, "told": 2}]}
        body = {k: v for k, v in preemption("shown").items() if k != "spec"} | {"status": status}
        cluster.kubectl(
            "apply",
            "--server-side",
            "--subresource=status",
            f"--field-manager={replica}",
            "--force-conflicts",
            "-f",
            "-",
            stdin=json.dumps(body),
        )
    shown = json.loads(cluster.kubectl("get", "preemption", "shown", "-n", NAMESPACE, "-o", "json").stdout)
    assert [r["name"] for r in shown["status"]["replicas"]] == ["op-a", "op-b"]
    assert shown["spec"]["observedAt"] == format_time(OBSERVED)
    header, row = cluster.kubectl("get", "preemption", "shown", "-n", NAMESPACE).stdout.splitlines()
    assert header.split()[:6] == ["NAME", "JOBSET", "PHASE", "CAUSE", "STEP", "STEPSLOST"]
    assert row.split()[:6] == ["shown", "llm", "Committed", "SpotTermination", "41", "0"]


def test_an_upgrade_keeps_the_webhooks_token(installed: Cluster) -> None:
    """The API server goes on with the token that the webhooks know. The operator itself keeps its certificate."""
    # Only --dry-run=server lets a template look into the cluster, as an installation and an upgrade do.
    chart = ("gracepoint", str(ROOT / "charts" / "gracepoint"), "-n", "gracepoint-system", "--kube-version", "1.34.0")
    kept, again = (_secrets(installed.helm("template", "--dry-run=server", *chart).stdout) for _ in range(2))
    assert _values(kept)
    assert _values(again) == _values(kept)
    assert _values(_secrets(installed.helm("template", *chart).stdout)).isdisjoint(_values(kept))


def _values(secrets: list[Json]) -> set[str]:
    return {value for secret in secrets for value in secret.get("data", {}).values()}


def _secrets(rendered: str) -> list[Json]:
    return [o for o in yaml.safe_load_all(rendered) if o and o["kind"] == "Secret"]
