"""Tokens of pods: which are accepted, and how many reviews the API server is asked for."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint.wire import names
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.channel.authentication import AuthenticationFailure, Authenticator, RequestRefused
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, Clock


@pytest.fixture
def gate() -> tuple[Authenticator, MemoryApi, ClusterCache, Clock]:
    clock = Clock()
    api, cache = MemoryApi(clock), ClusterCache(clock)
    cache.put(kinds.PODS, objects.pod(0), listed=True)
    api.bind_token("good", NAMESPACE, "uid-pod-0-0")
    return Authenticator(api, cache, clock), api, cache, clock


async def test_token_review_is_cached_but_the_pod_is_checked_each_time(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, cache, clock = gate
    for _ in range(3):
        assert (await checks.admit("Bearer good", "uid-pod-0-0")).name == "train-workers-0-0-0xyz"
    clock.move(14.5)
    await checks.admit("Bearer good", "uid-pod-0-0")
    assert len(api.calls) == 1
    clock.move(0.5)
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
    assert str(refusal.value) == "expected the header Authorization: Bearer <token>"


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
    clock.move(5)
    with pytest.raises(RequestRefused):
        await checks.admit("Bearer forged", "uid-pod-0-0")
    assert len(api.calls) == 2


USER = {
    "username": f"system:serviceaccount:{NAMESPACE}:default",
    "extra": {"authentication.kubernetes.io/pod-uid": ["uid-pod-0-0"]},
}
GOOD: client.JsonObject = {"authenticated": True, "audiences": [names.TOKEN_AUDIENCE], "user": USER}


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        pytest.param(GOOD | {"authenticated": False}, "bad_token", "it is expired", id="not authenticated"),
        pytest.param(GOOD | {"authenticated": False, "error": "who?"}, "bad_token", "good: who[?]", id="with an error"),
        pytest.param(GOOD | {"audiences": ["other"]}, "bad_token", "not for the audience", id="for somebody else"),
        pytest.param(GOOD | {"audiences": None}, "bad_token", "not for the audience", id="for nobody"),
        pytest.param(GOOD | {"user": None}, "not_a_pod", "not bound to a pod", id="of nobody"),
        pytest.param(
            GOOD | {"user": USER | {"username": None}}, "not_a_pod", "not bound to a pod", id="without a name"
        ),
        pytest.param(GOOD | {"user": USER | {"username": "jane"}}, "not_a_pod", "not bound to a pod", id="of a person"),
        pytest.param(GOOD | {"user": USER | {"extra": None}}, "not_a_pod", "not bound to a pod", id="without extras"),
        pytest.param(GOOD | {"user": USER | {"extra": {}}}, "not_a_pod", "not bound to a pod", id="without a pod"),
        pytest.param(
            GOOD | {"user": USER | {"extra": {"authentication.kubernetes.io/pod-uid": ["uid-pod-0-0", "other"]}}},
            "not_a_pod",
            "not bound to a pod",
            id="of two pods",
        ),
    ],
)
async def test_a_review_that_names_no_pod_is_a_refusal(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
    monkeypatch: pytest.MonkeyPatch,
    status: client.JsonObject,
    reason: str,
    said: str,
) -> None:
    checks, api, *_ = gate
    answers = [GOOD, status]

    async def review(token: str, audience: str) -> client.JsonObject:
        return answers.pop(0)

    monkeypatch.setattr(api, "review_token", review)
    assert (await checks.admit("Bearer one", "uid-pod-0-0")).uid == "uid-pod-0-0"
    with pytest.raises(RequestRefused, match=said) as refusal:
        await checks.admit("Bearer another", "uid-pod-0-0")
    assert refusal.value.reason == reason
    assert refusal.value.status == (401 if reason == "bad_token" else 403)


async def test_token_of_another_pod_or_namespace_is_refused(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, *_ = gate
    api.bind_token("other pod", NAMESPACE, "uid-pod-1-0")
    api.bind_token("other namespace", "team-b", "uid-pod-0-0")
    for token, reason in (("other pod", "other_pod"), ("other namespace", "unknown_pod")):
        with pytest.raises(RequestRefused) as refusal:
            await checks.admit(f"Bearer {token}", "uid-pod-0-0")
        assert (refusal.value.status, refusal.value.reason) == (403, reason)


async def test_token_that_cannot_be_reviewed_now_is_asked_again(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, *_ = gate
    api.failing = [client.Unavailable("no")]
    with pytest.raises(RequestRefused, match="try again") as refusal:
        await checks.admit("Bearer good", "uid-pod-0-0")
    assert (refusal.value.status, refusal.value.reason) == (503, AuthenticationFailure.NOT_READY)
    assert (await checks.admit("bearer  good", "uid-pod-0-0")).uid == "uid-pod-0-0"


async def test_so_many_tokens_are_remembered_and_no_more(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    _, api, cache, clock = gate
    checks = Authenticator(api, cache, clock, remember_at_most=3)

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


async def test_a_token_of_absurd_length_is_not_reviewed(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock],
) -> None:
    checks, api, *_ = gate
    with pytest.raises(RequestRefused, match="found 5000 characters"):
        await checks.admit("Bearer " + "x" * 5000, "uid-pod-0-0")
    assert api.calls == []
    with pytest.raises(RequestRefused, match="invalid bearer token"):
        await checks.admit("Bearer " + "x" * 4096, "uid-pod-0-0")


async def test_token_reviews_are_limited_per_pod_and_in_total(
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


async def test_a_review_waits_while_an_eviction_reads(
    gate: tuple[Authenticator, MemoryApi, ClusterCache, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, api, *_ = gate
    over = asyncio.Event()
    monkeypatch.setattr(api, "let_urgent_first", over.wait)
    admitted = asyncio.create_task(checks.admit("Bearer good", "uid-pod-0-0"))
    await asyncio.sleep(0.01)
    assert api.calls == []
    over.set()
    assert (await admitted).uid == "uid-pod-0-0"
    assert len(api.calls) == 1
