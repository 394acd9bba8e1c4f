"""The command line on a real API server, with a replica of the operator's core beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gracepoint.wire import names
from gracepoint.wire.messages import Mode, Phase
from gracepoint_cli import drill
from gracepoint_cli.doctor import CheckState
from gracepoint_operator.kube import objects
from gracepoint_operator.workloads import JOBSETS
from tests.api_server.gang import Gang, Replica, running, told, until
from tests.command_line import Done, command
from tests.ports import held_ports
from tests.testcluster.api_server import ApiServer


async def ask(gang: Gang, *arguments: object) -> Done:
    """Runs a command in the gang's namespace, in a thread: the replica runs meanwhile."""
    flags = ("--namespace", gang.name, "--kubeconfig", gang.server.kubeconfig)
    return await asyncio.to_thread(command, *arguments, *flags)


async def ended(waits: asyncio.Task[Done], replica: Replica) -> Done:
    """Waits for the command. Meanwhile the watches bring the replica what it has written itself."""
    while not waits.done():
        await replica.watch()
        await asyncio.wait([waits], timeout=0.2)
    return waits.result()


@pytest.fixture
async def replica(gang: Gang) -> AsyncIterator[Replica]:
    """A replica that has listed a gang with two running pods."""
    await gang.make()
    async with running(gang) as made:
        yield made


async def rehearse(replica: Replica, *phases: Phase, acknowledging: int = 2) -> str:
    """Does what the operator's watches and the gang do in a drill; returns the name of the record.

    Args:
        replica: The operator's.
        phases: What the gang reports.
        acknowledging: How many of its two processes acknowledge the notice.
    """
    subscribers = [await replica.connect(index) for index in (0, 1)]

    async def requested() -> bool:
        await replica.watch()
        return bool(await replica.gang.requests())

    await until(requested, "the request of a drill")
    await replica.watch()
    notices = [await told(subscriber) for subscriber in subscribers]
    assert {notice.mode for notice in notices} == {Mode.DRILL}
    for index in range(acknowledging):
        await replica.acknowledge(index, notices[index].preemption)
    for phase in phases:
        await replica.report(phase, notices[0].preemption)
    return notices[0].preemption


async def test_a_drill_is_requested_awaited_and_reported(gang: Gang, replica: Replica) -> None:
    waits = asyncio.create_task(ask(gang, "drill", "train", "--deadline", 30, "-o", "json"))
    name = await rehearse(replica, Phase.FROZEN, Phase.COMMITTED)
    done = await ended(waits, replica)
    assert done.code == 0, done.err
    assert (done.json["good"], done.json["phase"], done.json["step"]) == (True, "Committed", 40)
    assert done.json["preemption"] == name
    assert "all frozen" in done.err


async def test_a_drill_that_saves_nothing_ends_with_one(
    gang: Gang, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill, "_ACKNOWLEDGED_WITHIN_S", 1.0)
    waits = asyncio.create_task(ask(gang, "drill", "train"))
    await rehearse(replica, Phase.FAILED, acknowledging=1)
    done = await ended(waits, replica)
    assert done.code == 1
    assert "did NOT go well: Failed" in done.out
    assert f"did not acknowledge: {gang.pod(1)}" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["drill", "nobody"], "found no JobSet, Job or TrainJob named 'nobody'", id="no such job"),
        pytest.param(["timeline", "nothing"], "preemptions: found none named 'nothing'", id="no such Preemption"),
        pytest.param(["lint", "nobody"], "found no JobSet, Job or TrainJob named 'nobody'", id="no job to lint"),
        pytest.param(["signals", "--node", "nowhere"], "nodes: found none named 'nowhere'", id="no such node"),
    ],
)
def test_what_does_not_exist_is_named(server: ApiServer, arguments: list[str], words: str) -> None:
    done = command(*arguments, "--kubeconfig", server.kubeconfig)
    assert (done.code, words in done.err) == (3, True), done


async def test_a_timeline_is_text_json_a_picture_or_a_page(gang: Gang, replica: Replica, tmp_path: Path) -> None:
    waits = asyncio.create_task(ask(gang, "drill", "train"))
    name = await rehearse(replica, Phase.FROZEN, Phase.COMMITTED)
    assert (await waits).code == 0, (await waits).err
    text = await ask(gang, "timeline", name)
    assert text.code == 0, text.err
    assert "Committed in mode Drill; step 40 saved; 0 steps lost; 9.5 s to spare" in text.out
    assert "deadline" in text.out
    lanes = (await ask(gang, "timeline", name, "-o", "json")).json["lanes"]
    assert lanes[-2:] == [f"pod {gang.pod(0)}", f"pod {gang.pod(1)}"]
    svg, page = tmp_path / "a.svg", tmp_path / "a.html"
    # By the name of the request, too.
    (asked,) = [item["metadata"]["name"] for item in await gang.requests()]
    drawn = await ask(gang, "timeline", asked, "--svg", svg, "--html", page)
    assert (drawn.code, drawn.out) == (0, ""), drawn.err
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert name in page.read_text()
    assert not [line for line in page.read_text().splitlines() if 'src="http' in line]


async def test_status_shows_jobs_their_policies_and_what_is_wrong(gang: Gang, replica: Replica) -> None:
    await replica.connect(0)

    async def ready() -> bool:
        await replica.watch()
        return (await gang.policy_condition("Ready")).get("status") == "True"

    await until(ready, "the policy to be ready")
    found = (await ask(gang, "status", "-o", "json")).json
    assert [(job["name"], job["policy"], job["running"]) for job in found["workloads"]] == [("train", "careful", 2)]
    assert [(policy["name"], policy["conditions"]["Ready"]) for policy in found["policies"]] == [("careful", "True")]
    await gang.api.merge(JOBSETS, gang.name, "train", {"metadata": {"labels": {names.LABEL_POLICY: "gone"}}})
    text = await ask(gang, "status")
    assert text.code == 0
    assert "LAST PREEMPTION" in text.out
    assert "jobset/train: there is no CheckpointPolicy 'gone'" in text.out


def test_status_of_an_empty_namespace_says_where_to_look(server: ApiServer) -> None:
    done = command("status", "-n", "default", "--kubeconfig", server.kubeconfig)
    assert done.code == 0
    assert "There is no CheckpointPolicy" in done.out
    assert "-A" in done.out


async def test_lint_reads_a_jobset_its_policy_and_claims_from_the_cluster(gang: Gang) -> None:
    await gang.make()
    done = await ask(gang, "lint", "train", "-o", "json")
    (report,) = done.json
    assert (report["kind"], report["name"]) == ("JobSet", "train")
    assert "at-creation" in {finding["rule"] for finding in report["findings"]}  # no volume at /checkpoints
    assert report["effects"]


async def test_signals_of_a_node_are_those_that_it_shows(gang: Gang) -> None:
    await gang.make()
    await gang.taint(0)
    shown = await asyncio.to_thread(
        command, "signals", "--node", gang.node(0), "-o", "json", "--kubeconfig", gang.server.kubeconfig
    )
    assert [signal["cause"] for signal in shown.json] == ["SpotTermination"]


async def test_doctor_names_what_is_missing_and_ends_with_one(gang: Gang) -> None:
    await gang.make()
    done = await ask(gang, "doctor", "-o", "json")
    states = {check["name"]: check["state"] for check in done.json}
    assert done.code == 1
    assert {states[name] for name in ("Kubernetes", "definitions", "JobSet")} == {CheckState.OK}, done.out
    assert {states[name] for name in ("operator", "webhooks")} == {CheckState.FAILED}
    assert states["policy careful"] == CheckState.FAILED  # no operator has seen it


async def test_doctors_pod_is_accepted_and_read(gang: Gang) -> None:
    """In the place of the kubelet, the test writes what the pod's container leaves behind."""
    await gang.make()
    waits = asyncio.create_task(ask(gang, "doctor", "train", "-o", "json"))

    async def made() -> dict[str, Any] | None:
        pods = (await gang.api.list(objects.PODS, namespace=gang.name)).items
        return next((pod for pod in pods if "-doctor-" in pod["metadata"]["name"]), None)

    pod = await until(made, "the pod of the check")
    assert pod["spec"]["containers"][0]["command"][:4] == ["python3", "-m", "gracepoint", "check"]
    message = json.dumps([{"name": "storage", "state": "FAILED", "message": "no right to write"}])
    terminated = {"exitCode": 1, "message": message}
    status = {"phase": "Failed", "containerStatuses": [_ended("doctor", terminated)]}
    await gang.api.merge_status(objects.PODS, gang.name, pod["metadata"]["name"], {"status": status})
    done = await waits
    assert ("pod: storage", "FAILED") in {(check["name"], check["state"]) for check in done.json}
    assert await until(lambda: _is_gone(gang, pod["metadata"]["name"]), "the pod to be deleted")


def _ended(name: str, terminated: dict[str, Any]) -> dict[str, Any]:
    state = {"terminated": terminated}
    return {"name": name, "image": "x", "imageID": "x", "ready": False, "restartCount": 0, "state": state}


async def _is_gone(gang: Gang, name: str) -> bool:
    pods = (await gang.api.list(objects.PODS, namespace=gang.name)).items
    return all(pod["metadata"]["name"] != name or "deletionTimestamp" in pod["metadata"] for pod in pods)


def test_a_server_that_does_not_answer_is_named(server: ApiServer) -> None:
    with held_ports(1) as (port,):
        done = command("status", "--kubeconfig", server.kubeconfig_for(f"https://127.0.0.1:{port}"))
    assert done.code == 3
    assert f"the API server https://127.0.0.1:{port} does not answer" in done.err
    assert "context" in done.err


def test_credentials_that_are_refused_are_said_with_what_to_do(server: ApiServer, tmp_path: Path) -> None:
    config = json.loads(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": "expired"}
    (tmp_path / "config").write_text(json.dumps(config))
    done = command("status", "--kubeconfig", tmp_path / "config")
    assert done.code == 3
    assert "Log in again" in done.err


async def test_names_of_jobsets_are_completed(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    from gracepoint_cli.__main__ import completions

    await gang.make()
    monkeypatch.setenv("KUBECONFIG", str(gang.server.kubeconfig))
    for name in ("_GRACEPOINT_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
        monkeypatch.setenv(name, "")  # so that what is set in between is undone
    assert await asyncio.to_thread(completions, ["drill", "--namespace", gang.name], "tr") == ["train"]


async def test_the_time_of_a_job_is_a_table_or_json(gang: Gang, replica: Replica) -> None:
    async def shown() -> bool:
        return bool((await ask(gang, "goodput", "-o", "json")).json)

    await until(shown, "the account of the JobSet")
    (account,) = (await ask(gang, "goodput", "-o", "json")).json
    assert (account["name"], account["policy"]) == ("train", "careful")
    assert sum(account["seconds"].values()) == pytest.approx(account["totalSeconds"])
    table = await ask(gang, "goodput")
    assert table.out.splitlines()[0].split()[:3] == ["JOB", "GOODPUT", "TOTAL"]
    whole = await ask(gang, "goodput", "jobset/train")
    assert [line.split()[0] for line in whole.out.splitlines()[2 : 2 + len(account["seconds"])]] == list(
        account["seconds"]
    )
    nobody = await ask(gang, "goodput", "nobody")
    assert (nobody.code, "no account of a JobSet or Job 'nobody'" in nobody.err) == (3, True)
