"""What the models accept, refuse and write."""

from __future__ import annotations

import types
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.decisions.policy_conditions import PodRights, readiness
from gracepoint_operator.model.evictions import HoldLimit
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicySpec,
    Preemption,
    PreemptionRequest,
    PreemptionStatus,
    SignalKind,
)
from gracepoint_operator.resources.crds import definitions


def policy(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": "default", "namespace": "team", "uid": "u-1", "generation": 3},
        "spec": {"checkpoint": {"directory": "/checkpoints/{namespace}/{jobset}"}, **spec},
    }


def test_a_policy_that_names_only_the_directory_has_sensible_settings() -> None:
    read = CheckpointPolicy.of(policy())
    assert read.spec.mode is Mode.ENFORCE
    assert read.spec.signals is None
    assert all(read.spec.counts(kind) for kind in SignalKind)
    assert read.unknown == ()
    assert (read.spec.checkpoint.every_steps, read.spec.checkpoint.keep_last) == (100, 3)
    assert (read.spec.after_save.saved_exit_code, read.spec.after_save.unsaved_exit_code) == (77, 78)
    assert (read.name, read.namespace, read.uid, read.generation) == ("default", "team", "u-1", 3)


@pytest.mark.parametrize(("saved", "unsaved", "not_joined"), [(77, 78, 79), (79, 78, 80), (80, 79, 81), (77, 90, 79)])
def test_the_code_of_a_process_that_did_not_get_in_is_none_that_an_older_policy_uses(
    saved: int, unsaved: int, not_joined: int
) -> None:
    read = CheckpointPolicy.of(policy(afterSave={"savedExitCode": saved, "unsavedExitCode": unsaved}))
    assert read.spec.not_joined_exit_code == not_joined


def test_a_code_of_a_process_that_did_not_get_in_and_of_a_save_is_refused() -> None:
    with pytest.raises(Unreadable, match=r"startup.notJoinedExitCode must differ from both .*; found 77"):
        CheckpointPolicy.of(policy(startup={"notJoinedExitCode": 77}))


def test_a_read_only_view_is_read_like_the_object_itself() -> None:
    body = policy()
    body["spec"] = types.MappingProxyType(body["spec"])
    assert CheckpointPolicy.of(types.MappingProxyType(body)) == CheckpointPolicy.of(policy())


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        pytest.param({"checkpoint": {}}, "checkpoint.directory", id="no directory"),
        pytest.param({"checkpoint": {"directory": "relative"}}, "checkpoint.directory", id="relative path"),
        pytest.param({"compilationCache": {"directory": "relative"}}, "compilationCache.directory", id="programs"),
        pytest.param({"compilationCache": {"maxBytes": 0}}, "compilationCache.maxBytes", id="a cache of nothing"),
        pytest.param({"checkpoint": {"directory": "/c/{job}"}}, "checkpoint.directory", id="unknown placeholder"),
        pytest.param({"checkpoint": {"directory": "/c/$(HOME)"}}, "checkpoint.directory", id="a variable"),
        pytest.param({"checkpoint": {"directory": "/c\n"}}, "checkpoint.directory", id="a line break"),
        *(
            pytest.param({"checkpoint": {"directory": f"{name}"}}, "checkpoint.directory", id=name)
            for name in ("az://bucket/c", "https://x/c", "gs:/bucket", "gs://", "s3:///c", "gs://ab", "s3://Bucket/c")
        ),
        pytest.param(
            {"checkpoint": {"directory": "s3://bucket/c", "objectStore": {"endpoint": "minio:9000"}}},
            "checkpoint.objectStore.endpoint",
            id="an endpoint without a scheme",
        ),
        pytest.param(
            {"checkpoint": {"directory": "/c", "objectStore": {"endpoint": "http://minio:9000"}}},
            "checkpoint\n",
            id="an endpoint for a path",
        ),
        pytest.param(
            {"checkpoint": {"directory": "gs://bucket/c", "objectStore": {"region": "eu-central-1"}}},
            "checkpoint\n",
            id="a region for gs://",
        ),
        *(
            pytest.param(
                {"checkpoint": {"directory": directory, "objectStore": {"serverSideEncryption": encryption}}},
                place,
                id=f"encryption {encryption} in {directory}",
            )
            for directory, encryption, place in (
                (
                    "s3://bucket/c",
                    {"algorithm": "AES256", "bucketKey": True},
                    "checkpoint.objectStore.serverSideEncryption",
                ),
                ("s3://bucket/c", {"algorithm": "AES256", "keyId": "k"}, "checkpoint\n"),
                (
                    "s3://bucket/c",
                    {"algorithm": "aws:kms", "keyId": "a key"},
                    "checkpoint.objectStore.serverSideEncryption.keyId",
                ),
                ("gs://bucket/c", {"algorithm": "AES256"}, "checkpoint\n"),
                ("/c", {"keyId": "k"}, "checkpoint\n"),
            )
        ),
        pytest.param({"cloudMetadata": ["Auto", "GCE"]}, "cloudMetadata", id="auto and more"),
        pytest.param({"deadline": {"margin": 0.5}}, "deadline.margin", id="margin below 1"),
        pytest.param({"afterSave": {"savedExitCode": 1}}, "afterSave.savedExitCode", id="a shell's code"),
        pytest.param({"afterSave": {"savedExitCode": 78}}, "afterSave", id="both exit codes alike (one by default)"),
        pytest.param({"startup": {"joinTimeoutSeconds": -1}}, "startup.joinTimeoutSeconds", id="a time before now"),
    ],
)
def test_a_bad_policy_is_refused_naming_the_field(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(Unreadable) as caught:
        CheckpointPolicy.of(policy(**spec))
    assert f"spec.{field}" in str(caught.value)


@pytest.mark.parametrize(
    "directory", ["/c", "file:///c", "gs://bucket", "gs://bucket/{namespace}/{jobset}", "s3://a.b-c/x/", "s3://abc/"]
)
def test_paths_and_uris_of_known_schemes_are_directories(directory: str) -> None:
    assert CheckpointPolicy.of(policy(checkpoint={"directory": directory})).spec.checkpoint.directory == directory


def test_unknown_schemes_are_refused_naming_the_known_ones() -> None:
    with pytest.raises(Unreadable, match=r"file://, gs:// or s3:// URI .*; found 'az://bucket/c'"):
        CheckpointPolicy.of(policy(checkpoint={"directory": "az://bucket/c"}))


@pytest.mark.parametrize(
    ("spec", "named", "field", "read_as"),
    [
        pytest.param({"mode": "Rehearse"}, "spec.mode: 'Rehearse'", "mode", Mode.ENFORCE, id="mode"),
        pytest.param(
            {"signals": ["FarSight", "NodeTaint", "Oracle"]},
            "spec.signals: 'Oracle'",
            "signals",
            [SignalKind.NODE_TAINT],
            id="kinds of signals",
        ),
        pytest.param({"cloudMetadata": ["OCI"]}, "spec.cloudMetadata: 'OCI'", "cloud_metadata", [], id="cloud"),
        pytest.param({"cadence": 10}, "spec.cadence", "mode", Mode.ENFORCE, id="field"),
        pytest.param(
            {"evictionHold": {"boundSeconds": 7, "perPod": {"a": 1}}},
            "spec.evictionHold.perPod",
            "mode",
            Mode.ENFORCE,
            id="field further down",
        ),
    ],
)
def test_policy_fields_of_a_newer_version_are_ignored_and_named(
    spec: dict[str, Any], named: str, field: str, read_as: object
) -> None:
    read = CheckpointPolicy.of(policy(**spec))
    assert named in read.unknown
    assert getattr(read.spec, field) == read_as
    limit = HoldLimit(600.0, "the chart")
    ready = readiness(read, read, 0.0, rights=PodRights(), hold_limit=limit, withdrawn=None)
    assert (ready.status, ready.reason) == ("True", "UnknownValues")
    assert named in ready.message


def test_policy_with_unknown_and_wrong_values_is_refused_for_the_wrong_one() -> None:
    with pytest.raises(Unreadable, match=r"spec\.deadline\.margin"):
        CheckpointPolicy.of(policy(mode="Rehearse", deadline={"margin": 0.5}))


def test_stored_policy_holds_only_signal_kinds_of_its_user() -> None:
    """Defaults are written into the stored object: a list would leave out the kinds of later versions for good."""
    assert "signals" not in CheckpointPolicy.of(policy()).spec.to_json()
    for crd in definitions().values():
        spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        assert "SignalKind" not in str(spec)
        assert [default for default in defaults(spec) if "NodeTaint" in str(default)] == []


def defaults(node: Any) -> list[Any]:
    """All defaults of a schema."""
    if isinstance(node, list):
        return [found for item in node for found in defaults(item)]
    if not isinstance(node, dict):
        return []
    own = [node["default"]] if "default" in node and "type" in node else []
    return own + [found for value in node.values() for found in defaults(value)]


def test_written_objects_are_camel_case_and_leave_out_what_is_absent() -> None:
    spec = CheckpointPolicySpec.model_validate({"checkpoint": {"directory": "file:///c"}})
    assert spec.to_json()["checkpoint"] == {
        "directory": "file:///c",
        "objectStore": {
            "endpoint": "",
            "region": "",
            "serverSideEncryption": {"algorithm": "BucketDefault", "keyId": "", "bucketKey": False},
        },
        "everySteps": 100,
        "everySeconds": 0,
        "interval": "Fixed",
        "keepLast": 3,
        "keepEverySteps": 0,
        "keepForSeconds": 0,
        "tolerateFailuresSeconds": 900,
        "writer": "Thread",
    }
    assert PreemptionStatus(phase=Phase.NOTICED).to_json() == {"phase": "Noticed"}


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        pytest.param({}, "found 0 and 0", id="neither"),
        pytest.param({"everySteps": 5, "everySeconds": 30}, "found 5 and 30", id="both"),
        pytest.param({"everySteps": 5, "copies": 3}, "less than or equal to 2", id="three copies"),
        pytest.param({"everySteps": -5}, "greater than or equal to 0", id="negative"),
        pytest.param({"everySteps": 5, "every": 3}, "Extra inputs", id="unknown"),
    ],
)
def test_snapshots_have_one_interval(memory: dict[str, int], found: str) -> None:
    with pytest.raises(ValidationError, match=found):
        CheckpointPolicySpec.model_validate({"checkpoint": {"directory": "/c", "memory": memory}})


def record() -> dict[str, Any]:
    now = "2026-01-02T03:04:05.678901+00:00"
    return {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "Preemption",
        "metadata": {"name": "train-1", "namespace": "team"},
        "spec": {
            "jobSet": {"name": "train", "uid": "u-2"},
            "epoch": 1,
            "cause": "SpotTermination",
            "signal": "taint cloud.google.com/impending-node-termination",
            "confidence": "sure",
            "cancelable": False,
            "nodes": ["node-1"],
            "pods": ["train-w-0-0-abcde"],
            "observedAt": now,
            "deadline": now,
            "mode": "Enforce",
            "policy": {"name": "default", "spec": {"mode": "Enforce"}},
        },
    }


def test_preemption_survives_the_api_round_trip_to_the_microsecond() -> None:
    now, body = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), record()
    read = Preemption.of(body)
    assert read.spec.observed_at == now
    assert read.spec.confidence is Confidence.SURE
    assert Preemption.of({**body, "spec": read.spec.to_json()}) == read
    assert read.spec.to_json()["observedAt"] == "2026-01-02T03:04:05.678901Z"


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        PreemptionStatus.model_validate({"replicas": [{"name": "a", "toldAt": "2026-01-02T03:04:05"}]})


def test_unknown_status_fields_of_a_newer_replica_are_not_reported() -> None:
    body = policy()
    condition = {"type": "Ready", "status": "Partly", "reason": "R", "lastTransitionTime": "2026-01-02T03:04:05Z"}
    body["status"] = {
        "observedGeneration": 3,
        "ofTomorrow": 1,
        "jobSets": {"count": 1, "ofTomorrow": 2},
        "conditions": [condition],
    }
    read = CheckpointPolicy.of(body)
    assert read.status.observed_generation == 3
    assert read.status.workloads is not None
    assert read.status.workloads.count == 1
    assert [condition.status for condition in read.status.conditions or ()] == ["Unknown"]
    limit = HoldLimit(600.0, "the chart")
    assert readiness(read, read, 0.0, rights=PodRights(), hold_limit=limit, withdrawn=None).reason == "Watching"


def test_record_of_a_newer_version_is_read_and_not_changed() -> None:
    body = record()
    body["spec"] |= {"mode": "Migrate", "confidence": "certain", "score": 1}
    body["spec"]["policy"] = {"name": "default", "spec": {"mode": "Migrate", "signals": ["FarSight"], "quorum": 3}}
    laggards = [{"pod": "a", "lags": "Asleep"}]
    body["status"] = {
        "phase": "Migrating",
        "acknowledgements": {"expected": 2, "received": 1, "laggards": laggards},
        "ofTomorrow": 1,
    }
    read = Preemption.of(body)
    assert (read.spec.mode, read.spec.confidence, read.status.phase) == (Mode.OBSERVE, Confidence.LIKELY, Phase.FAILED)
    assert read.spec.policy.spec.signals == []
    assert set(read.unknown) == {
        "spec.mode: 'Migrate'",
        "spec.confidence: 'certain'",
        "spec.score",
        "spec.policy.spec.mode: 'Migrate'",
        "spec.policy.spec.signals: 'FarSight'",
        "spec.policy.spec.quorum",
        "status.phase: 'Migrating'",
        "status.acknowledgements.laggards.lags: 'Asleep'",
        "status.ofTomorrow",
    }
    assert read.status.changes_since(Preemption.of(body).status) == {}


@pytest.mark.parametrize(
    "spec", [pytest.param({"mode": "Migrate"}, id="mode"), pytest.param({"onlyPods": ["a"]}, id="field")]
)
def test_a_request_that_is_not_understood_is_not_acted_upon(spec: dict[str, Any]) -> None:
    body = record() | {"spec": {"jobSet": {"name": "llm"}, "deadlineSeconds": 30, **spec}}
    with pytest.raises(Unreadable, match=next(iter(spec))):
        PreemptionRequest.of(body)
