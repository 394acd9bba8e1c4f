"""Pods that only sidecars keep running after the training has left."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint_operator.kube import objects as kinds
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NOW, Body, Clock, stamp
from tests.unit.operator.fakes.replica import Replica, cluster, running, started, until

ENDS = {"endWithTraining": True}
SAVED, UNSAVED, NOT_JOINED, CRASHED = 77, 78, 79, 1


def kept(index: int, code: int) -> Body:
    """A pod whose training has ended, and whose sidecar runs."""
    body = objects.pod(index)
    ended = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": stamp(NOW)}}
    running_since = {"running": {"startedAt": stamp(NOW - 90)}}
    body["status"]["containerStatuses"] = [
        {"name": name, "restartCount": 0, "state": state}
        for name, state in (("train", ended), ("proxy", running_since))
    ]
    return body


def deleted(api: MemoryApi) -> list[str]:
    """The pods that were deleted, by their index."""
    return sorted(call.rpartition("workers-0-")[2][0] for call in api.calls if call.startswith("DELETE"))


def api_with(clock: Clock, **policy: object) -> MemoryApi:
    made = MemoryApi(clock)
    cluster(made, **policy)
    return made


async def test_pods_are_deleted_once_the_last_process_has_left(clock: Clock) -> None:
    api = api_with(clock, sidecars=ENDS)
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, kept(0, SAVED))
        await asyncio.sleep(0.1)
        assert deleted(api) == [], "the other process may still write"
        replica.see(kinds.PODS, kept(1, UNSAVED))
        await until(lambda: deleted(api) == ["0", "1"], "both to be deleted")


async def test_a_process_that_did_not_get_in_is_replaced_alone(clock: Clock) -> None:
    api = api_with(clock, sidecars=ENDS)
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, kept(1, NOT_JOINED))
        await until(lambda: deleted(api) == ["1"], "it to be deleted")


@pytest.mark.parametrize("code", [CRASHED, 0], ids=["it crashed", "it is done"])
async def test_a_pod_whose_training_did_not_leave_stays(clock: Clock, code: int) -> None:
    api = api_with(clock, sidecars=ENDS)
    async with running(api, clock) as replica:
        for index in (0, 1):
            replica.see(kinds.PODS, kept(index, code))
        await asyncio.sleep(0.1)
        assert deleted(api) == []


@pytest.mark.parametrize("code", [SAVED, UNSAVED, NOT_JOINED])
async def test_a_sidecar_that_ends_with_such_a_code_ends_no_training(clock: Clock, code: int) -> None:
    """Also EX_NOPERM and EX_CONFIG of sysexits.h are 77 and 78."""
    api = api_with(clock, sidecars=ENDS)
    async with running(api, clock) as replica:
        for index in (0, 1):
            body = kept(index, code)
            url = {"name": "GRACEPOINT_OPERATOR_URL", "value": "https://operator"}
            body["spec"]["containers"] = [{"name": "train"}, {"name": "proxy", "env": [url]}]  # proxy trains, here
            replica.see(kinds.PODS, body)
        await asyncio.sleep(0.1)
        assert deleted(api) == []


async def test_without_the_policys_consent_no_pod_is_deleted(clock: Clock) -> None:
    api = api_with(clock)
    async with running(api, clock) as replica:
        for index in (0, 1):
            replica.see(kinds.PODS, kept(index, SAVED))
        await asyncio.sleep(0.1)
        assert deleted(api) == []


async def test_without_the_right_no_pod_is_deleted_and_the_policy_says_so(clock: Clock) -> None:
    api = api_with(clock, sidecars=ENDS)
    async with started(Replica(api, clock, "replica-a", deletes_pods=False)) as replica:

        def reason() -> str:
            (policy,) = api.of(kinds.POLICIES)
            conditions = policy.get("status", {}).get("conditions", [])
            return next((item["reason"] for item in conditions if item["type"] == "Ready"), "")

        await until(lambda: reason() == "SidecarsStay", "the policy's status to say so")
        for index in (0, 1):
            replica.see(kinds.PODS, kept(index, SAVED))
        await asyncio.sleep(0.1)
        assert deleted(api) == []
