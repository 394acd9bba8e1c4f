"""The release contract against the JobSet API that is installed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import trustme

from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.kube import client, objects
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.webhooks import Admission, InstalledApi, Patched, read_installed_api, release_contract
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.samples import Json, job_of, jobset, policy_spec

ACTIONS = ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
STRINGS = {"type": "array", "items": {"type": "string"}}
RULE: Json = {
    "name": {"type": "string"},
    "action": {"type": "string", "enum": ACTIONS},
    "onJobFailureReasons": STRINGS,
    "onJobFailureMessagePatterns": STRINGS,
    "targetReplicatedJobs": STRINGS,
}
POLICY = policy_spec()


def crd(rule: Json | None = RULE, **version: Any) -> Json:
    """As JobSet v0.10 has it, cut to what matters."""
    failure_policy: Json = {"maxRestarts": {"type": "integer"}}
    if rule is not None:
        failure_policy["rules"] = {"type": "array", "items": {"type": "object", "properties": rule}}
    spec = {"failurePolicy": {"type": "object", "properties": failure_policy}}
    schema = {"properties": {"spec": {"properties": spec}}}
    served_version = {"name": "v1alpha2", "served": True, "schema": {"openAPIV3Schema": schema}, **version}
    return {"metadata": {"name": "jobsets.jobset.x-k8s.io"}, "spec": {"versions": [served_version]}}


def without(*fields: str) -> Json:
    return {name: field for name, field in RULE.items() if name not in fields}


def contracted(body: Json) -> Json:
    made = release_contract(body, POLICY)
    assert isinstance(made, Patched)
    return made.object


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(RULE, id="v0.10"),
        pytest.param(
            RULE | {"action": {"enum": [*ACTIONS, "RestartJob", "RestartJobAndIgnoreMaxRestarts"]}}, id="later"
        ),
        pytest.param(
            RULE | {"onJobFailureReasons": {"items": {"enum": ["BackoffLimitExceeded", "PodFailurePolicy"]}}},
            id="values",
        ),
    ],
)
def test_where_all_is_served_nothing_is_said(rule: Json) -> None:
    found = read_installed_api(crd(rule))
    assert found == InstalledApi()
    assert (found.refusal(contracted(jobset()), POLICY), found.warning) == (None, None)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        pytest.param(None, "no spec.failurePolicy.rules,", id="no rules"),
        pytest.param(
            without("onJobFailureReasons"), "no spec.failurePolicy.rules[].onJobFailureReasons", id="no reasons"
        ),
        pytest.param(without("targetReplicatedJobs"), "rules[].targetReplicatedJobs", id="no target"),
        pytest.param(
            RULE | {"action": {"enum": ACTIONS[:2]}}, "rules[].action RestartJobSetAndIgnoreMaxRestarts", id="no action"
        ),
    ],
)
def test_jobset_that_would_not_restart_is_refused_with_the_needed_version(rule: Json | None, says: str) -> None:
    refusal = read_installed_api(crd(rule)).refusal(contracted(jobset()), POLICY)
    assert refusal is not None
    assert says in refusal
    assert "Upgrade JobSet to v0.10 or newer" in refusal


def test_jobset_without_messages_is_warned_of_and_other_rules_are_refused() -> None:
    found = read_installed_api(crd(without("onJobFailureMessagePatterns")))
    body = jobset()
    assert found.refusal(contracted(body), POLICY) is None
    assert found.warning is not None
    assert "v0.10 or newer" in found.warning
    on_codes = {"operator": "In", "values": [42]}
    job_of(body)["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": on_codes}]}
    refusal = found.refusal(contracted(body), POLICY)
    assert refusal is not None
    assert "spec.replicatedJobs[0].template.spec.podFailurePolicy.rules[3] would restart the JobSet" in refusal
    assert read_installed_api(crd()).refusal(contracted(body), POLICY) is None


@pytest.mark.parametrize("action", ["RestartJob", "RestartJobAndIgnoreMaxRestarts"])
def test_actions_of_newer_jobsets_in_rules_of_the_users_own_are_accepted(action: str) -> None:
    rule = {"name": "mine", "action": action, "onJobFailureReasons": ["BackoffLimitExceeded"]}
    made = contracted(jobset(failurePolicy={"maxRestarts": 2, "rules": [rule]}))
    names = [item["name"] for item in made["spec"]["failurePolicy"]["rules"]]
    assert names == ["gracepoint_preemption", f"gracepoint_program_{action}", "mine"]


def test_unserved_version_does_not_count_as_empty() -> None:
    with pytest.raises(LookupError, match="v1alpha2"):
        read_installed_api(crd(served=False))


@pytest.fixture
def admission(api: MemoryApi, tmp_path: Path) -> Admission:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    core = Controller(api, Metrics(), Clock(), ControllerSettings("a"))
    return Admission(api, core.cache, core.evictions, Certificates(tmp_path), "https://o:443")


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi(Clock())


async def test_api_is_read_once_for_many_jobsets_and_again_on_request(api: MemoryApi, admission: Admission) -> None:
    api.add(objects.CRDS, crd(without("onJobFailureReasons")))
    for _ in range(3):
        assert (await admission.installed_workload_api()).missing
    assert len(api.calls) == 1
    api.add(objects.CRDS, copy.deepcopy(crd()))  # JobSet was upgraded
    assert await admission.installed_workload_api(afresh=True) == InstalledApi()


async def test_an_api_that_cannot_be_read_raises(admission: Admission) -> None:
    with pytest.raises(client.NotFound):
        await admission.installed_workload_api()
