"""A policy that does not exist any more: its workloads keep what they were created with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gracepoint.wire.messages import Mode
from gracepoint_operator.decisions.decide import StartPreemption
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.resources.crds import definitions
from gracepoint_operator.resources.policy import DEFAULT_LONGEST_HOLD_S
from gracepoint_operator.workloads import CREATED_WITH, JOBSETS
from gracepoint_operator.workloads import created_with as read_created_with
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.scene import Scene


def created_with(text: str | None = None, **spec: Any) -> Scene:
    """A JobSet that the webhook has prepared under such a policy, which is gone."""
    scene = Scene()
    body = objects.jobset()
    said = json.dumps(objects.policy(**spec)["spec"]) if text is None else text
    body["metadata"]["annotations"] = {CREATED_WITH: said}
    scene.seen(JOBSETS, body)
    scene.gone(objects.policy())
    return scene


def test_a_disruption_is_announced_under_the_settings_of_the_creation() -> None:
    scene = created_with(evictionHold={"boundSeconds": 17}, exitBreaker={"savedExits": 2})
    scene.taint()
    spec = scene.start().spec
    assert spec.policy.name == "careful"
    assert spec.policy.spec.eviction_hold.bound_seconds == 17
    assert spec.policy.spec.exit_breaker.saved_exits == 2
    assert spec.mode is Mode.ENFORCE


def test_who_was_only_observed_still_is() -> None:
    scene = created_with(mode="Observe")
    scene.taint()
    assert scene.start().spec.mode is Mode.OBSERVE


def test_signals_that_did_not_count_still_do_not() -> None:
    scene = created_with(signals=["Eviction"])
    scene.taint()
    assert scene.decisions() == []


def test_the_administrators_limit_applies_to_what_a_tenant_may_have_written() -> None:
    scene = created_with(evictionHold={"boundSeconds": 3600})
    policy = scene.cache.gang(objects.JOBSET_UID).policy
    assert policy is not None
    assert policy.spec.eviction_hold.bound_seconds == DEFAULT_LONGEST_HOLD_S


def test_a_policy_that_is_there_counts_whatever_the_creation_was_with() -> None:
    scene = created_with(mode="Observe")
    scene.seen(kinds.POLICIES, objects.policy() | {"metadata": {**objects.policy()["metadata"], "uid": "uid-new"}})
    scene.taint()
    assert scene.start().spec.mode is Mode.ENFORCE


def test_a_policy_of_another_name_that_does_not_exist_changes_nothing_either() -> None:
    """Somebody corrected the label of a running JobSet, and made a typo."""
    scene = created_with(mode="Observe")
    body = objects.jobset()
    body["metadata"]["annotations"] = {CREATED_WITH: json.dumps(objects.policy(mode="Drill")["spec"])}
    body["metadata"]["labels"]["gracepoint.dev/policy"] = "carefull"
    scene.seen(JOBSETS, body)
    scene.taint()
    assert scene.start().spec.mode is Mode.DRILL


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="no JSON"),
        pytest.param("[1]", id="no object"),
        pytest.param('{"mode": 3}', id="another schema"),
        pytest.param("[" * 100_000, id="nested too deeply"),
    ],
)
def test_what_somebody_else_has_written_there_does_not_count(text: str) -> None:
    scene = created_with(text)
    scene.taint()
    assert scene.decisions() == []


def longest(schema: Any, name: str = "") -> Any:
    """A value with each list and text as long as a schema allows."""
    match schema:
        case {"properties": fields}:
            return {name: longest(field, name) for name, field in fields.items()}
        case {"additionalProperties": values, "maxProperties": number}:
            return {f"{index:063}": longest(values) for index in range(number)}
        case {"type": "array", "items": items, "maxItems": number}:
            return [longest(items)] * number
        case {"enum": words}:
            return max(map(str, words), key=len)
    return ("\U0001f600" if name == "directory" else "x") * schema.get("maxLength", 20)


def test_no_spec_of_the_webhook_is_too_long_to_be_kept() -> None:
    crds = (body for body in definitions().values() if body["spec"]["names"]["kind"] == "CheckpointPolicy")
    (schema,) = (version["schema"] for body in crds for version in body["spec"]["versions"][:1])
    said_by = schema["openAPIV3Schema"]["properties"]["spec"]
    said = json.dumps(longest(said_by), separators=(",", ":"))
    assert read_created_with({"annotations": {CREATED_WITH: said}}) == said


def test_a_text_that_no_webhook_writes_is_not_kept() -> None:
    said = json.dumps(objects.policy()["spec"] | {"directory": "x" * 32 * 1024})
    assert read_created_with({"annotations": {CREATED_WITH: said}}) == ""


def test_of_a_jobset_that_an_older_version_has_prepared_the_newest_record_counts() -> None:
    scene = Scene()
    scene.recorded(phase="Committed", ended_at=objects.NOW - 50, created_at=objects.NOW - 60)
    scene.restart()
    scene.gone(objects.policy())
    scene.clock.move(5)
    scene.taint("node-2")
    (begun,) = (item for item in scene.decisions() if isinstance(item, StartPreemption))
    assert begun.spec.policy.spec.mode is Mode.ENFORCE


def test_a_workload_that_was_not_prepared_is_not_protected() -> None:
    scene = created_with()
    body = objects.jobset(injected=False)
    body["metadata"]["annotations"] = {CREATED_WITH: json.dumps(objects.policy()["spec"])}
    scene.seen(JOBSETS, body)
    scene.taint()
    assert scene.decisions() == []
