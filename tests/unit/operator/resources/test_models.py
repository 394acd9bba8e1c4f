"""What the models accept, refuse and write."""

from __future__ import annotations

import types
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.resources import (
    CheckpointPolicy,
    CheckpointPolicySpec,
    Preemption,
    PreemptionStatus,
    SignalKind,
)


def policy(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "gracepoint.dev/v1alpha1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": "default", "namespace": "team", "uid": "u-1", "generation": 3},
        "spec": {"checkpoint": {"directory": "/checkpoints/{namespace}/{jobset}"}, **spec},
    }


def test_a_policy_that_names_only_the_directory_has_sensible_settings() -> None:
    read = CheckpointPolicy.of(policy())
    assert read.spec.mode is Mode.ENFORCE
    assert read.spec.signals == list(SignalKind)
    assert (read.spec.checkpoint.every_steps, read.spec.checkpoint.keep_last) == (100, 3)
    assert (read.spec.after_save.saved_exit_code, read.spec.after_save.unsaved_exit_code) == (77, 78)
    assert (read.name, read.namespace, read.uid, read.generation) == ("default", "team", "u-1", 3)


def test_a_read_only_view_is_read_like_the_object_itself() -> None:
    body = policy()
    body["spec"] = types.MappingProxyType(body["spec"])
    assert CheckpointPolicy.of(types.MappingProxyType(body)) == CheckpointPolicy.of(policy())


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        pytest.param({"checkpoint": {}}, "checkpoint.directory", id="no directory"),
        pytest.param({"checkpoint": {"directory": "relative"}}, "checkpoint.directory", id="relative path"),
        pytest.param({"checkpoint": {"directory": "/c/{job}"}}, "checkpoint.directory", id="unknown placeholder"),
        pytest.param({"checkpoint": {"directory": "/c/$(HOME)"}}, "checkpoint.directory", id="a variable"),
        pytest.param({"checkpoint": {"directory": "/c\n"}}, "checkpoint.directory", id="a line break"),
        pytest.param({"mode": "enforce"}, "mode", id="mode in lower case"),
        pytest.param({"signals": ["Nodetaint"]}, "signals", id="unknown signal"),
        pytest.param({"cloudMetadata": ["Auto", "GCE"]}, "cloudMetadata", id="auto and more"),
        pytest.param({"deadline": {"margin": 0.5}}, "deadline.margin", id="margin below 1"),
        pytest.param({"afterSave": {"savedExitCode": 1}}, "afterSave.savedExitCode", id="a shell's code"),
        pytest.param({"afterSave": {"savedExitCode": 78}}, "afterSave", id="both exit codes alike (one by default)"),
        pytest.param({"cadence": 10}, "cadence", id="unknown field"),
    ],
)
def test_a_bad_policy_is_refused_naming_the_field(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CheckpointPolicy.of(policy(**spec))
    assert f"spec.{field}" in str(caught.value)


def test_written_objects_are_camel_case_and_leave_out_what_is_absent() -> None:
    spec = CheckpointPolicySpec.model_validate({"checkpoint": {"directory": "file:///c"}})
    assert spec.to_json()["checkpoint"] == {
        "directory": "file:///c",
        "everySteps": 100,
        "everySeconds": 0,
        "keepLast": 3,
        "keepEverySteps": 0,
        "keepForSeconds": 0,
    }
    assert PreemptionStatus(phase=Phase.NOTICED).to_json() == {"phase": "Noticed"}


def test_a_preemption_survives_the_way_to_the_api_server_and_back_to_the_microsecond() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    body = {
        "apiVersion": "gracepoint.dev/v1alpha1",
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
            "observedAt": now.isoformat(),
            "deadline": now.isoformat(),
            "mode": "Enforce",
            "policy": {"name": "default", "spec": {"mode": "Enforce"}},
        },
    }
    read = Preemption.of(body)
    assert read.spec.observed_at == now
    assert read.spec.confidence is Confidence.SURE
    assert Preemption.of({**body, "spec": read.spec.to_json()}) == read
    assert read.spec.to_json()["observedAt"] == "2026-01-02T03:04:05.678901Z"


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        PreemptionStatus.model_validate({"replicas": [{"name": "a", "toldAt": "2026-01-02T03:04:05"}]})


def test_what_a_newer_replica_wrote_into_a_status_is_passed_over_and_a_specs_unknown_field_refused() -> None:
    body = policy()
    body["status"] = {"observedGeneration": 3, "ofTomorrow": 1, "jobSets": {"count": 1, "ofTomorrow": 2}}
    read = CheckpointPolicy.of(body)
    assert read.status.observed_generation == 3
    assert read.status.workloads is not None
    assert read.status.workloads.count == 1
    with pytest.raises(ValidationError, match="ofTomorrow"):
        CheckpointPolicy.of(policy(ofTomorrow=1))
