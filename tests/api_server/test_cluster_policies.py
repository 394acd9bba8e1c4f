"""Defaults and limits of administrators, with a real API server, the chart's webhooks and roles, and the operator."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.names import LABEL_DEFAULT, LABEL_POLICY
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import KubeClient
from tests.api_server.gang import Gang
from tests.api_server.releases import Operator, Release
from tests.command_line import command
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.samples import job_of, jobset

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Body = dict[str, Any]
OPERATOR = "system:serviceaccount:gp-system:gp-gracepoint"
GOLD = {"matchLabels": {"tier": "gold"}}
#: An incident's switch acts within seconds.
AT_ONCE_S = 5.0


@pytest.fixture(scope="module")
def installed(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Release, Operator]]:
    """The chart with a replica that the API server reaches."""
    release = Release(server, tmp_path_factory.mktemp("release"))
    release.upgrade()
    try:
        with release.operator() as operator:
            release.connect(operator)
            yield release, operator
    finally:
        release.uninstall()


@pytest.fixture
def api(server: ApiServer, installed: object) -> Iterator[ApiServer]:
    """With the operator, and without ClusterCheckpointPolicies afterwards."""
    yield server
    server.kubectl("delete", "clustercheckpointpolicies", "--all")


@pytest.fixture
async def gang(request: pytest.FixtureRequest, server: ApiServer) -> AsyncIterator[Gang]:
    client = KubeClient.connect(str(server.kubeconfig))
    yield Gang(server, client, request.node.originalname.removeprefix("test_").replace("_", "-")[:40].strip("-"))
    client.close()


def namespace(api: ApiServer, name: str, **labels: str) -> str:
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    return name


def put(api: ApiServer, body: Body, *, user: str = "") -> str:
    """Applies an object. Returns what the API server says against it."""
    meta = {key: value for key, value in body["metadata"].items() if key not in ("uid", "generation")}
    argv = ["apply", "--filename=-", *([f"--as={user}"] if user else [])]
    done = api.kubectl(*argv, stdin=json.dumps({**body, "metadata": meta}), check=False)
    return "" if done.returncode == 0 else done.stderr


def default_is_known(api: ApiServer, name: str) -> None:
    """Waits until the webhook is asked about what names no policy."""

    def asked() -> bool:
        return LABEL_POLICY in made(api, name, unlabelled("probe"), dry_run=True)["metadata"].get("labels", {})

    wait_until(f"a default in {name}", asked, timeout_s=30)


def unlabelled(name: str, **labels: str) -> Body:
    body = jobset()
    body["metadata"] = {"name": name, "labels": labels}
    return body


def indexed_job(name: str, **spec: Any) -> Body:
    pod = job_of(jobset())["template"]
    job = {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 1, **spec}
    pod["spec"] |= {"restartPolicy": "Never", "subdomain": "headless"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {**job, "template": pod}}


def made(api: ApiServer, where: str, body: Body, *, dry_run: bool = False) -> Body:
    argv = ["create", "--filename=-", f"--namespace={where}", "--output=json", *(["--dry-run=server"] * dry_run)]
    found: Body = json.loads(api.kubectl(*argv, stdin=json.dumps(body)).stdout)
    return found


def policy_of(body: Body) -> str | None:
    name: str | None = (body["metadata"].get("labels") or {}).get(LABEL_POLICY)
    return name


def test_what_names_no_policy_gets_the_default_of_its_namespace_and_a_copy_of_it_is_kept_there(api: ApiServer) -> None:
    gold, other = namespace(api, "gold", tier="gold"), namespace(api, "bronze", tier="bronze")
    assert put(api, objects.cluster_policy("everyone", GOLD, {"mode": "Observe"})) == ""
    default_is_known(api, gold)
    assert policy_of(made(api, gold, unlabelled("train"))) == "everyone"
    assert policy_of(made(api, gold, indexed_job("lone"))) == "everyone"
    left_alone = {
        "another namespace": made(api, other, unlabelled("train")),
        "it does not want one": made(api, gold, unlabelled("off", **{LABEL_DEFAULT: "off"})),
        "no gang": made(api, gold, indexed_job("cron", completionMode="NonIndexed", backoffLimitPerIndex=None)),
    }
    for why, body in left_alone.items():
        assert policy_of(body) is None, why
    owner = json.loads(api.kubectl("get", "jobset", "train", f"--namespace={gold}", "--output=json").stdout)["metadata"]
    child = indexed_job("child")
    reference = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "train", "uid": owner["uid"]}
    child["metadata"]["ownerReferences"] = [{**reference, "controller": True}]
    assert policy_of(made(api, gold, child)) is None, "a Job that another object made"

    def copied() -> Body:
        done = api.kubectl("get", "checkpointpolicy", "everyone", f"--namespace={gold}", "--output=json", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    wait_until("the copy", lambda: copied().get("status", {}).get("jobSets", {}).get("count") == 2, timeout_s=30)
    body = copied()
    assert body["spec"]["mode"] == "Observe"
    assert [(item["kind"], item["name"]) for item in body["metadata"]["ownerReferences"]] == [
        ("ClusterCheckpointPolicy", "everyone")
    ]
    assert put(api, objects.cluster_policy("everyone", GOLD, {"mode": "Drill"})) == ""
    wait_until("the copy to follow", lambda: copied()["spec"]["mode"] == "Drill", timeout_s=30)
    api.kubectl(
        "patch", "checkpointpolicy", "everyone", f"--namespace={gold}", "--type=merge", '-p={"spec":{"mode":"Enforce"}}'
    )
    wait_until("the copy to be put right", lambda: copied()["spec"]["mode"] == "Drill", timeout_s=30)


def test_a_default_that_a_jobset_cannot_meet_is_a_warning_and_no_refusal(api: ApiServer) -> None:
    where = namespace(api, "strict", tier="gold")
    assert put(api, objects.cluster_policy("everyone", GOLD, {})) == ""
    default_is_known(api, where)
    body = unlabelled("hostless")
    body["spec"]["network"] = {"enableDNSHostnames": False}
    done = api.kubectl("create", "--filename=-", f"--namespace={where}", stdin=json.dumps(body))
    assert "Warning: not protected from preemptions by the default policy everyone" in done.stderr
    body["metadata"] = {"name": "asked-for-it", "labels": {LABEL_POLICY: "everyone"}}
    done = api.kubectl("create", "--filename=-", f"--namespace={where}", stdin=json.dumps(body), check=False)
    assert "spec.network.enableDNSHostnames" in done.stderr, "who names a policy is refused"


def test_the_api_server_refuses_what_says_nothing_clear(api: ApiServer) -> None:
    wrong: dict[str, Body] = {
        "namespaceSelector": {"namespaceSelector": None},
        "values must be there": {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
        "longestHoldSeconds": {"limits": {"longestHoldSeconds": 3601}},
        "savedExitCode and unsavedExitCode must differ": {
            "default": {"checkpoint": {"directory": "/c"}, "afterSave": {"savedExitCode": 9, "unsavedExitCode": 9}}
        },
        "unknown field": {"limits": {"longestHold": 3}},
    }
    for says, change in wrong.items():
        body = objects.cluster_policy()
        body["spec"] |= change
        assert says in put(api, body), says


def test_only_administrators_write_it_and_the_operator_writes_no_users_policy(api: ApiServer) -> None:
    where = namespace(api, "rights")
    for role, user in (("gp-gracepoint-edit", "eve"), ("gp-gracepoint-view", "ann"), ("gp-gracepoint-admin", "ada")):
        api.kubectl("create", "clusterrolebinding", f"rights-{user}", f"--clusterrole={role}", f"--user={user}")

    def may(verb: str, resource: str, user: str) -> bool:
        argv = ("auth", "can-i", verb, resource, f"--namespace={where}", f"--as={user}")
        return api.kubectl(*argv, check=False).stdout.strip() == "yes"

    for verb in ("create", "patch", "delete"):
        found = [
            may(verb, "clustercheckpointpolicies.gracepoint.dev", user) for user in ("eve", "ann", "ada", OPERATOR)
        ]
        assert found == [False, False, True, False], verb
    users = objects.policy()
    users["metadata"]["namespace"] = where
    assert put(api, users) == ""
    patch = (
        "patch",
        "checkpointpolicy",
        "careful",
        f"--namespace={where}",
        "--type=merge",
        '-p={"spec":{"mode":"Drill"}}',
    )
    why = "the operator writes no CheckpointPolicy but those that it keeps"
    wait_until(
        "the admission policy",
        lambda: why in api.kubectl(*patch, f"--as={OPERATOR}", check=False).stderr,
        timeout_s=60,
    )
    users["metadata"]["name"] = "new"
    assert why in put(api, users, user=OPERATOR)


def test_the_command_line_says_which_default_and_limits_apply(api: ApiServer, tmp_path: Path) -> None:
    where = namespace(api, "asked", tier="gold")
    default = {"evictionHold": {"boundSeconds": 300}}
    assert put(api, objects.cluster_policy("everyone", GOLD, default, longestHoldSeconds=45)) == ""
    file = tmp_path / "jobset.yaml"
    file.write_text(json.dumps(unlabelled("train")))
    flags = ("--namespace", where, "--kubeconfig", api.kubeconfig)
    linted = command("lint", file, *flags)
    assert "the JobSet gets the default policy everyone of its namespace" in linted.out
    assert "waits for the save, for at most 45 s" in linted.out
    file.write_text(json.dumps(unlabelled("train", **{LABEL_DEFAULT: "off"})))
    assert "no-policy" in command("lint", file, *flags).out
    checks = {check["name"]: check for check in command("doctor", "-o", "json", *flags).json}
    assert checks[f"default policy of {where}"]["message"].startswith("everyone, for JobSets")
    assert "held for 45 s at most" in checks[f"limits of {where}"]["message"]
    assert put(api, objects.cluster_policy("incident", longestHoldSeconds=0)) == ""
    checks = {check["name"]: check for check in command("doctor", "-o", "json", *flags).json}
    assert checks["cluster policy incident"]["state"] == "warning"


def test_records_are_created_by_the_operator_and_by_who_may_restore_them(api: ApiServer) -> None:
    """Also where a role of version 0.2 has the right to create Preemptions, which were requests then."""
    where = namespace(api, "records")
    record = objects.preemption()
    record["metadata"] = {"name": record["metadata"]["name"], "namespace": where}
    for user, verbs in (("old", "create"), ("keeper", "create,restore")):
        api.kubectl(*("create", "role", user, f"--namespace={where}", f"--verb={verbs}"), "--resource=preemptions")
        api.kubectl("create", "rolebinding", user, f"--namespace={where}", f"--role={user}", f"--user={user}")

    def said(user: str) -> str:
        argv = ("create", "--filename=-", "--dry-run=server", f"--as={user}")
        done = api.kubectl(*argv, stdin=json.dumps(record), check=False)
        return "" if done.returncode == 0 else done.stderr

    wait_until("the admission policy", lambda: "create a PreemptionRequest" in said("old"), timeout_s=30)
    assert [said(user) for user in ("keeper", OPERATOR)] == ["", ""]
    done = api.kubectl("create", "--filename=-", "--dry-run=server", stdin=json.dumps(record), check=False)
    assert done.returncode == 0, "an administrator of the cluster"


async def test_the_switch_of_an_incident_lets_all_evictions_through_within_seconds(
    api: ApiServer, installed: tuple[Release, Operator], gang: Gang
) -> None:
    _, operator = installed
    await gang.make()

    def evicted(index: int) -> str:
        """What the API server says against an eviction of a pod. Empty: the pod goes."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": gang.pod(index)}}
        path = f"/api/v1/namespaces/{gang.name}/pods/{gang.pod(index)}/eviction"
        done = api.kubectl("create", "--raw", path, "--filename=-", stdin=json.dumps(body), check=False)
        return "" if done.returncode == 0 else done.stderr

    wait_until("an eviction to be held", lambda: "Gracepoint saves the JobSet train" in evicted(0), timeout_s=30)
    assert put(api, objects.cluster_policy("incident", longestHoldSeconds=0)) == ""
    switched_at = time.monotonic()
    wait_until("the eviction to be let through", lambda: evicted(0) == "", timeout_s=AT_ONCE_S)
    assert time.monotonic() - switched_at < AT_ONCE_S

    def metrics() -> str:
        with urllib.request.urlopen(f"{operator.url}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    line = 'gracepoint_longest_hold_seconds{set_by="incident"} 0.0'
    wait_until("the metric", lambda: line in metrics(), timeout_s=AT_ONCE_S)
    assert "no eviction is held" in operator.log.read_text()
    api.kubectl("delete", "clustercheckpointpolicy", "incident")
    wait_until("the metric to be gone", lambda: 'set_by="incident"' not in metrics(), timeout_s=AT_ONCE_S)
    assert (await gang.api.get(kinds.PREEMPTIONS, gang.name, gang.epoch(1)))["spec"]["evictionAttemptedAt"]
    assert "Gracepoint saves the JobSet train" in evicted(1), "the other pod, as the bound is not over"
