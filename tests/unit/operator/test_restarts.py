"""However the operator is killed, and between which two steps: one object, one notice, one end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gracepoint.wire.messages import Phase
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from tests.hypothesis_profiles import portion
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.mortal import Fuse, LoggingApi, Process, Team, taint, team
from tests.unit.operator.fakes.objects import JOBSET_UID, Clock
from tests.unit.operator.fakes.replica import cluster, until

NAME = f"train-{JOBSET_UID[:8]}-1"
Story = Callable[[Team, list[Process]], Awaitable[None]]


def records(api: LoggingApi) -> list[JsonObject]:
    return api.of(kinds.PREEMPTIONS)


async def all_told(processes: list[Process]) -> None:
    await until(lambda: all(process.notices for process in processes), "the notice in every process")


async def ended(api: LoggingApi, phase: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    def over() -> bool:
        meanwhile()
        return [body.get("status", {}).get("phase") for body in records(api)] == [phase]

    await until(over, f"one record that says {phase}, found {records(api)}")


async def saved_and_left(team: Team, processes: list[Process]) -> None:
    taint(team.api)
    await all_told(processes)
    for phase in (Phase.FROZEN, Phase.COMMITTED):
        await team.report(phase, NAME)
    await ended(team.api, "Committed")


async def called_off(team: Team, processes: list[Process]) -> None:
    taint(team.api, "node.kubernetes.io/not-ready", "NoExecute")
    await all_told(processes)
    # Of a notice that its only witness took to the grave, and whose signal went before the next one came, nobody knows
    # but the gang: it saves, and the record is made of what it reports.
    await until(lambda: records(team.api), "the record")
    team.api.add(kinds.NODES, objects.node("node-1"))
    # A replica that knows of it by the record alone waits for the signal first.
    await ended(team.api, "Retracted", lambda: team.clock.move(1))
    await until(lambda: all(process.retractions == {NAME} for process in processes), "the retraction in every process")


async def asked_for_and_joined(team: Team, processes: list[Process]) -> None:
    team.api.add(kinds.REQUESTS, objects.request(deadlineSeconds=300))
    await all_told(processes)
    taint(team.api)
    await until(
        lambda: all(body["spec"]["signal"].startswith("taint") for body in records(team.api)), "the taint to join"
    )
    for phase in (Phase.FROZEN, Phase.COMMITTED):
        await team.report(phase, NAME)
    await ended(team.api, "Committed")

    def answered() -> bool:
        (request,) = team.api.of(kinds.REQUESTS)
        return bool(request.get("status", {}).get("phase") == "Committed")

    await until(answered, "the request to say how it ended")


async def played(story: Story, fuses: list[Fuse]) -> None:
    """One run of a story, and what holds after every one."""
    clock = Clock()
    api = LoggingApi(clock)
    cluster(api)
    async with team(api, clock, fuses) as (operator, processes):
        await story(operator, processes)
    assert [body["metadata"]["name"] for body in records(api)] == [NAME]
    assert [process.notices for process in processes] == [{NAME}, {NAME}]
    ends = [item for item in records(api)[0]["status"]["conditions"] if item["type"] == "Ended"]
    assert len(ends) == 1
    assert records(api)[0]["status"]["acknowledgements"]["expected"] == 2
    reasons = [body["reason"] for body in api.of(kinds.EVENTS) if body["regarding"]["kind"] == "JobSet"]
    assert len(reasons) == len(set(reasons)), "an Event was posted twice"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("story", [saved_and_left, called_off, asked_for_and_joined])
async def test_a_replica_that_is_killed_after_any_step_changes_nothing(story: Story, replicas: int) -> None:
    whole = Fuse(None)
    await played(story, [whole, *(Fuse(None) for _ in range(replicas - 1))])
    assert whole.steps > 20
    for last in portion(range(whole.steps)):
        try:
            await played(story, [Fuse(last), *(Fuse(None) for _ in range(replicas - 1))])
        except AssertionError as error:
            raise AssertionError(f"killed after step {last} of {whole.steps}: {error}") from error
