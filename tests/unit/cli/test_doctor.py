"""The checks of an installation, and the pod that checks channel and storage."""

from __future__ import annotations

import base64
import datetime
import json
from typing import Any

import pytest
import trustme

from gracepoint.version import __version__
from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli import doctor
from gracepoint_cli.doctor import CheckResult, CheckState
from gracepoint_operator.resources import Training
from gracepoint_operator.resources.crds import definitions
from gracepoint_operator.webhooks import inject_workload
from tests.unit.operator.fakes.objects import cluster_policy, policy
from tests.unit.operator.fakes.samples import SETTINGS, jobset, pod_of, policy_spec

Json = dict[str, Any]
NOW = datetime.datetime.now(datetime.UTC)


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("v1.30.0", CheckState.OK),
        ("v1.34.4-gke.100", CheckState.OK),
        ("v1.29.9", CheckState.FAILED),
        ("?", CheckState.WARNING),
    ],
)
def test_kubernetes_must_be_new_enough(version: str, state: CheckState) -> None:
    assert doctor.kubernetes_version({"gitVersion": version}).state is state


def test_definitions_of_another_version_are_pointed_out() -> None:
    crds: dict[str, Json | None] = dict(definitions())
    assert doctor.own_definitions(crds).state is CheckState.OK
    name = next(iter(crds))
    older = json.loads(json.dumps(crds[name]))
    older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].popitem()
    assert doctor.own_definitions(crds | {name: older}).state is CheckState.WARNING
    assert doctor.own_definitions(crds | {name: None}).state is CheckState.FAILED


def test_in_a_cluster_without_jobset_the_answer_is_to_install_it() -> None:
    check = doctor.jobset_api(None)
    assert "install JobSet" in check.message
    assert check.state is CheckState.WARNING, "Jobs by themselves need no JobSet"


def deployment(ready: int, version: str = __version__) -> Json:
    meta = {"name": "gracepoint", "namespace": "system", "labels": {"app.kubernetes.io/version": version}}
    return {"metadata": meta, "spec": {"replicas": 2}, "status": {"readyReplicas": ready}}


@pytest.mark.parametrize(
    ("found", "states"),
    [
        pytest.param([], [CheckState.FAILED], id="none"),
        pytest.param([deployment(2)], [CheckState.OK, CheckState.OK], id="all replicas"),
        pytest.param([deployment(1)], [CheckState.WARNING, CheckState.OK], id="one replica"),
        pytest.param([deployment(0)], [CheckState.FAILED, CheckState.OK], id="no replica"),
        pytest.param([deployment(2, "0.0.1")], [CheckState.OK, CheckState.WARNING], id="another version"),
    ],
)
def test_the_operator_is_judged_by_its_replicas_and_version(found: list[Json], states: list[CheckState]) -> None:
    assert [check.state for check in doctor.check_operator(found)] == states


def waiting_policy(*waits: Json, kind: str | None = None) -> Json:
    entry: Json = {"name": "llm", "uid": "u", "waits": list(waits)}
    return policy() | {"status": {"waits": [entry | ({"kind": kind} if kind else {})]}}


@pytest.mark.parametrize(
    ("kind", "workload_kind", "state"),
    [("Node", None, CheckState.WARNING), ("Start", None, CheckState.OK), ("Suspended", "Job", CheckState.OK)],
)
def test_jobs_that_wait_to_start_are_shown_with_what_they_wait_for(
    kind: str, workload_kind: str | None, state: CheckState
) -> None:
    wait = {"kind": kind, "what": "node for process 1", "since": "2026-03-01T12:00:00Z", "message": "0/12 nodes"}
    now = datetime.datetime(2026, 3, 1, 12, 12, tzinfo=datetime.UTC).timestamp()
    (check,) = doctor.check_waits([waiting_policy(wait, kind=workload_kind), policy()], now)
    name = "job/llm" if workload_kind else "jobset/llm"
    assert check == CheckResult(name, state, "waits for: node for process 1, since 12 min; last: 0/12 nodes")


MUTATING = ("jobsets", "jobs", "jobsets-without-policy", "jobs-without-policy", "trainjobs", "pods")


def configurations(bundle: str | None, name: str = "00-gracepoint") -> list[Json]:
    config = {"clientConfig": {"caBundle": bundle} if bundle else {}}
    mutating = [{"name": f"{kind}.gracepoint.dev", **config} for kind in MUTATING]
    return [
        {"kind": "MutatingWebhookConfiguration", "metadata": {"name": name}, "webhooks": mutating},
        {"kind": "MutatingWebhookConfiguration", "metadata": {"name": "jobset-mutating-webhook-configuration"}},
        {
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "gracepoint"},
            "webhooks": [
                {"name": f"{kind}.gracepoint.dev", **config} for kind in ("evictions", "preemptionrequests", "policies")
            ],
        },
    ]


def job_of(policy: str, namespace: str = "team", **status: Any) -> Json:
    meta = {"name": "llm", "namespace": namespace, "uid": "u", "labels": {LABEL_POLICY: policy}}
    return {"kind": "JobSet", "metadata": meta, "spec": {"replicatedJobs": []}, "status": status}


def test_jobs_whose_policy_does_not_exist_are_pointed_out() -> None:
    policies = [{"metadata": {"name": "default", "namespace": "team"}}]
    ended = job_of("gone", terminalState="Completed")
    assert list(doctor.missing_policies([job_of("default"), ended], policies)) == []
    (check,) = doctor.missing_policies([job_of("default", "other"), job_of("default")], policies)
    assert (check.name, check.state) == ("policy default", CheckState.WARNING)
    assert "does not exist in the namespace 'other', and jobset/llm name it" in check.message
    assert "they keep the settings that they were created with" in check.message
    assert "an older version prepared, disruptions are announced only if they have a Preemption" in check.message


@pytest.fixture(scope="module")
def bundle() -> str:
    return base64.b64encode(trustme.CA().cert_pem.bytes()).decode()


def worst(checks: list[CheckResult]) -> CheckState:
    order = [CheckState.FAILED, CheckState.WARNING, CheckState.OK]
    return min((check.state for check in checks), key=order.index)


def test_webhooks_with_a_valid_authority_are_good(bundle: str) -> None:
    assert worst(doctor.check_webhooks(configurations(bundle), now=NOW)) is CheckState.OK


def test_a_webhook_that_jobsets_own_precedes_is_pointed_out(bundle: str) -> None:
    checks = doctor.check_webhooks(configurations(bundle, "z-gracepoint"), now=NOW)
    assert "comes after jobset-mutating-webhook-configuration" in checks[1].message


def test_releases_that_answer_for_the_same_namespaces_have_failed(bundle: str) -> None:
    both = [*configurations(bundle), *configurations(bundle, "00-other")]
    (check,) = [check for check in doctor.check_webhooks(both, now=NOW) if check.name == "releases"]
    assert check.state is CheckState.FAILED
    assert check.message.startswith("00-gracepoint and 00-other answer for all namespaces")


def test_each_release_has_its_own_authorities(bundle: str) -> None:
    checks = doctor.check_webhooks([*configurations(None), *configurations(bundle, "00-other")], now=NOW)
    failed = [check.name for check in checks if check.state is CheckState.FAILED and check.name != "releases"]
    assert "certificate authority of jobsets.gracepoint.dev (00-gracepoint)" in failed
    assert "certificate authority of jobsets.gracepoint.dev (00-other)" not in failed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(None, "found none", id="no authority"),
        pytest.param(base64.b64encode(b"nothing").decode(), "cannot be read", id="no certificate"),
    ],
)
def test_a_webhook_that_nobody_can_verify_has_failed(given: str | None, words: str) -> None:
    checks = doctor.check_webhooks(configurations(given), now=NOW)
    assert worst(checks) is CheckState.FAILED
    assert words in checks[-1].message


def test_an_authority_that_has_expired_has_failed(bundle: str) -> None:
    later = NOW + datetime.timedelta(days=365 * 1200)
    assert "expired" in doctor.check_webhooks(configurations(bundle), now=later)[-1].message


def test_missing_webhooks_are_named_with_what_they_cost() -> None:
    (check,) = doctor.check_webhooks([], now=NOW)
    assert "kubectl drain does not wait" in check.message


def stored() -> Json:
    body = jobset()
    pod_of(body)["terminationGracePeriodSeconds"] = 60
    pod_of(body)["serviceAccountName"] = "trainer"
    pod_of(body)["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    made = inject_workload(body, "default", policy_spec(), SETTINGS)
    made["metadata"]["uid"] = "u"
    return made


def test_the_pod_is_like_the_jobs_but_of_no_gang() -> None:
    body = doctor.make_probe_pod(stored(), Training())
    spec, (container,) = body["spec"], body["spec"]["containers"]
    assert not [label for label in body["metadata"]["labels"] if "jobset" in label or "gracepoint.dev" in label]
    assert (spec["serviceAccountName"], spec["restartPolicy"]) == ("trainer", "Never")
    assert container["image"] == "train:1"
    assert "nvidia.com/gpu" not in json.dumps(container["resources"])
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["GRACEPOINT_DIRECTORY"] == "/checkpoints/$(GRACEPOINT_NAMESPACE)/$(GRACEPOINT_JOBSET_NAME)"
    assert variables["GRACEPOINT_JOBSET_NAME"] == "llm"
    assert "metadata.labels" not in json.dumps(container["env"])


def test_the_pod_of_a_job_by_itself_gets_the_jobs_name() -> None:
    template = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]
    template["template"]["spec"] |= {"terminationGracePeriodSeconds": 60, "subdomain": "llm"}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": jobset()["metadata"], "spec": template}
    made = inject_workload(body, "default", policy_spec(), SETTINGS)
    made["metadata"]["uid"] = "u"
    (container,) = doctor.make_probe_pod(made, Training())["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (variables["GRACEPOINT_JOBSET_NAME"], variables["GRACEPOINT_JOBSET_UID"]) == ("llm", "u")


def ended(**terminated: Any) -> Json:
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": terminated}}]}
    return {"metadata": {"name": "x"}, "status": status}


def test_results_are_read_from_the_termination_message() -> None:
    message = json.dumps([{"name": "channel", "state": "ok", "message": "answers"}])
    (check,) = doctor.results(ended(message=message, exitCode=0))
    assert (check.name, check.state) == ("pod: channel", CheckState.OK)


def test_an_image_without_the_library_is_named_as_the_cause() -> None:
    (check,) = doctor.results(ended(message="", exitCode=127))
    assert "exit code 127" in check.message
    assert check.state is CheckState.FAILED


@pytest.mark.parametrize("said", ["", json.dumps([{"name": "channel", "state": "ok", "message": "answers"}])])
def test_a_check_that_does_not_end_blames_no_image(said: str) -> None:
    pod = ended(message=said, exitCode=137)
    pod["status"]["reason"] = "DeadlineExceeded"
    *found, late = doctor.results(pod)
    assert [check.name for check in found] == ["pod: channel"] * bool(said)
    assert (late.state, "does not answer" in late.message, "image" in late.message) == (CheckState.FAILED, True, False)


def test_what_a_pod_waits_for_is_shown() -> None:
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    assert doctor.waits_for({"status": {"containerStatuses": [waiting]}}) == "ImagePullBackOff no such image"
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    assert doctor.waits_for({"status": {"conditions": [unscheduled]}}) == "0/2 nodes are available"


def machine(labels: dict[str, str] | None = None, **others: Any) -> dict[str, Any]:
    return {"metadata": {"labels": labels or {}}, **others}


STAYS = machine({"karpenter.sh/capacity-type": "on-demand", "eks.amazonaws.com/capacityType": "ON_DEMAND"})
SPOT = machine({"karpenter.sh/capacity-type": "spot"})
PREEMPTIBLE = machine({"cloud.google.com/gke-spot": "true"})
TAINTED = machine(spec={"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]})
TPU = machine(status={"capacity": {"cpu": "96", "google.com/tpu": "4"}})


@pytest.mark.parametrize(
    ("machines", "state", "said"),
    [
        pytest.param([STAYS, STAYS], CheckState.OK, "machines that stay", id="both stay"),
        pytest.param([STAYS, SPOT], CheckState.OK, "karpenter.sh/capacity-type=spot", id="one stays"),
        pytest.param([SPOT, SPOT], CheckState.WARNING, "no job is notified", id="both are spot"),
        pytest.param([PREEMPTIBLE, TAINTED], CheckState.WARNING, "nvidia.com/gpu", id="spot and a tainted GPU"),
        pytest.param([TPU, SPOT], CheckState.WARNING, "google.com/tpu", id="an accelerator and spot"),
        pytest.param([SPOT], CheckState.WARNING, "pod-0 on node-0", id="the only one is spot"),
    ],
)
def test_replicas_that_all_stand_on_machines_that_go_away_are_said(
    machines: list[dict[str, Any]], state: CheckState, said: str
) -> None:
    nodes = {f"node-{index}": body for index, body in enumerate(machines)}
    pods = [
        {"metadata": {"name": f"pod-{index}"}, "spec": {"nodeName": f"node-{index}"}} for index in range(len(nodes))
    ]
    (found,) = doctor.check_placement([*pods, {"metadata": {"name": "waits"}, "spec": {}}], nodes)
    assert found.state is state
    assert said in found.message


def test_nothing_is_said_of_replicas_that_have_no_nodes() -> None:
    assert doctor.check_placement([{"metadata": {"name": "waits"}, "spec": {}}], {}) == []


def said(labels: dict[str, str], *bodies: Json) -> dict[str, tuple[str, str]]:
    checks = doctor.check_cluster_policies(bodies, "team", labels)
    return {check.name: (str(check.state), check.message) for check in checks}


def test_holds_that_are_off_are_pointed_out_with_the_way_back() -> None:
    state, message = said({}, cluster_policy("incident", longestHoldSeconds=0))["cluster policy incident"]
    assert state == "warning"
    assert "no eviction is held in any namespace" in message
    assert "kubectl delete clustercheckpointpolicy incident" in message


def test_a_limit_of_the_protection_from_autoscalers_is_shown_where_it_applies() -> None:
    body = cluster_policy("all-may-go", {"matchLabels": {"tier": "web"}}, protection=False)
    assert said({"tier": "gold"}, body) == {}
    state, message = said({"tier": "web"}, body)["cluster policy all-may-go"]
    assert (state, "pods in team are not protected from autoscalers" in message) == ("ok", True)


def test_the_default_and_the_limits_of_the_namespace_are_named_and_what_they_come_before() -> None:
    gold = {"matchLabels": {"tier": "gold"}}
    bodies = (
        cluster_policy("a-gold", gold, {}, longestHoldSeconds=90),
        cluster_policy("b-all", {}, {}, longestHoldSeconds=120),
        cluster_policy("c-other", {"matchLabels": {"tier": "web"}}, {}, longestHoldSeconds=5),
    )
    found = said({"tier": "gold"}, *bodies)
    assert found["default policy of team"][1].startswith("a-gold, for JobSets and Indexed Jobs")
    assert "it comes before b-all, by its name" in found["default policy of team"][1]
    assert found["limits of team"] == ("ok", "evictions are held for 90 s at most (ClusterCheckpointPolicy a-gold)")
    found = said({}, *bodies)
    assert found["default policy of team"][1] == "b-all, for JobSets and Indexed Jobs that name no policy"
    assert said({}) == {}


def test_a_cluster_policy_that_cannot_be_used_has_failed() -> None:
    body = cluster_policy("wrong")
    body["spec"]["limits"] = {"longestHoldSeconds": "never"}
    state, message = said({}, body)["cluster policy wrong"]
    assert state == "FAILED"
    assert "longestHoldSeconds" in message
