"""What the lint finds in a JobSet, and what it leaves alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint_cli.lint.job_checks import LintReport, check
from gracepoint_cli.lint.pods import Finding, Severity
from gracepoint_operator.resources import CheckpointPolicy
from tests.command_line import command
from tests.unit.operator.fakes.samples import jobset, pod_of, policy

Json = dict[str, Any]
SHARED = {"checkpoints": {"spec": {"accessModes": ["ReadWriteMany"]}}}
EXAMPLES = Path(__file__).parents[4] / "examples"


def good() -> Json:
    body = jobset()
    pod = pod_of(body)
    pod["restartPolicy"], pod["terminationGracePeriodSeconds"] = "Never", 60
    return body


def report(body: Json, under: CheckpointPolicy | None = None, claims: Json | None = None) -> LintReport:
    return check(body, under or policy(), SHARED if claims is None else claims)


def found(body: Json, under: CheckpointPolicy | None = None, claims: Json | None = None) -> dict[str, Finding]:
    return {finding.rule: finding for finding in report(body, under, claims).findings}


def test_a_good_jobset_has_no_findings() -> None:
    assert report(good()).findings == ()


@pytest.mark.parametrize(
    ("place", "package"),
    [
        ({"directory": "gs://bucket/programs"}, "etils[epath-gcs]"),
        ({"directory": "s3://bucket/programs"}, "etils[epath-s3]"),
    ],
)
def test_what_jax_needs_to_keep_programs_in_a_bucket_is_named(place: Json, package: str) -> None:
    (finding,) = report(good(), policy(compilationCache={"enabled": True, **place})).findings
    assert (finding.rule, finding.severity) == ("programs-in-bucket", Severity.INFO)
    assert finding.path.endswith("containers[train].env[JAX_COMPILATION_CACHE_DIR]")
    assert f"found {place['directory']}: " in finding.message
    assert f"JAX needs the Python package {package} in the image" in finding.message


def test_programs_of_checkpoints_in_a_bucket_need_a_directory() -> None:
    under = policy(compilationCache={"enabled": True}, checkpoint={"directory": "gs://bucket/{jobset}"})
    (finding,) = report(good(), under).findings
    assert (finding.rule, finding.severity) == ("without-effect", Severity.WARNING)
    assert "Write a directory into spec.compilationCache" in finding.message


@pytest.mark.parametrize("cache", [{"enabled": True}, {"directory": "gs://bucket/programs"}, {"maxBytes": 1 << 20}])
def test_programs_on_a_file_system_or_nowhere_need_nothing(cache: Json) -> None:
    assert report(good(), policy(compilationCache=cache)).findings == ()


def test_bounds_of_compiled_programs_have_no_effect() -> None:
    findings = report(good(), policy(compilationCache={"enabled": True, "maxBytes": 1 << 20, "unusedDays": 7})).findings
    assert [(finding.rule, finding.severity) for finding in findings] == [("without-effect", Severity.INFO)] * 2
    assert "spec.compilationCache.maxBytes has no effect" in findings[0].message
    assert "spec.compilationCache.unusedDays has no effect" in findings[1].message


def container(**fields: Any) -> Json:
    body = good()
    pod_of(body)["containers"][0] |= fields
    return body


def pod(**fields: Any) -> Json:
    body = good()
    pod_of(body).update(fields)
    return body


def volume(**source: Any) -> Json:
    return pod(volumes=[{"name": "checkpoints", **source}])


PROBE = {"httpGet": {"path": "/", "port": 80}}


@pytest.mark.parametrize(
    ("body", "rule", "severity", "words"),
    [
        pytest.param(
            container(command=["sh", "-c", "cd /app && python train.py"]),
            "shell-as-first-process", "warning", "exec python train.py", id="shell",
        ),
        pytest.param(
            container(command=["/bin/bash", "-euxc"], args=["python train.py | tee log"]),
            "exit-code-lost", "error", "pipe", id="a pipe hides the exit code",
        ),
        pytest.param(
            container(command=["bash", "-c", "trap 'kill -TERM $p' TERM; python train.py & p=$!; wait $p"]),
            "shell-with-trap", "info", "wait for it", id="a shell with a trap",
        ),
        pytest.param(
            container(command=["./run.sh"]), "script-as-first-process", "info", "run.sh", id="a script",
        ),
        pytest.param(
            container(command=["dumb-init", "--", "python", "train.py"]),
            "signal-to-group", "warning", "every process of the group", id="dumb-init signals the group",
        ),
        pytest.param(
            container(command=["tini", "-g", "--", "python", "train.py"]),
            "signal-to-group", "warning", "tini without -g", id="tini -g",
        ),
        pytest.param(
            container(command=["tini", "-vg", "--", "python", "train.py"]),
            "signal-to-group", "warning", "tini -g", id="tini with two flags in one",
        ),
        pytest.param(
            container(command=["tini", "--", "python"], env=[{"name": "TINI_KILL_PROCESS_GROUP", "value": "1"}]),
            "signal-to-group", "warning", "TINI_KILL_PROCESS_GROUP", id="tini by a variable",
        ),
        pytest.param(
            container(command=[], args=["dumb-init", "python", "train.py"]),
            "signal-to-group", "warning", "dumb-init without", id="dumb-init in the arguments",
        ),
        pytest.param(
            container(command=["tini", "--", "timeout", "-k", "5", "1h", "python", "train.py"]),
            "signal-to-group", "warning", "timeout without --foreground", id="timeout signals the group",
        ),
        pytest.param(
            container(command=["sh", "-c", "cd /app; exec timeout 1h python train.py"]),
            "signal-to-group", "warning", "timeout without --foreground", id="timeout in a shell",
        ),
        pytest.param(
            container(command=["bash", "-c", "trap 'kill 0' TERM; python train.py & wait"]),
            "signal-to-group", "warning", "'kill 0'", id="kill 0",
        ),
        pytest.param(
            container(command=["bash", "-c", "trap 'kill -TERM -- -$$' TERM; python train.py & wait"]),
            "signal-to-group", "warning", "kill -TERM -- -$", id="kill of the group",
        ),
        pytest.param(
            container(lifecycle={"stopSignal": "SIGINT"}), "stop-signal", "warning", "found SIGINT", id="stop signal",
        ),
        pytest.param(
            container(command=["python", "train.py"], args=["--num_workers=8"]),
            "data-workers", "info", "8 worker processes", id="workers that load data",
        ),
        pytest.param(
            container(livenessProbe=PROBE | {"periodSeconds": 5}),
            "liveness-probe", "warning", "after 15 s", id="liveness probe",
        ),
        pytest.param(
            container(startupProbe=PROBE | {"failureThreshold": 3}),
            "startup-probe", "warning", "30 s after its start", id="startup probe",
        ),
        pytest.param(
            container(lifecycle={"preStop": {"exec": {"command": ["sleep", "5"]}}}),
            "pre-stop-hook", "warning", "SIGTERM comes after", id="hook before the end",
        ),
        pytest.param(
            pod(terminationGracePeriodSeconds=5), "short-grace-period", "warning", "found 5", id="short grace period",
        ),
        pytest.param(
            pod(nodeSelector={"cloud.google.com/gke-spot": "true"}),
            "spot-grace-period", "info", "15 s at most", id="GKE Spot",
        ),
        pytest.param(
            pod(tolerations=[{"operator": "Exists"}]),
            "catch-all-toleration", "warning", "every taint", id="a toleration of everything",
        ),
        pytest.param(
            volume(hostPath={"path": "/mnt"}), "volume-of-the-node", "warning", "hostPath", id="a folder of the node",
        ),
        pytest.param(
            volume(ephemeral={"volumeClaimTemplate": {}}),
            "volume-not-shared", "error", "deleted with the pod", id="a volume of the pod",
        ),
        pytest.param(
            volume(emptyDir={}), "at-creation", "warning", "emptyDir", id="what the operator warns of",
        ),
        pytest.param(
            pod(restartPolicy="OnFailure"), "release-contract", "error", "restartPolicy: Never", id="a refused JobSet",
        ),
    ],
)  # fmt: skip
def test_what_a_preemption_would_stumble_over_is_found(body: Json, rule: str, severity: str, words: str) -> None:
    finding = found(body)[rule]
    assert finding.severity == severity
    assert words in f"{finding.path} {finding.message}"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["python", "train.py"], id="the program itself"),
        pytest.param(["bash", "-c", "set -e\ncd /app\nexec python train.py --a=b"], id="a shell that is replaced"),
        pytest.param(["tini", "--", "python", "train.py"], id="an init that signals one process"),
        pytest.param(["dumb-init", "-c", "python", "train.py"], id="dumb-init for one process"),
        pytest.param(["timeout", "--foreground", "1h", "python", "train.py"], id="timeout for one process"),
        pytest.param(["tini", "-p", "SIGTERM", "-e", "143", "--", "python"], id="tini with values"),
        pytest.param(["bash", "-c", "kill -9 $old; kill -TERM $p; exec python train.py"], id="kill of one process"),
        pytest.param(["python", "train.py", "--num_workers=0"], id="no workers"),
    ],
)
def test_commands_that_get_the_signal_are_left_alone(command: list[str]) -> None:
    assert report(container(command=command)).findings == ()


def test_dumb_init_that_a_variable_sets_to_one_process_is_left_alone() -> None:
    variable = {"name": "DUMB_INIT_SETSID", "value": "0"}
    assert "signal-to-group" not in found(container(command=["dumb-init", "python", "train.py"], env=[variable]))


@pytest.mark.parametrize(
    "toleration",
    [
        pytest.param({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, id="another key"),
        pytest.param({"operator": "Exists", "tolerationSeconds": 60, "effect": "NoExecute"}, id="for a time"),
    ],
)
def test_tolerations_that_hide_no_signal_are_left_alone(toleration: Json) -> None:
    assert report(pod(tolerations=[toleration])).findings == ()


@pytest.mark.parametrize(
    ("claims", "rule"),
    [
        pytest.param({"checkpoints": {"spec": {"accessModes": ["ReadWriteOnce"]}}}, "volume-not-shared", id="one node"),
        pytest.param({}, "claim-not-seen", id="not known"),
    ],
)
def test_claims_are_checked_for_sharing(claims: Json, rule: str) -> None:
    assert rule in found(good(), claims=claims)


def test_restarts_of_zero_are_pointed_out() -> None:
    assert "no-restarts" in found(jobset(failurePolicy={"maxRestarts": 0}))
    assert "no-restarts" not in found(good())


def test_the_worst_finding_comes_first() -> None:
    body = container(command=["sh", "-c", "python train.py | tee x"], args=None, livenessProbe=PROBE)
    assert report(body).worst() is Severity.ERROR


def test_a_jobset_without_a_policy_is_checked_as_far_as_possible() -> None:
    body = container(livenessProbe=PROBE)
    del body["metadata"]["labels"]
    unlabelled = check(body, None, {})
    assert {finding.rule for finding in unlabelled.findings} == {"no-policy", "liveness-probe"}
    assert "unless its namespace has a default policy, which was not seen" in unlabelled.findings[0].message
    assert unlabelled.effects == ()


def test_what_is_no_jobset_is_an_error_not_a_traceback() -> None:
    broken = good()
    broken["spec"]["replicatedJobs"] = [{"name": "workers", "template": []}]
    assert found(broken)["unreadable"].severity is Severity.ERROR


def test_a_preemption_is_described_in_sentences() -> None:
    said = " ".join(report(good()).effects)
    for words in (
        "2 processes: workers",
        "60 s before the deadline",
        "exit with 77",
        "every 100 steps",
        "maxRestarts (3)",
    ):
        assert words in said, said


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        pytest.param({"everySteps": 5}, "Every 5 steps the state is sent to the memory of 2 nodes", id="two copies"),
        pytest.param({"everySeconds": 30, "copies": 1}, "of pods, but not that of a node loses", id="one copy"),
    ],
)
def test_what_an_end_without_notice_costs_with_snapshots_is_said(memory: Json, words: str) -> None:
    checkpoint = {"directory": "/c/{jobset}", "memory": memory}
    assert words in " ".join(report(good(), policy(checkpoint=checkpoint)).effects)


@pytest.mark.parametrize(("mode", "words"), [("Observe", "pods get no notice"), ("Drill", "continues to train")])
def test_modes_that_do_not_exit_are_reported(mode: str, words: str) -> None:
    assert words in report(good(), policy(mode=mode)).effects[-1]


def write(tmp_path: Path, *bodies: Json) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump_all(bodies))
    return file


def a_policy() -> Json:
    spec = {"checkpoint": {"directory": "/checkpoints/{jobset}"}}
    meta = {"name": "default"}
    return {"apiVersion": "gracepoint.dev/v1beta1", "kind": "CheckpointPolicy", "metadata": meta, "spec": spec}


def test_a_file_with_its_policy_needs_no_cluster(tmp_path: Path) -> None:
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "checkpoints"}, **SHARED["checkpoints"]}
    done = command("lint", write(tmp_path, a_policy(), good(), claim), "--offline")
    assert (done.code, done.err) == (0, "")
    assert "nothing found" in done.out


def test_errors_end_with_one_and_warnings_when_strict(tmp_path: Path) -> None:
    warned = write(tmp_path, a_policy(), container(livenessProbe=PROBE))
    assert command("lint", warned, "--offline").code == 0
    assert command("lint", warned, "--offline", "--strict").code == 1
    refused = write(tmp_path, a_policy(), pod(restartPolicy="OnFailure"))
    done = command("lint", refused, "--offline", "-o", "json")
    assert (done.code, done.json[0]["findings"][0]["rule"]) == (1, "release-contract")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(
            "kind: Deployment\nmetadata: {name: x}\n",
            "found Deployment, expected a JobSet, Job or TrainJob",
            id="no job",
        ),
        pytest.param("a: [\n", "expected YAML", id="no YAML"),
        pytest.param("name: {{ .Values.name }}\n", "render it first", id="a template"),
        pytest.param("just words\n", "expected Kubernetes objects", id="no objects"),
    ],
)
def test_files_that_are_no_manifests_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    done = command("lint", tmp_path / "x.yaml", "--offline")
    assert (done.code, words in done.err) == (1, True), done.err


def test_a_file_that_does_not_exist_is_named() -> None:
    done = command("lint", "nowhere.yaml")
    assert (done.code, "cannot read nowhere.yaml" in done.err) == (3, True)


def test_the_lint_changes_nothing() -> None:
    body = container(command=["sh", "-c", "x"])
    before = copy.deepcopy(body)
    report(body)
    assert body == before
