"""All replicas are gone from the notice on: the next start proves the commit, in the record of a real API server."""

from __future__ import annotations

from gracepoint.wire.messages import Resumption, SavedFor, Spent
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject
from tests.api_server.gang import Gang, Replica, running, told, until


async def resume(replica: Replica, preemption: str, *, attempt: int) -> None:
    """The restarted gang says what it has restored, and for which preemption that was saved."""
    gang = replica.gang
    pod = replica.core.cache.objects.pod_named(gang.name, gang.pod(0))
    assert pod is not None
    message = Resumption(
        pod_uid=pod.uid,
        session=f"s-{attempt}",
        workload_uid=gang.workload_uid,
        restart_attempt=attempt,
        restored_step=40,
        training=False,
        age_s=0.0,
        saved_for=SavedFor(
            preemption=preemption,
            session=f"s-{attempt - 1}",
            restart_attempt=attempt - 1,
            spent=Spent(now_s=9.0, joined_s=1.0, left_s=9.0),
        ),
    )
    await replica.core.reports.take(pod, message)


async def test_the_next_start_proves_a_commit_that_no_replica_heard_of(gang: Gang) -> None:
    await gang.make()
    async with running(gang) as replica:
        subscriber = await replica.connect(0)
        await gang.taint(0)
        await replica.watch()
        first = await told(subscriber)
        await until(lambda: _phase(gang, first.preemption, "Noticed"), "the record of the notice")
    await gang.taint(0, on=False)
    await gang.run_attempt(1)

    async with running(gang, "replica-b") as replica:
        await gang.taint(1)
        await replica.watch()
        subscriber = await replica.connect(0)
        second = await told(subscriber)  # disrupted again, before anything was restored
        await until(lambda: _phase(gang, first.preemption, "Expired"), "the operator to give up")
        await resume(replica, first.preemption, attempt=1)
        body = await until(lambda: _phase(gang, first.preemption, "Committed"), "the proven commit")
        assert (body["status"]["step"], body["status"]["stepsLost"], body["status"]["restoredStep"]) == (40, 0, 40)
        (end,) = (item for item in body["status"]["conditions"] if item["type"] == "Ended")
        assert end["reason"] == "NextStartRestored"
        assert "the next start has restored it" in end["message"]
        assert await _phase(gang, second.preemption, "Noticed")


async def _phase(gang: Gang, name: str, phase: str) -> JsonObject | None:
    """The record, if it has the phase."""
    body = await gang.api.get(objects.PREEMPTIONS, gang.name, name)
    return body if body.get("status", {}).get("phase") == phase else None
