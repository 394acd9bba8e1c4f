"""The size that a workload has now: who counts, and how it is read for many pods at once."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint.wire.names import Env
from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks import ContractViolation, Patched, release_contract
from gracepoint_operator.webhooks.updates import (
    MemberPlace,
    SharedReads,
    changed_sizes,
    is_elastic,
    keep_fields,
    of_workload,
    resized_pod,
    shown,
)
from tests.unit.operator.fakes.samples import (
    Json,
    environment,
    injected,
    job_of,
    jobset,
    pod_of,
    policy,
    policy_spec,
    replicated_job,
)

ELASTIC = policy_spec(training={"minProcesses": 2, "replicatedJobs": ["a", "b"]})


def gang() -> Json:
    body = jobset(replicated_job("a", 2, 3), replicated_job("other", 1, 9), replicated_job("b", 4, 1))
    return injected(body, ELASTIC)


def test_only_members_of_the_gang_count() -> None:
    made = gang()
    assert of_workload(made) == {"a": MemberPlace(10, 0, 3), "b": MemberPlace(10, 6, 1)}
    job_of(made, 0).update(parallelism=1, completions=1)
    assert of_workload(made) == {"a": MemberPlace(6, 0, 1), "b": MemberPlace(6, 2, 1)}


def test_a_job_by_itself_is_its_own_gang() -> None:
    assert of_workload({"kind": "Job", "spec": {"parallelism": 5}}) == {"": MemberPlace(5, 0, 5)}
    assert of_workload({"kind": "Job", "spec": {}}) == {"": MemberPlace(1, 0, 1)}


def test_a_pod_gets_its_place_and_nothing_else() -> None:
    made = gang()
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "b"}
    pod = {"metadata": {"labels": labels}, "spec": pod_of(made, 2)}
    assert is_elastic(pod)
    now = environment(resized_pod(pod, {"b": MemberPlace(7, 5, 2)})["spec"]["containers"][0])
    before = environment(pod["spec"]["containers"][0])
    changed = {Env.PROCESS_COUNT: "7", Env.PROCESS_OFFSET: "5", Env.PODS_PER_JOB: "2"}
    assert now == {**before, **changed}


def test_without_a_least_number_the_size_is_fixed() -> None:
    assert not is_elastic({"spec": pod_of(injected(jobset()))})


@pytest.mark.parametrize(("replicas", "fits"), [(1, False), (2, True)])
def test_a_gang_below_the_least_number_is_refused(replicas: int, fits: bool) -> None:
    result = release_contract(jobset(replicated_job("a", replicas, 3)), policy_spec(training={"minProcesses": 5}))
    assert isinstance(result, Patched) is fits
    if isinstance(result, ContractViolation):
        assert "found 3 processes in all, expected at least 5" in result.message


def resized(by: CheckpointPolicySpec, pods: int, *, filled_in: bool) -> tuple[Json, Json, list[str]]:
    """A JobSet with a gang ``a`` of four pods and a helper ``other`` of two, stored, then edited to ``pods`` each."""

    def manifest(of_gang: int, of_helper: int) -> Json:
        body = jobset(replicated_job("a", 1, of_gang), replicated_job("other", 1, of_helper))
        job_of(body, 1)["completions"] = 10
        if filled_in:
            del job_of(body)["completions"]
        return body

    body = manifest(4, 2)
    stored = shown(body, injected(body, by), policy(training={"replicatedJobs": ["a"]}))
    made, given_up = keep_fields(stored, manifest(pods, pods))
    return stored, made, given_up


@pytest.mark.parametrize("filled_in", [True, False], ids=["filled in", "in the manifest"])
def test_completions_follow_a_changed_parallelism(filled_in: bool) -> None:
    elastic = policy_spec(training={"minProcesses": 1, "replicatedJobs": ["a"]})
    stored, made, given_up = resized(elastic, 3, filled_in=filled_in)
    assert job_of(stored)["completions"] == 4
    assert (job_of(made)["parallelism"], job_of(made)["completions"]) == (3, 3)
    assert not [path for path in given_up if path.endswith("completions")]
    assert changed_sizes(stored, made) == []


def test_completions_of_a_job_outside_the_gang_stay() -> None:
    for fields in ({"minProcesses": 1}, {}):
        _, made, _ = resized(policy_spec(training={"replicatedJobs": ["a"], **fields}), 3, filled_in=True)
        assert (job_of(made, 1)["parallelism"], job_of(made, 1)["completions"]) == (3, 10)


def test_completions_of_a_gang_of_fixed_size_stay_with_a_warning() -> None:
    fixed = policy_spec(training={"replicatedJobs": ["a"]})
    stored, made, _ = resized(fixed, 2, filled_in=True)
    assert (job_of(made)["parallelism"], job_of(made)["completions"]) == (2, 4)
    (warning,) = changed_sizes(stored, made)
    assert warning.startswith("spec.replicatedJobs[a]: found another number of pods")
    assert changed_sizes(stored, stored) == []


async def test_pods_that_ask_at_once_share_a_read_that_began_after_them() -> None:
    size, reads, may_answer = 4, 0, asyncio.Event()

    async def read(key: str) -> int:
        nonlocal reads
        reads += 1
        found = size
        await may_answer.wait()
        return found

    shared = SharedReads(read, 60.0)
    early = [asyncio.create_task(shared.get("llm")) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert reads == 1
    size = 2  # while the first read is under way
    late = [asyncio.create_task(shared.get("llm")) for _ in range(100)]
    await asyncio.sleep(0)
    may_answer.set()
    assert set(await asyncio.gather(*early)) == {4}
    assert set(await asyncio.gather(*late)) == {2}
    assert reads == 2


async def test_a_read_that_fails_fails_for_those_who_waited_and_no_other() -> None:
    answers: list[int | Exception] = [RuntimeError("HTTP 503"), 3]

    async def read(key: str) -> int:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    shared = SharedReads(read, 60.0)
    with pytest.raises(RuntimeError, match="503"):
        await shared.get("llm")
    assert await shared.get("llm") == 3


async def test_read_after_a_read_that_hangs_has_its_own_bound() -> None:
    reads = 0

    async def read(key: str) -> int:
        nonlocal reads
        reads += 1
        if reads == 1:
            await asyncio.Event().wait()
        return reads

    shared = SharedReads(read, 0.2)
    first = asyncio.create_task(shared.get("llm"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await shared.get("llm") == 2
    with pytest.raises(TimeoutError):
        await first
