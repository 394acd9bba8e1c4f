"""The command line with every kind of workload, on a real API server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint.wire import names
from gracepoint_cli.__main__ import completions
from gracepoint_operator.kube import objects
from gracepoint_operator.workloads import JOBSETS, LONE_JOBS, MAKERS
from tests.api_server.gang import Gang
from tests.command_line import Done, command
from tests.testcluster.api_server import ApiServer

Body = dict[str, Any]
TRAINJOBS = MAKERS[0].kind
EXAMPLES = Path(__file__).parents[2] / "examples"
LABELS = {names.LABEL_POLICY: "careful"}


async def ask(gang: Gang, *arguments: object) -> Done:
    """Runs a command in the gang's namespace."""
    flags = ("--namespace", gang.name, "--kubeconfig", gang.server.kubeconfig)
    return await asyncio.to_thread(command, *arguments, *flags)


async def lone_job(gang: Gang, name: str = "alone") -> Body:
    """Creates a Job by itself as the webhook leaves it, and a pod of it that runs."""
    _, body = yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
    body["metadata"] = {"name": name, "labels": LABELS}
    body["spec"]["template"]["metadata"] = {"labels": LABELS}
    made = await gang.api.create(LONE_JOBS, gang.name, body)
    uid = made["metadata"]["uid"]
    labels = {**LABELS, "batch.kubernetes.io/job-name": name, "batch.kubernetes.io/controller-uid": uid}
    spec = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "x"}]}
    pod = {"metadata": {"name": f"{name}-0-abcde", "labels": labels}, "spec": spec}
    await gang.api.create(objects.PODS, gang.name, pod)
    await gang.api.merge_status(objects.PODS, gang.name, f"{name}-0-abcde", {"status": {"phase": "Running"}})
    return made


@pytest.fixture(scope="module")
def trainer(server: ApiServer) -> Iterator[None]:
    """The API of TrainJobs, without the Trainer's own schema."""
    group, plural = TRAINJOBS.group, TRAINJOBS.plural
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    spec = {"group": group, "scope": "Namespaced", "names": {"plural": plural, "kind": "TrainJob"}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {**spec, "versions": [version]},
    }
    server.define(bodies=(definition,))
    yield
    server.kubectl("delete", "crd", f"{plural}.{group}")


async def trainjob(gang: Gang, name: str) -> Body:
    body = {
        "apiVersion": TRAINJOBS.api_version,
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": LABELS},
        "spec": {"runtimeRef": {"name": "any"}},
    }
    return await gang.api.create(TRAINJOBS, gang.name, body)


async def test_a_job_by_itself_is_shown_checked_and_rehearsed(gang: Gang) -> None:
    await gang.make()
    made = await lone_job(gang)
    shown = {job["name"]: job for job in (await ask(gang, "status", "-o", "json")).json["workloads"]}
    assert shown.keys() == {"train", "alone"}
    assert (shown["alone"]["kind"], shown["alone"]["running"], shown["alone"]["gracePeriodSeconds"]) == ("Job", 1, 60)
    assert "job/alone" in (await ask(gang, "status")).out

    (report,) = (await ask(gang, "lint", "job/alone", "-o", "json")).json
    assert (report["kind"], report["name"]) == ("Job", "alone")

    asked = await ask(gang, "drill", "job/alone", "--no-wait", "-o", "json")
    assert asked.code == 0, asked.err
    request = await gang.api.get(objects.REQUESTS, gang.name, asked.json["request"])
    assert request["spec"]["jobSet"] == {"kind": "Job", "name": "alone"}

    name = f"alone-{made['metadata']['uid'][:8]}-0"
    await gang.api.create(objects.PREEMPTIONS, gang.name, record(name, made["metadata"]["uid"]))
    drawn = await ask(gang, "timeline", name, "-o", "json")
    assert drawn.code == 0, drawn.err
    assert drawn.json["lanes"][-1] == "pod alone-0-abcde"


def record(name: str, uid: str) -> Body:
    """A Preemption of the Job, as the operator writes it."""
    spec = {
        "epoch": 0,
        "jobSet": {"kind": "Job", "name": "alone", "uid": uid},
        "policy": {"name": "careful", "spec": {}},
        "cause": "Drain",
        "signal": "eviction of the pod",
        "confidence": "sure",
        "cancelable": False,
        "mode": "Drill",
        "observedAt": "2026-03-01T12:00:00.000000Z",
        "deadline": "2026-03-01T12:01:00.000000Z",
    }
    api_version = f"{names.GROUP}/{names.API_VERSION}"
    return {"apiVersion": api_version, "kind": "Preemption", "metadata": {"name": name}, "spec": spec}


async def test_a_name_that_two_kinds_have_is_asked_back(gang: Gang) -> None:
    await gang.make()
    await lone_job(gang, "train")
    done = await ask(gang, "lint", "train")
    assert done.code == 2
    assert "found a JobSet and a Job named 'train'" in done.err
    assert "jobset/train or job/train" in done.err
    assert (await ask(gang, "lint", "job/train", "-o", "json")).json[0]["kind"] == "Job"


async def test_a_job_of_a_jobset_leads_to_its_jobset(gang: Gang) -> None:
    await gang.make()
    reference = {"apiVersion": JOBSETS.api_version, "kind": "JobSet", "name": "train", "uid": gang.workload_uid}
    owners = {"metadata": {"ownerReferences": [{**reference, "controller": True}]}}
    await gang.api.merge(objects.JOBS, gang.name, "train-workers-0", owners)
    done = await ask(gang, "drill", "train-workers-0")
    assert done.code == 2
    assert "the Job train-workers-0 belongs to the JobSet train" in done.err
    assert "jobset/train" in done.err


@pytest.mark.usefixtures("trainer")
async def test_a_trainjob_means_the_jobset_that_was_made_of_it(gang: Gang) -> None:
    await gang.make()
    made = await trainjob(gang, "train")
    stranger = await ask(gang, "drill", "trainjob/train")
    assert (stranger.code, "the TrainJob train has no JobSet yet" in stranger.err) == (3, True), stranger
    uid = made["metadata"]["uid"]
    owner = {"apiVersion": TRAINJOBS.api_version, "kind": "TrainJob", "name": "train", "uid": uid, "controller": True}
    await gang.api.merge(JOBSETS, gang.name, "train", {"metadata": {"ownerReferences": [owner]}})
    assert "trainjob/train" in (await ask(gang, "status")).out
    for name in ("trainjob/train", "train"):
        (report,) = (await ask(gang, "lint", name, "-o", "json")).json
        assert (report["kind"], report["pathsOf"]) == ("TrainJob", "of the JobSet that is made of it")


@pytest.mark.usefixtures("trainer")
async def test_a_trainjob_without_a_jobset_is_a_problem_in_status(gang: Gang) -> None:
    await gang.make()
    await trainjob(gang, "early")
    shown = await ask(gang, "status")
    assert "trainjob/early: it has no JobSet under a policy" in shown.out
    bare = await ask(gang, "drill", "early")
    assert (bare.code, "kubectl describe trainjob early" in bare.err) == (3, True)


async def test_kinds_and_names_are_completed(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    await gang.make()
    await lone_job(gang)
    monkeypatch.setenv("KUBECONFIG", str(gang.server.kubeconfig))
    for name in ("_GRACEPOINT_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
        monkeypatch.setenv(name, "")  # so that what is set in between is undone

    def completed(incomplete: str) -> list[str]:
        return completions(["drill", "--namespace", gang.name], incomplete)

    assert await asyncio.to_thread(completed, "") == ["alone", "train"]
    assert await asyncio.to_thread(completed, "job/") == ["job/alone"]


def user_of(gang: Gang, folder: Path, *groups: str) -> Path:
    """The kubeconfig of somebody who has every right in the gang's namespace on these groups, and no other."""
    rules = [{"apiGroups": list(groups), "resources": ["*"], "verbs": ["*"]}]
    subject = {"kind": "ServiceAccount", "name": "user", "namespace": gang.name}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "user"}
    rbac, meta = "rbac.authorization.k8s.io/v1", {"name": "user", "namespace": gang.name}
    gang.server.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": rbac, "kind": "Role", "metadata": meta, "rules": rules},
        {"apiVersion": rbac, "kind": "RoleBinding", "metadata": meta, "subjects": [subject], "roleRef": role},
    )
    token = gang.server.kubectl("create", "token", "user", f"--namespace={gang.name}").stdout.strip()
    config = json.loads(gang.server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    (folder / "config").write_text(json.dumps(config))
    return folder / "config"


async def test_jobs_are_found_without_rights_on_other_kinds(gang: Gang, tmp_path: Path) -> None:
    """A cluster that lacks JobSet or the Trainer refuses these kinds to whoever may not read everything."""
    await gang.make()
    await lone_job(gang)
    config = await asyncio.to_thread(user_of, gang, tmp_path, "", "batch", names.GROUP)

    async def asked(*arguments: str) -> Done:
        return await asyncio.to_thread(command, *arguments, "--namespace", gang.name, "--kubeconfig", config)

    shown = await asked("status", "-o", "json")
    assert [job["name"] for job in shown.json["workloads"]] == ["alone"]
    assert "JobSets are not shown" in shown.err
    assert (await asked("lint", "alone", "-o", "json")).json[0]["name"] == "alone"
    nobody = await asked("lint", "train")
    assert nobody.code == 3
    assert "not all kinds could be looked at" in nobody.err
    assert "HTTP 403" in (await asked("lint", "jobset/train")).err
