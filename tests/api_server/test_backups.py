"""Records of ended preemptions, and requests, that an administrator restores from a backup, as the pages say."""

from __future__ import annotations

import datetime
import json
from typing import Any

from gracepoint.wire.messages import Phase
from gracepoint_operator.kube import objects
from gracepoint_operator.model.preemption_record import LABEL_ENDED_AT, PreemptionRecord
from tests.api_server.gang import Gang, Replica, running, told, until

Json = dict[str, Any]
_OF_THE_CLUSTER = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields")


def dumped(gang: Gang, plural: str) -> Json:
    """What the command of the page writes: without what the API server itself sets. An hour old."""
    found: Json = json.loads(gang.server.kubectl("get", plural, f"--namespace={gang.name}", "--output=json").stdout)
    for body in found["items"]:
        for field in _OF_THE_CLUSTER:
            body["metadata"].pop(field, None)
        for field in {"observedAt", "deadline"} & body["spec"].keys():
            at = datetime.datetime.fromisoformat(body["spec"][field]) - datetime.timedelta(hours=1)
            body["spec"][field] = at.isoformat()
    return found


async def ended_record(gang: Gang, replica: Replica) -> Json:
    subscriber = await replica.connect(0)
    await gang.taint(0)
    await replica.watch()
    notice = await told(subscriber)
    for phase in (Phase.FROZEN, Phase.COMMITTED):
        await replica.report(phase, notice.preemption)

    async def over() -> Json | None:
        body = await gang.api.get(objects.PREEMPTIONS, gang.name, notice.preemption)
        return body if body.get("status", {}).get("phase") == "Committed" else None

    found: Json = await until(over, "the record to say Committed")
    await gang.taint(0, on=False)
    return found


def known(gang: Gang, replica: Replica) -> list[PreemptionRecord]:
    """The records of this gang alone: the server has those of other tests, too."""
    return [record for record in replica.core.cache.preemptions.records.values() if record.namespace == gang.name]


async def test_restored_records_are_as_before_and_notify_nobody(gang: Gang) -> None:
    await gang.make()
    async with running(gang) as replica:
        before = await ended_record(gang, replica)
        backup = json.dumps(dumped(gang, "preemptions"))
        await gang.api.delete(objects.PREEMPTIONS, before)
        await replica.watch()
        assert known(gang, replica) == []

        gang.server.kubectl("create", "-f", "-", stdin=backup)
        bare = (await gang.records())[0]
        assert "status" not in bare, "the API server drops it"
        await replica.watch()
        again = await replica.connect(0)  # the same pod, whose process began anew
        replica.core._decisions.decide_now(gang.workload_uid)
        assert again.sent_deadlines == {}, "nobody is notified of what has ended long ago"
        await replica.core.writers.preemptions.close(5.0)
        assert (await gang.records())[0] == bare, "an end that nobody knows is not made up"

        gang.server.kubectl("replace", "--subresource=status", "-f", "-", stdin=backup)
        (after,) = await gang.records()
        assert after["status"] == before["status"]
        await replica.watch()
        (epoch,) = known(gang, replica)
        assert (epoch.phase, epoch.end_reason) == (Phase.COMMITTED, "Committed")

    async with running(gang, "replica-b") as replica:
        await gang.run_attempt(1)
        await replica.watch()
        subscriber = await replica.connect(0)
        await gang.taint(0)
        await replica.watch()
        assert (await told(subscriber)).preemption == gang.epoch(2), "the numbers go on"


async def test_a_restored_request_that_was_over_is_not_carried_out_again(gang: Gang) -> None:
    await gang.make()
    async with running(gang) as replica:
        request = {
            "apiVersion": objects.REQUESTS.api_version,
            "kind": "PreemptionRequest",
            "metadata": {"name": "leave"},
            "spec": {"jobSet": {"name": "nobody"}, "deadlineSeconds": 60},
        }
        made = await gang.api.create(objects.REQUESTS, gang.name, request)
        await gang.api.merge_status(objects.REQUESTS, gang.name, "leave", {"status": {"phase": "Superseded"}})
        await replica.watch()
        await replica.core._garbage_collector.retire_requests()
        backup = dumped(gang, "preemptionrequests")
        await gang.api.delete(objects.REQUESTS, await gang.api.get(objects.REQUESTS, gang.name, "leave"))
        assert made["metadata"]["name"] in {body["metadata"]["name"] for body in backup["items"]}

        gang.server.kubectl("create", "-f", "-", stdin=json.dumps(backup))
        (restored,) = await gang.requests()
        assert LABEL_ENDED_AT in restored["metadata"]["labels"]
    async with running(gang, "replica-b") as replica:
        assert not replica.core.cache.preemptions.requests, "it is not even listed"
