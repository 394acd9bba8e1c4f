"""The small parts: the scribe, the subscribers, tokens' reviews, the façade's errors."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime

import pytest
from kubernetes.client.exceptions import ApiException

from gracepoint.wire.messages import Ping
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.channel import authentication
from gracepoint_operator.channel.authentication import AuthenticationFailure, Authenticator, RequestRefused
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber, Subscribers
from gracepoint_operator.decisions import policy_status
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.model.preemption import PreemptionRecord, epoch_name
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.recording.acknowledgements import Acknowledgements
from gracepoint_operator.workloads import read_pod
from gracepoint_operator.workloads.jobset import JOBSETS
from tests.unit.operator import objects
from tests.unit.operator.api import MemoryApi
from tests.unit.operator.objects import NAMESPACE, NOW, Clock
from tests.unit.operator.replica import subscription, until
from tests.unit.operator.scene import Scene

SECOND = datetime.timedelta(seconds=1)

KEY = ("team-a", "one")


async def test_many_touches_become_few_writes_and_the_last_is_never_lost() -> None:
    state, written = 0, []

    async def write(key: Key) -> None:
        await asyncio.sleep(0)
        written.append(state)

    scribe = WriteQueue("test", write, Metrics(), interval_s=0.01)
    for state in range(100):
        scribe.touch(KEY)
        if state % 40 == 0:
            await asyncio.sleep(0.02)
    await scribe.close(5)
    assert written[-1] == 99
    assert len(written) < 10


async def test_a_write_that_finds_the_api_busy_is_tried_again_and_a_refused_one_is_counted() -> None:
    errors: list[client.KubeError] = [
        client.Unavailable("busy"),
        client.Conflict("newer"),
        client.Refused("bad"),
    ]
    metrics = Metrics()

    async def write(key: Key) -> None:
        if errors:
            raise errors.pop(0)

    scribe = WriteQueue("test", write, metrics, interval_s=0.01)
    scribe.touch(KEY)
    await until(lambda: not errors, "three attempts")
    await scribe.close(5)
    assert b"gracepoint_status_write_failures_total 1.0" in metrics.text()


async def test_a_refused_write_is_tried_again_until_it_is_taken_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    refusals: list[str | None] = []

    async def write(key: Key) -> None:
        if len(refusals) < 4:
            raise client.Refused("the quota is used up")

    scribe = WriteQueue("test", write, Metrics(), 0.005, lambda key, why: refusals.append(why))
    scribe.touch(KEY)
    await until(lambda: refusals[-1:] == [None], "the write to be taken")
    await scribe.close(5)
    assert refusals == ["the quota is used up"] * 4 + [None]
    assert len([record for record in caplog.records if "refuses" in record.message]) == 1


async def test_a_refused_write_does_not_hold_up_the_end() -> None:
    async def write(key: Key) -> None:
        raise client.Refused("the quota is used up")

    scribe = WriteQueue("test", write, Metrics(), interval_s=60)
    scribe.touch(KEY)
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await scribe.close(60)
    assert scribe._tasks == {}


async def test_a_key_that_cannot_be_written_does_not_hold_up_another() -> None:
    written: list[Key] = []

    async def write(key: Key) -> None:
        if key == KEY:
            raise client.Unavailable("busy")
        written.append(key)

    scribe = WriteQueue("test", write, Metrics(), interval_s=0.01)
    scribe.touch(KEY)
    scribe.touch(("team-a", "two"))
    await until(lambda: written, "the other key")
    await scribe.close(0.01)


async def test_a_subscriber_that_takes_nothing_is_cut_off_and_not_waited_for() -> None:
    subscriber = Subscriber(subscription())
    for _ in range(100):
        subscriber.send(Outgoing(Ping, lambda: None))
    assert subscriber.closed
    assert await subscriber.next() is None


async def test_a_newer_session_stops_the_older_one_of_the_same_pod_only() -> None:
    subscribers = Subscribers()
    old, other = subscribers.add(subscription(0, "s-1")), subscribers.add(subscription(1, "s-1"))
    new = subscribers.add(subscription(0, "s-2"))
    assert (old.closed, other.closed, new.closed) == (True, False, False)
    subscribers.remove(old)  # its stream ends later than the new one began
    assert len(subscribers) == 2
    assert subscribers.is_stopped("uid-pod-0-0", "s-1")
    assert not subscribers.speaks_for("uid-pod-0-0", "s-1")
    assert subscribers.speaks_for("uid-pod-0-0", "s-2")
    assert subscribers.speaks_for("uid-pod-9-0", "of the twin")


@pytest.fixture
def gate() -> tuple[Authenticator, MemoryApi, ClusterCache, Clock]:
    clock = Clock()
    api, cache = MemoryApi(clock), ClusterCache(clock)
    cache.put(kinds.PODS, objects.pod(0), listed=True)
    api.bind_token("good", NAMESPACE, "uid-pod-0-0")
    return Authenticator(api, cache, clock), api, cache, clock


async def test_a_review_is_remembered_for_seconds_but_the_pod_is_looked_at_each_time(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, cache, clock = gate
    for _ in range(3):
        assert (await checks.admit("Bearer good", "uid-pod-0-0")).name == "train-workers-0-0-0xyz"
    assert len(api.calls) == 1
    clock.move(60)
    await checks.admit("Bearer good", "uid-pod-0-0")
    assert len(api.calls) == 2
    cache.drop("uid-pod-0-0")
    with pytest.raises(RequestRefused) as refusal:
        await checks.admit("Bearer good", "uid-pod-0-0")
    assert refusal.value.reason is AuthenticationFailure.UNKNOWN_POD


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic Z29vZA=="])
async def test_a_header_without_a_bearer_token_is_refused_unasked(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock], header: str
) -> None:
    checks, api, *_ = gate
    with pytest.raises(RequestRefused) as refusal:
        await checks.admit(header, "uid-pod-0-0")
    assert (refusal.value.status, refusal.value.reason, api.calls) == (401, AuthenticationFailure.NO_TOKEN, [])


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (404, client.NotFound),
        (409, client.Conflict),
        (403, client.Refused),
        (422, client.Refused),
        (429, client.Unavailable),
        (500, client.Unavailable),
        (0, client.Unavailable),
    ],
)
def test_errors_of_the_client_leave_the_border_as_ours_with_the_servers_words(
    status: int, expected: type[client.KubeError]
) -> None:
    error = ApiException(status=status, reason="Because")
    error.body = '{"kind": "Status", "message": "pods are not there"}'
    translated = client._of_status("GET /api/v1/pods", error)
    assert type(translated) is expected
    assert "GET /api/v1/pods" in str(translated)
    assert "pods are not there" in str(translated)


@pytest.mark.parametrize(
    ("jobset", "expected"),
    [
        ("train", "train-0b6f1c9e-3"),
        ("a" * 63, "a" * 40 + "-0b6f1c9e-3"),
        ("a" * 39 + "-b", "a" * 39 + "-0b6f1c9e-3"),
    ],
    ids=["short", "trimmed", "trimmed at a hyphen"],
)
def test_an_epochs_name_is_made_of_jobset_uid_and_number(jobset: str, expected: str) -> None:
    assert epoch_name(jobset, objects.JOBSET_UID, 3) == expected


def test_a_twin_that_saw_the_signal_a_moment_earlier_changes_only_what_may_move() -> None:
    scene = Scene()
    theirs = scene.recorded()
    earlier = {"observed_at": theirs.spec.observed_at - SECOND, "deadline": theirs.spec.deadline - SECOND}
    ours = dataclasses.replace(theirs, spec=theirs.spec.model_copy(update=earlier))

    joined = ours.joined(theirs)

    assert joined.spec.deadline == ours.spec.deadline
    assert joined.spec.observed_at == theirs.spec.observed_at  # the API server refuses any other


async def test_a_caller_that_names_no_living_pod_costs_the_api_server_nothing(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, *_ = gate
    with pytest.raises(RequestRefused) as refusal:
        await checks.admit("Bearer anything", "uid-nobody")
    assert (refusal.value.reason, api.calls) == (AuthenticationFailure.UNKNOWN_POD, [])


async def test_a_bad_token_is_remembered_for_seconds(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, _, clock = gate
    for _attempt in range(3):
        with pytest.raises(RequestRefused, match="invalid bearer token"):
            await checks.admit("Bearer forged", "uid-pod-0-0")
    assert len(api.calls) == 1
    clock.move(10)
    with pytest.raises(RequestRefused):
        await checks.admit("Bearer forged", "uid-pod-0-0")
    assert len(api.calls) == 2


async def test_so_many_tokens_are_remembered_and_no_more(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "_REMEMBER_AT_MOST", 3)
    checks, api, *_ = gate

    async def reviews(*tokens: str) -> int:
        before = len(api.calls)
        for token in tokens:
            with pytest.raises(RequestRefused):
                await checks.admit(f"Bearer {token}", "uid-pod-0-0")
        return len(api.calls) - before

    assert await reviews("a", "b", "c") == 3
    assert await reviews("a", "b", "c") == 0
    assert await reviews("d") == 1
    assert await reviews("a") == 1, "which was forgotten"
    assert len(checks._reviewed) <= 3


async def test_a_token_of_absurd_length_is_not_reviewed(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, *_ = gate
    with pytest.raises(RequestRefused, match="found 5000 characters"):
        await checks.admit("Bearer " + "x" * 5000, "uid-pod-0-0")
    assert api.calls == []


async def test_one_pods_name_gets_one_review_at_a_time_and_all_together_a_few(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, api, cache, _ = gate
    for index in range(1, 20):
        cache.put(kinds.PODS, objects.pod(index), listed=True)
    under_way: list[str] = []
    go_on = asyncio.Event()

    async def review(token: str, audience: str) -> client.JsonObject:
        under_way.append(token)
        await go_on.wait()
        return {"error": "bad"}

    monkeypatch.setattr(api, "review_token", review)
    calls = [asyncio.create_task(checks.admit(f"Bearer {i}", "uid-pod-0-0")) for i in range(20)]
    await asyncio.sleep(0.01)
    assert len(under_way) == 1
    calls += [asyncio.create_task(checks.admit(f"Bearer p{i}", f"uid-pod-{i}-0")) for i in range(1, 20)]
    await asyncio.sleep(0.01)
    assert len(under_way) == 4
    go_on.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, RequestRefused) for outcome in outcomes)


async def test_a_pod_that_labels_itself_with_another_namespaces_jobset_is_refused(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, cache, _ = gate
    cache.put(JOBSETS, objects.jobset(), listed=True)
    foreign = objects.pod(8)
    foreign["metadata"]["namespace"] = "team-b"
    cache.put(kinds.PODS, foreign, listed=True)
    api.bind_token("foreign", "team-b", "uid-pod-8-0")
    with pytest.raises(RequestRefused, match="namespace of the JobSet") as refusal:
        await checks.admit("Bearer foreign", "uid-pod-8-0")
    assert refusal.value.status == 403


async def test_a_latency_is_observed_once_however_often_a_pod_reconnects() -> None:
    receipts, pod = Acknowledgements(), read_pod(objects.pod())
    assert [receipts.told(KEY, pod, at) for at in (1.0, 9.0)] == [True, False]
    assert [receipts.acknowledged(KEY, pod, at) for at in (2.0, 9.0)] == [True, False]
    assert receipts.told_at(KEY, pod.uid) == 1.0
    assert receipts.first_acknowledged_at(KEY) == 2.0


def test_the_last_save_of_a_policy_may_be_a_snapshot_that_was_promoted() -> None:
    epochs = []
    for number, (phase, step) in enumerate([("Committed", 40), ("Promoted", 70), ("Failed", 90)], start=1):
        body = objects.preemption(number, phase=phase, ended_at=NOW + number)
        body["status"]["step"] = step
        epochs.append(PreemptionRecord.of(body))
    saved = policy_status.last_save(epochs, None)
    assert saved is not None
    assert (saved.step, saved.preemption) == (70, epochs[1].name)
    assert policy_status.last_save(epochs[:1], saved) == saved, "also when its record was deleted"
    assert policy_status.last_save(epochs, policy_status.last_save(epochs[:1], None)) == saved
