"""Pods that do not train, and without which the gang does not go on."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint.wire import names
from gracepoint_operator.decisions.decide import StartPreemption
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import Body
from tests.unit.operator.fakes.scene import Scene

NODE = "node-3"


def helper_job(*, failed: int = 0, condition: str = "", **spec: Any) -> Body:
    made = objects.job(condition=condition, completions=1)
    made["metadata"] |= {"name": "train-data-0", "uid": "uid-job-data"}
    made["metadata"]["labels"][names.JOBSET_LABEL_REPLICATED_JOB] = "data"
    made["spec"] |= {"backoffLimit": 0, **spec}
    made["status"]["failed"] = failed
    return made


def helper_pod(*, phase: str = "Running", life: int = 0) -> Body:
    made = objects.pod(0, on=NODE, phase=phase)
    made["metadata"] |= {"name": f"train-data-0-0-{life}abc", "uid": f"uid-data-{life}"}
    made["metadata"]["labels"] |= {
        names.LABEL_ROLE: names.ROLE_HELPER,
        names.JOBSET_LABEL_REPLICATED_JOB: "data",
        "batch.kubernetes.io/job-name": "train-data-0",
        "batch.kubernetes.io/controller-uid": "uid-job-data",
    }
    return made


def scene(job: Body | None = None, failure_policy: Body | None = None) -> Scene:
    made = Scene()
    body = objects.jobset()
    body["spec"]["failurePolicy"] = failure_policy or {}
    made.listed(JOBSETS, body)
    made.listed(kinds.NODES, objects.node(NODE))
    made.listed(kinds.JOBS, job or helper_job())
    made.listed(kinds.PODS, helper_pod())
    return made


def test_the_taint_of_a_helpers_node_notifies_the_processes_and_the_record_names_the_helper() -> None:
    world = scene()
    world.taint(NODE)
    start = world.start()
    assert (start.spec.pods, start.spec.nodes) == (["train-data-0-0-0abc"], [NODE])
    assert start.expected == 2, "the processes; a helper sends no receipt"
    assert start.spec.exits


@pytest.mark.parametrize(
    ("job", "failure_policy"),
    [
        pytest.param(helper_job(backoffLimit=3), None, id="its Job replaces the pod"),
        pytest.param(helper_job(backoffLimit=3, failed=1), None, id="its Job still replaces the pod"),
        pytest.param(helper_job(), {"rules": [{"action": "RestartJob"}]}, id="only its Job is made anew"),
        pytest.param(helper_job(condition="Complete"), None, id="it has done its work"),
    ],
)
def test_a_helper_without_which_the_gang_continues_disturbs_nobody(job: Body, failure_policy: Body | None) -> None:
    world = scene(job, failure_policy)
    world.taint(NODE)
    assert world.decisions() == []


@pytest.mark.parametrize(
    ("job", "failure_policy"),
    [
        pytest.param(helper_job(backoffLimit=1, failed=1), None, id="its last failure"),
        pytest.param(helper_job(), {"rules": [{"action": "FailJobSet"}]}, id="it would end the JobSet"),
        pytest.param(
            helper_job(backoffLimit=2**31 - 1), {"restartStrategy": "InPlaceRestart"}, id="all restart in place"
        ),
    ],
)
def test_a_helper_without_which_the_gang_restarts_counts(job: Body, failure_policy: Body | None) -> None:
    world = scene(job, failure_policy)
    world.taint(NODE)
    assert world.start().spec.pods == ["train-data-0-0-0abc"]


def test_what_follows_from_the_end_of_a_helper_is_no_disruption() -> None:
    world = scene()
    world.seen(kinds.JOBS, helper_job(condition="Failed", failed=1))
    world.seen(kinds.PODS, helper_pod(phase="Failed"))
    world.taint("node-1")
    assert world.decisions() == []


def test_a_helper_that_its_job_is_about_to_replace_leaves_the_gang_protected() -> None:
    world = scene(helper_job(backoffLimit=1))
    world.seen(kinds.JOBS, helper_job(backoffLimit=1, failed=1))
    world.seen(kinds.PODS, helper_pod(phase="Failed"))
    world.taint("node-1")
    assert isinstance(world.start(), StartPreemption)


def test_before_there_are_processes_a_helper_has_nobody_to_tell() -> None:
    world = scene()
    for index in (0, 1):
        world.gone(objects.pod(index))
    world.taint(NODE)
    assert world.decisions() == []


def test_the_gang_has_left_when_its_processes_have() -> None:
    world = scene()
    world.taint(NODE)
    start = world.start()
    world.recorded(phase="Committed", ended_at=world.clock(), pods=start.spec.pods)
    for index in (0, 1):
        world.gone(objects.pod(index))
    assert world.reached() == ["exited"]
