"""An object that cannot be read: it alone is left out, it is said once, and what was known of it stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.logs import PlainFormatter
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, Body, Clock
from tests.unit.operator.fakes.replica import Replica, frames, running, until
from tests.unit.operator.fakes.scene import Scene

DEEP = "[" * 50_000
MAINTENANCE = "node.gke.io/upcoming-maintenance"


def left_out(replica: Replica, kind: str, extent: str) -> float:
    labels = {"kind": kind, "extent": extent}
    return replica.metrics.registry.get_sample_value("gracepoint_objects_left_out", labels) or 0.0


def with_a_strange_toleration() -> Body:
    body = objects.pod(7)
    body["spec"]["tolerations"] = [{"tolerationSeconds": {"for": "ever"}}]
    return body


def of_a_newer_schema() -> Body:
    return objects.policy(deadline={"margin": 0.5}) | {
        "metadata": {"name": "newer", "namespace": NAMESPACE, "uid": "uid-newer", "generation": 1}
    }


def without_a_deadline() -> Body:
    body = objects.preemption(7)
    del body["spec"]["deadline"]
    return body


def nested() -> Body:
    body = objects.jobset(uid="uid-nested") | {"spec": {"replicatedJobs": [{"template": []}]}}
    body["metadata"]["name"] = "nested"
    return body


BAD: list[tuple[Kind, Callable[[], Body]]] = [
    (kinds.PODS, with_a_strange_toleration),
    (kinds.POLICIES, of_a_newer_schema),
    (kinds.PREEMPTIONS, without_a_deadline),
    (JOBSETS, nested),
]


@pytest.mark.parametrize(("kind", "make"), BAD, ids=["pod", "policy", "preemption", "JobSet"])
async def test_one_bad_object_keeps_no_gang_from_being_notified(
    api: MemoryApi, clock: Clock, caplog: pytest.LogCaptureFixture, kind: Kind, make: Callable[[], Body]
) -> None:
    body = api.add(kind, make())
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        for _ in range(3):
            replica.see(kind, make())
        replica.taint()
        await until(lambda: replica.core.cache.preemptions.records, "the decision")
        assert len(await frames(subscriber)) == 1
        assert left_out(replica, kind.plural, "object") == 1
        replica.drop(kind, body)
        await until(lambda: left_out(replica, kind.plural, "object") == 0, "the metric to forget it")
    (said,) = (PlainFormatter().format(record) for record in caplog.records if "object left out" in record.message)
    assert f"{NAMESPACE}/{body['metadata']['name']}" in said


async def test_unreadable_part_is_named_and_the_rest_of_the_node_counts(
    api: MemoryApi, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(api, clock) as replica:
        node = objects.node("node-1", annotations={MAINTENANCE: DEEP}, taints=[{"effect": 5}, objects.taint()])
        replica.see(kinds.NODES, node)
        replica.see(kinds.NODES, node)
        await until(lambda: replica.core.cache.preemptions.records, "the decision by the taint")
        (preemption,) = replica.core.cache.preemptions.records.values()
        assert preemption.spec.signal == f"taint {objects.GKE_TAINT}:NoSchedule"
        assert left_out(replica, "nodes", "part") == 1
        replica.see(kinds.NODES, objects.node("node-1"))
        await until(lambda: left_out(replica, "nodes", "part") == 0, "the metric to forget it")
    (said,) = (PlainFormatter().format(record) for record in caplog.records if "part of an object" in record.message)
    assert "spec.taints[0]" in said
    assert MAINTENANCE in said


async def test_what_was_known_of_an_object_stays_while_it_cannot_be_read(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        bad = objects.jobset()
        bad["status"]["restarts"] = "many"
        replica.see(JOBSETS, bad)
        await until(lambda: left_out(replica, "jobsets", "object"), "it to be left out")
        assert replica.core.cache.objects.workloads[JOBSET_UID].restarts == 0
        replica.taint()
        await until(lambda: replica.core.cache.preemptions.records, "the decision by what was known")
        replica.see(JOBSETS, objects.jobset(restarts=1))
        await until(
            lambda: replica.core.cache.objects.workloads[JOBSET_UID].restarts == 1, "the version that can be read"
        )
        assert left_out(replica, "jobsets", "object") == 0


async def test_a_policy_that_cannot_be_read_is_not_ready_until_it_can(api: MemoryApi, clock: Clock) -> None:
    def ready() -> tuple[str, str] | None:
        (body,) = api.of(kinds.POLICIES)
        conditions = body.get("status", {}).get("conditions", [])
        return next(((item["status"], item["message"]) for item in conditions if item["type"] == "Ready"), None)

    api.add(kinds.POLICIES, objects.policy(deadline={"margin": 0.5}))
    async with running(api, clock) as replica:
        await until(lambda: (ready() or ("", ""))[0] == "False", f"Ready=False, found {ready()}")
        assert "spec.deadline.margin" in (ready() or ("", ""))[1]
        (body,) = api.of(kinds.POLICIES)
        replica.see(kinds.POLICIES, objects.policy() | {"status": body["status"]})
        await until(lambda: (ready() or ("", ""))[0] == "True", f"Ready=True, found {ready()}")


def test_unknown_job_does_not_take_requests_of_its_name() -> None:
    scene = Scene()
    scene.seen(kinds.REQUESTS, objects.request("train-workers-9"))
    job = objects.job()
    job["metadata"] |= {"name": "train-workers-9", "uid": "uid-of-no-jobset", "labels": {}}
    scene.seen(kinds.JOBS, job)
    scene.gone(job)
    assert "uid-train-workers-9" in scene.cache.preemptions.requests
