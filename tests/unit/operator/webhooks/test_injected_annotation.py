"""What people see of what a JobSet was given."""

from __future__ import annotations

import json
from typing import Any

from gracepoint.wire.names import Env
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks import Patched, inject_workload, release_contract
from gracepoint_operator.webhooks.updates import ANNOTATION, overruled, shown
from tests.unit.operator.fakes.samples import (
    SETTINGS,
    Json,
    by_jobset,
    job_of,
    jobset,
    pod_of,
    policy,
    replicated_job,
)

JOB = "spec.replicatedJobs[workers].template.spec"


def given(body: Json, under: CheckpointPolicy | None = None) -> Json:
    under = under or policy()
    result = release_contract(body, under.spec)
    assert isinstance(result, Patched), result
    return inject_workload(result.object, under.name, under.spec, SETTINGS)


def annotated(body: Json, under: CheckpointPolicy | None = None) -> Json:
    return shown(body, given(body, under), under or policy())


def annotation(metadata: Json) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(metadata["annotations"][ANNOTATION])
    return found


def test_the_jobset_shows_the_policy_and_every_field_that_was_filled_in() -> None:
    told = annotation(annotated(jobset())["metadata"])
    assert (told["policy"], told["generation"]) == ("default", 0)
    assert told["fields"] == sorted(
        [
            "spec.failurePolicy",
            f"{JOB}.backoffLimit",
            f"{JOB}.backoffLimitPerIndex",
            f"{JOB}.completionMode",
            f"{JOB}.maxFailedIndexes",
            f"{JOB}.podFailurePolicy",
            f"{JOB}.template.metadata",
            f"{JOB}.template.spec.containers[train].env",
            f"{JOB}.template.spec.containers[train].volumeMounts",
            f"{JOB}.template.spec.restartPolicy",
            f"{JOB}.template.spec.terminationGracePeriodSeconds",
            f"{JOB}.template.spec.volumes",
        ]
    )


def test_the_pods_show_the_policy_and_the_container() -> None:
    body = jobset()
    job_of(body)["template"]["metadata"] = {"annotations": {"team": "x"}}
    metadata = job_of(annotated(body))["template"]["metadata"]
    assert annotation(metadata) == {"policy": "default", "generation": 0, "container": "train"}
    assert metadata["annotations"]["team"] == "x"


def test_what_the_user_wrote_rightly_is_not_called_filled_in() -> None:
    body = jobset(replicated_job(completionMode="Indexed"))
    pod_of(body).update(restartPolicy="Never", terminationGracePeriodSeconds=600)
    fields = annotation(annotated(body)["metadata"])["fields"]
    assert f"{JOB}.podFailurePolicy" in fields
    assert not [field for field in fields if field.endswith(("completionMode", "restartPolicy", "PeriodSeconds"))]


def test_replicated_jobs_that_do_not_train_show_nothing() -> None:
    body = jobset(replicated_job("workers"), replicated_job("board"))
    made = annotated(body, policy(training={"replicatedJobs": ["workers"]}))
    assert "annotations" not in job_of(made, 1)["template"]["metadata"]
    fields = [field for field in annotation(made["metadata"])["fields"] if "board" in field]
    assert fields == ["spec.replicatedJobs[board].template.spec.template.metadata"], "the labels"


def test_called_again_it_shows_the_same() -> None:
    once = by_jobset(annotated(jobset()))
    assert annotated(once) == once


def test_changes_undone_by_another_webhook_are_shown_again() -> None:
    once = annotated(jobset())
    before = annotation(once["metadata"])["fields"]
    pod_of(once)["containers"][0]["volumeMounts"] = []
    fields = annotation(annotated(once)["metadata"])["fields"]
    assert fields == before


def test_an_annotation_that_somebody_wrote_by_hand_is_replaced() -> None:
    for text in ("nonsense", "[]", '{"fields": 3}'):
        body = jobset()
        body["metadata"]["annotations"] = {ANNOTATION: text}
        assert "spec.failurePolicy" in annotation(annotated(body)["metadata"])["fields"]


def test_variables_that_the_manifest_sets_in_vain_are_reported() -> None:
    body = jobset()
    pod_of(body)["containers"][0]["env"] = [
        {"name": Env.SAVED_EXIT_CODE, "value": "3"},
        {"name": Env.POD_UID, "value": "forged"},
        {"name": Env.SAVE_EVERY_STEPS, "value": "7"},  # which wins
        {"name": "LR", "value": "1"},
    ]
    (warning,) = overruled(body, given(body), policy())
    assert warning.startswith("spec.replicatedJobs[0].template.spec.template.spec.containers[train].env: ")
    assert f"Gracepoint sets {Env.POD_UID}, {Env.SAVED_EXIT_CODE} by itself" in warning


def test_jobset_without_ignored_settings_is_not_warned_of() -> None:
    body = jobset()
    made = annotated(body)
    assert overruled(body, made, policy()) == []
    assert overruled(made, given(made), policy()) == []
