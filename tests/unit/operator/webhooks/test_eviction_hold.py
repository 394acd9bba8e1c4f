"""Evictions of a gang's pods: the first attempt is a signal, and all wait while the gang saves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracepoint.wire import names
from gracepoint.wire.frames import Notice
from gracepoint.wire.messages import Phase
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model import evictions
from gracepoint_operator.model.evictions import Hold
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.resources import SignalKind
from gracepoint_operator.webhooks import admission
from gracepoint_operator.webhooks.admission import EvictionHold
from gracepoint_operator.workloads import JOBSETS, read_pod
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, NOW, Body, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, frames, running, until

POD = "train-workers-0-0-0xyz"
BOUND_S = 60.0  # as the policy has it by itself


async def evict(replica: Replica, name: str = POD, uid: str | None = None) -> Hold | None:
    return await replica.core.evictions.attempted(NAMESPACE, name, uid)


def budget(allowed: int, *, name: str = "mine", selector: Body | None = None, current: bool = True) -> Body:
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "generation": 2},
        "spec": {"selector": {} if selector is None else selector},
        "status": {"disruptionsAllowed": allowed, "observedGeneration": 2 if current else 1},
    }


async def test_the_first_attempt_notifies_the_gang_and_waits(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscribers = [replica.subscribe(0), replica.subscribe(1)]
        held = await evict(replica)
        assert held is not None
        assert held.until_at == NOW + BOUND_S
        assert "Gracepoint saves the JobSet train" in held.message
        for subscriber in subscribers:
            (notice,) = await frames(subscriber)
            assert isinstance(notice, Notice)
            assert (notice.cause, notice.signal) == ("Drain", "eviction of the pod")
            assert notice.remaining_s == BOUND_S
        made = await replica.phase("Noticed")
        assert made["spec"]["evictionAttemptedAt"] == made["spec"]["observedAt"]
        assert made["spec"]["cancelable"] is False
        assert made["spec"]["pods"] == [POD]


async def test_an_attempt_waits_though_its_preemption_is_not_written_yet(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        api.calls.clear()
        assert await evict(replica) is not None
        name = f"train-{objects.JOBSET_UID[:8]}-1"
        assert api.calls[:1] == [f"GET {kinds.PREEMPTIONS.path(NAMESPACE, name)}"], "the pod is known"
        assert not any(kinds.PODS.path(NAMESPACE, POD) in call for call in api.calls)


async def test_it_waits_until_the_commit(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await evict(replica)
        clock.move(5)
        await replica.report(Phase.WRITTEN)
        assert await evict(replica) is not None
        await replica.report(Phase.COMMITTED)
        assert await evict(replica) is None
        await replica.phase("Committed")
        assert await evict(replica) is None, "the gang is leaving, which is no new disruption"
        assert len(replica.preemptions) == 1


async def test_the_bound_lets_it_through_without_a_word_of_the_gang(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await evict(replica)
        clock.move(BOUND_S - 1)
        assert await evict(replica) is not None
        clock.move(1)
        assert await evict(replica) is None
        clock.move(60)
        await replica.phase("Expired")
        assert await evict(replica) is None, "it was held once"
        assert await evict(replica) is None
        text = replica.metrics.text().decode()
        assert 'gracepoint_evictions_answered_total{answer="wait"} 2.0' in text
        assert 'gracepoint_evictions_answered_total{answer="go"} 3.0' in text
        assert len(replica.preemptions) == 1


async def test_the_bound_is_the_policys(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, evictionHold={"boundSeconds": 5})
    async with running(api, clock) as replica:
        held = await evict(replica)
        assert held is not None
        assert held.until_at == NOW + 5


async def test_all_replicas_count_from_the_first_attempt(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as first, running(api, clock, "replica-b") as second:
        held = await evict(first)
        await first.phase("Noticed")
        clock.move(20)
        again = await evict(second)  # its watch has not brought the Preemption
        assert again is not None
        assert held is not None
        assert again.until_at == held.until_at
        clock.move(BOUND_S - 20)
        assert await evict(second) is None
        assert await evict(first) is None
        assert len(first.preemptions) == 1


async def test_every_later_preemption_that_the_twin_began_is_looked_up_too(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as first, running(api, clock, "replica-b") as second:
        await evict(first)
        clock.move(100)
        await first.phase("Expired")
        for number in (1, 2):
            for body in first.preemptions:  # this much the watch brings, and no more
                second.core.feed(kinds.PREEMPTIONS, "MODIFIED", body)
            clock.move(400)
            await evict(first)
            made = await first.phase("Noticed", epoch=number)
            clock.move(20)
            await evict(second)
            known = second.core.cache.preemptions.records[NAMESPACE, made["metadata"]["name"]]
            assert objects.stamp(known.spec.observed_at.timestamp()) == made["spec"]["observedAt"]
            assert len(first.preemptions) == number + 1
            clock.move(100)
            await first.phase("Expired", epoch=number)


async def test_an_evictor_that_comes_back_after_minutes_is_held_once_in_a_life(api: MemoryApi, clock: Clock) -> None:
    """As the descheduler does: each attempt begins another preemption, and none of them another wait."""
    async with running(api, clock) as replica:
        assert await evict(replica) is not None
        for number in range(1, 4):
            clock.move(100)
            await replica.phase("Expired", epoch=number - 1)
            clock.move(400)
            assert await evict(replica) is None
            spec = (await replica.phase("Noticed", epoch=number))["spec"]
            assert spec["deadline"] == objects.stamp(clock() + objects.pod()["spec"]["terminationGracePeriodSeconds"])


async def test_a_drain_after_a_quiet_hour_is_held_whatever_became_of_the_one_before(
    api: MemoryApi, clock: Clock
) -> None:
    """Somebody has ended a drain by Ctrl-C. That must not take the hold from all that come in the gang's life."""
    async with running(api, clock) as replica:
        assert await evict(replica) is not None
        clock.move(100)
        await replica.phase("Expired")
        clock.move(evictions.QUIET_S - 1)
        assert await evict(replica) is None, "that is no quiet hour"
        await replica.phase("Noticed", epoch=1)
        clock.move(100)
        await replica.phase("Expired", epoch=1)
        clock.move(evictions.QUIET_S + 60)
        held = await evict(replica)
        assert held is not None
        assert held.until_at == clock() + BOUND_S
        clock.move(BOUND_S)
        assert await evict(replica) is None


async def test_a_gang_that_never_attached_is_held_for_a_minute_at_most(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, evictionHold={"boundSeconds": 600})
    async with running(api, clock) as replica:
        held = await evict(replica)
        assert held is not None
        assert held.until_at == NOW + 60
        clock.move(59)
        assert await evict(replica) is not None
        await replica.report(Phase.FROZEN)  # it has attached, and saves
        held = await evict(replica)
        assert held is not None
        assert held.until_at == NOW + 600


async def test_no_policy_holds_longer_than_the_administrator_allows(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, evictionHold={"boundSeconds": 3600})
    async with running(api, clock) as replica:
        await evict(replica)
        await replica.report(Phase.FROZEN)
        held = await evict(replica)
        assert held is not None
        assert held.until_at == NOW + 600

        def ready() -> Body:
            conditions = api.of(kinds.POLICIES)[0].get("status", {}).get("conditions", [])
            return next((item for item in conditions if item["type"] == "Ready"), {})

        await until(lambda: ready().get("reason") == "HoldShortened", "the policy to say so")
        assert (
            "boundSeconds 3600, but evictions are held for 600 s at most (the chart's evictions.longestHoldSeconds)"
            in ready()["message"]
        )


async def test_an_administrators_label_lets_evictions_from_a_node_through(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0)
        replica.see(kinds.NODES, objects.node("node-1", labels={"gracepoint.dev/eviction-hold": "off"}))
        assert await evict(replica) is None
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice), "the gang is told all the same"
        assert await evict(replica, "train-workers-0-1-0xyz") is not None, "on another node"


async def test_limits_are_shown_at_once_where_nothing_runs_and_the_charts_own_stays(clock: Clock) -> None:
    """A ClusterCheckpointPolicy may have any name."""
    api = MemoryApi(clock)
    api.add(kinds.POLICIES, objects.policy())
    api.add(kinds.NAMESPACES, objects.namespace())
    gold = {"matchLabels": {"tier": "gold"}}
    async with running(api, clock) as replica:
        own = 'gracepoint_longest_hold_seconds{set_by="evictions.longestHoldSeconds"} 600.0'

        def shown() -> str:
            return replica.metrics.text().decode()

        def ready() -> str:
            conditions = api.of(kinds.POLICIES)[0].get("status", {}).get("conditions", [])
            return next((str(item["reason"]) for item in conditions if item["type"] == "Ready"), "")

        replica.see(kinds.CLUSTER_POLICIES, objects.cluster_policy("chart", gold, longestHoldSeconds=0))
        await until(lambda: 'gracepoint_longest_hold_seconds{set_by="chart"} 0.0' in shown(), "the limit to be shown")
        assert own in shown()
        replica.see(kinds.NAMESPACES, objects.namespace(tier="gold"))
        await until(lambda: ready() == "HoldsOff", "the policy to say that its namespace is selected now")
        replica.drop(kinds.CLUSTER_POLICIES, objects.cluster_policy("chart"))
        await until(lambda: 'set_by="chart"' not in shown(), "the limit to be gone")
        assert own in shown()


async def test_an_administrator_turns_all_holds_off_at_once_and_on_again(clock: Clock) -> None:
    """Also those that are held now. The gang saves all the same."""
    api = MemoryApi(clock)
    cluster(api, evictionHold={"boundSeconds": 300})
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0)
        store = replica.core.cache.policies
        assert await evict(replica) is not None
        replica.see(kinds.CLUSTER_POLICIES, objects.cluster_policy("incident", longestHoldSeconds=0))
        await until(lambda: store.hold_limit(NAMESPACE).seconds == 0, "the switch")
        assert await evict(replica) is None, "it was held a moment ago"
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert 'gracepoint_longest_hold_seconds{set_by="incident"} 0.0' in replica.metrics.text().decode()

        def ready() -> Body:
            conditions = api.of(kinds.POLICIES)[0].get("status", {}).get("conditions", [])
            return next((item for item in conditions if item["type"] == "Ready"), {})

        await until(lambda: ready().get("reason") == "HoldsOff", "the policy to say so")
        assert "longestHoldSeconds of the ClusterCheckpointPolicy incident is 0" in ready()["message"]
        replica.drop(kinds.CLUSTER_POLICIES, objects.cluster_policy("incident"))
        await until(lambda: store.hold_limit(NAMESPACE).seconds == 600, "the switch to be back")
        assert await evict(replica) is not None, "the same preemption, whose bound is not over"
        await until(lambda: ready().get("reason") == "Watching", "the policy to say so")
        assert "incident" not in replica.metrics.text().decode()


async def test_an_eviction_that_is_never_held_is_a_signal_nevertheless(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("incident", longestHoldSeconds=0))
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0)
        assert await evict(replica) is None
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert notice.cause == "Drain"


async def test_a_limit_for_other_namespaces_changes_nothing_here(api: MemoryApi, clock: Clock) -> None:
    selector = {"matchLabels": {"tier": "gold"}}
    api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("gold", selector, longestHoldSeconds=0))
    async with running(api, clock) as replica:
        assert await evict(replica) is not None
        replica.see(kinds.NAMESPACES, objects.namespace(tier="gold"))
        await until(lambda: replica.core.cache.policies.hold_limit(NAMESPACE).seconds == 0, "the label")
        assert await evict(replica) is None


async def test_attempts_at_both_replicas_at_once_are_one_preemption(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as first, running(api, clock, "replica-b") as second:
        answers = await asyncio.gather(evict(first), evict(second, "train-workers-0-1-0xyz"))
        assert None not in answers
        await first.phase("Noticed")
        assert len(first.preemptions) == 1


async def test_a_replica_that_is_new_continues_counting(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        held = await evict(replica)
        await replica.phase("Noticed")
    clock.move(10)
    async with running(api, clock, "replica-c") as replica:
        again = await evict(replica)
        assert again is not None
        assert held is not None
        assert again.until_at == held.until_at


async def test_an_attempt_during_another_disruption_joins_it(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        made = await replica.phase("Noticed")
        deadline = made["spec"]["deadline"]
        clock.move(3)
        held = await evict(replica)
        assert held is not None
        assert held.until_at == NOW + 3 + BOUND_S
        await until(
            lambda: replica.preemptions[0]["spec"].get("evictionAttemptedAt"),
            f"the attempt in the record, found {replica.preemptions}",
        )
        (made,) = replica.preemptions
        assert made["spec"]["deadline"] == deadline, "which is nearer than the bound"
        assert made["spec"]["signal"].startswith("taint ")


@pytest.mark.parametrize("seen", [True, False], ids=["seen by the watch", "not seen yet"])
async def test_the_taint_of_a_drained_node_shows_the_cause(api: MemoryApi, clock: Clock, seen: bool) -> None:
    async with running(api, clock) as replica:
        tainted = objects.node("node-1", taints=[objects.taint("karpenter.sh/disrupted")])
        drained = replica.api.add(kinds.NODES, tainted)
        if seen:
            replica.core.feed(kinds.NODES, "MODIFIED", drained)  # in the same turn of the loop as the attempt
        held = await evict(replica)
        assert held is not None
        assert held.until_at == NOW + BOUND_S
        made = await replica.phase("Noticed")
        assert made["spec"]["cause"] == "ScaleDown"
        assert made["spec"]["evictionAttemptedAt"]


async def test_a_budget_counts_if_the_node_cannot_be_read(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the rights of an older chart."""
    reads = api.get

    async def without_nodes(kind: kinds.Kind, namespace: str | None, name: str) -> Any:
        if kind is kinds.NODES:
            raise client.Refused("nodes is forbidden")
        return await reads(kind, namespace, name)

    no_budget_left(api)
    async with running(api, clock) as replica:
        monkeypatch.setattr(api, "get", without_nodes)
        assert await evict(replica) is None
        assert replica.preemptions == []
        api.remove(kinds.POD_DISRUPTION_BUDGETS, budget(0))
        assert await evict(replica) is not None


async def test_an_attempt_waits_once_for_the_api_server_and_not_for_one_answer_after_another(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOOK_WITHIN_S", 30.0)
    reads, lists, all_asked = api.get, api.list, asyncio.Event()
    unasked = {kinds.PREEMPTIONS, kinds.POD_DISRUPTION_BUDGETS, kinds.NODES}

    async def note(kind: kinds.Kind) -> None:
        """The answer about one of them does not come before all are asked for."""
        if kind in unasked:
            unasked.discard(kind)
            if not unasked:
                all_asked.set()
            await all_asked.wait()

    async def get(kind: kinds.Kind, namespace: str | None, name: str) -> Any:
        await note(kind)
        return await reads(kind, namespace, name)

    async def listed(kind: kinds.Kind, **options: Any) -> Any:
        await note(kind)
        return await lists(kind, **options)

    async with running(api, clock) as replica:
        api.add(kinds.NODES, objects.node("node-1", taints=[objects.taint("karpenter.sh/disrupted")]))
        monkeypatch.setattr(api, "get", get)
        monkeypatch.setattr(api, "list", listed)
        assert await evict(replica) is not None
        assert all_asked.is_set()
        assert (await replica.phase("Noticed"))["spec"]["cause"] == "ScaleDown"


async def test_what_the_answer_does_not_need_is_not_waited_for(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOOK_WITHIN_S", 600.0)
    reads, begun, ended, both_hang = api.get, [], [], asyncio.Event()

    async def hangs(kind: kinds.Kind) -> None:
        begun.append(kind)
        if len(begun) == 2:
            both_hang.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(kind)

    async def get(kind: kinds.Kind, namespace: str | None, name: str) -> Any:
        if kind is kinds.NODES:
            await hangs(kind)
        await both_hang.wait()
        return await reads(kind, namespace, name)

    async def listed(kind: kinds.Kind, **options: Any) -> Any:
        await hangs(kind)

    async with running(api, clock) as first, running(api, clock, "replica-b") as second:
        await evict(first)
        await first.phase("Noticed")
        monkeypatch.setattr(api, "get", get)
        monkeypatch.setattr(api, "list", listed)
        async with asyncio.timeout(60):
            assert await evict(second) is not None  # its watch has not brought the Preemption
        assert set(ended) == {kinds.POD_DISRUPTION_BUDGETS, kinds.NODES}


async def test_an_eviction_from_a_node_that_is_gone_is_held(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.api.remove(kinds.NODES, objects.node("node-1"))
        assert await evict(replica) is not None
        assert (await replica.phase("Noticed"))["spec"]["cause"] == "Drain"


async def test_an_eviction_brings_a_far_deadline_near_and_is_not_taken_back(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint(key="node.kubernetes.io/unreachable", effect="NoExecute")  # 300 s, may go away again
        await replica.phase("Noticed")
        await evict(replica)
        await until(
            lambda: replica.preemptions[0]["spec"]["signal"] == "eviction of the pod",
            f"the nearer deadline, found {replica.preemptions}",
        )
        assert replica.preemptions[0]["spec"]["cancelable"] is False
        replica.see(kinds.NODES, objects.node("node-1"))
        await until(lambda: not replica.core.cache.gang(objects.JOBSET_UID).marks.get("uid-pod-0-0"), "the taint to go")
        assert await evict(replica) is not None
        assert replica.preemptions[0]["status"]["phase"] == "Noticed"


async def test_an_attempt_after_an_end_without_leaving_is_a_new_disruption(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await evict(replica)
        clock.move(100)
        await replica.phase("Expired")
        clock.move(400)  # whoever drained has long given up
        assert await evict(replica) is None, "these pods have been held for as long as they may be"
        await replica.phase("Noticed", epoch=1)


def not_running(api: MemoryApi) -> None:
    api.add(kinds.PODS, objects.pod(0, phase="Pending"))


def ended(api: MemoryApi) -> None:
    api.add(kinds.PODS, objects.pod(0, phase="Failed"))


def deleted(api: MemoryApi) -> None:
    api.add(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
    api.add(JOBSETS, objects.jobset(deleted=True))


def unlabelled(api: MemoryApi) -> None:
    api.add(kinds.PODS, objects.pod(0, labelled=False))


def job_over(api: MemoryApi) -> None:
    api.add(kinds.JOBS, objects.job(condition="Complete"))


def jobset_deleted(api: MemoryApi) -> None:
    api.add(JOBSETS, objects.jobset(deleted=True))


def other_kinds_only(api: MemoryApi) -> None:
    api.add(kinds.POLICIES, objects.policy(signals=["NodeTaint"]))


def no_policy(api: MemoryApi) -> None:
    api.remove(kinds.POLICIES, objects.policy())


def no_budget_left(api: MemoryApi) -> None:
    api.add(kinds.POD_DISRUPTION_BUDGETS, budget(0))


def two_budgets(api: MemoryApi) -> None:
    api.add(kinds.POD_DISRUPTION_BUDGETS, budget(1))
    api.add(kinds.POD_DISRUPTION_BUDGETS, budget(1, name="another"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(not_running, id="pod not running yet"),
        pytest.param(ended, id="pod ended"),
        pytest.param(deleted, id="pod deleted"),
        pytest.param(unlabelled, id="pod of no gang"),
        pytest.param(job_over, id="Job over"),
        pytest.param(jobset_deleted, id="JobSet deleted"),
        pytest.param(other_kinds_only, id="policy without the kind"),
        pytest.param(no_policy, id="policy deleted"),
        pytest.param(no_budget_left, id="a budget forbids it"),
        pytest.param(two_budgets, id="two budgets, which Kubernetes cannot serve"),
    ],
)
async def test_what_needs_no_save_goes_through_and_notifies_nobody(change: Any, api: MemoryApi, clock: Clock) -> None:
    change(api)
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1)
        assert await evict(replica) is None
        assert await frames(subscriber) == []
        assert replica.preemptions == []


@pytest.mark.parametrize(
    "pdb",
    [
        pytest.param(budget(1), id="allows one"),
        pytest.param(budget(0, selector={"matchLabels": {"app": "other"}}), id="of other pods"),
    ],
)
async def test_a_budget_that_allows_it_is_no_reason_not_to_save(pdb: Body, api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.POD_DISRUPTION_BUDGETS, pdb)
    async with running(api, clock) as replica:
        assert await evict(replica) is not None


async def test_where_the_hold_is_off_it_is_a_signal_nevertheless(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, evictionHold={"enabled": False})
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1)
        assert await evict(replica) is None
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert notice.remaining_s == 30, "the pod's grace period"


async def test_in_mode_observe_it_is_recorded_and_nobody_waits(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, mode="Observe")
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1)
        assert await evict(replica) is None
        assert await frames(subscriber) == []
        made = await replica.phase("Noticed")
        assert made["spec"]["cause"] == "Drain"


async def test_in_mode_drill_it_goes_through_and_is_none(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, mode="Drill")
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1)
        assert await evict(replica) is None
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert (notice.mode, notice.remaining_s) == ("Enforce", 30), "no rehearsal: the pod goes"


async def test_eviction_of_a_recreated_pod_is_ignored(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        assert await evict(replica, uid="somebody-elses") is None
        assert replica.preemptions == []
        assert await evict(replica, uid="uid-pod-0-0") is not None


async def test_a_pod_outside_its_gang_is_let_go_after_one_look(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.PODS, objects.pod(0, labelled=False))
    async with running(api, clock) as replica:
        api.calls.clear()
        assert await evict(replica) is None
        assert api.calls == [f"GET {kinds.PODS.path(objects.NAMESPACE, 'train-workers-0-0-0xyz')}"], (
            "its name may be that of a new pod of the gang"
        )


async def test_a_pod_that_the_watches_have_not_brought_is_looked_up(api: MemoryApi, clock: Clock) -> None:
    api.remove(kinds.PODS, objects.pod(1))
    async with running(api, clock) as replica:
        api.add(kinds.PODS, {"metadata": {"name": "train-web", "namespace": NAMESPACE, "uid": "uid-web"}})
        assert await evict(replica, "train-web") is None
        assert replica.core.cache.place("uid-web") is None, "what is none of ours is not kept"
        assert await evict(replica, "train-gone") is None
        api.add(kinds.PODS, new := objects.pod(1))
        assert await evict(replica, new["metadata"]["name"]) is not None


async def test_uncached_pod_is_released_when_a_budget_refuses_eviction(api: MemoryApi, clock: Clock) -> None:
    api.remove(kinds.PODS, objects.pod(1))
    api.add(kinds.POD_DISRUPTION_BUDGETS, budget(0))
    async with running(api, clock) as replica:
        api.add(kinds.PODS, new := objects.pod(1))
        assert await evict(replica, new["metadata"]["name"]) is None
        assert replica.preemptions == []


@pytest.mark.parametrize("namespace", [NAMESPACE, "team-b"])
async def test_pod_with_a_name_of_no_jobset_is_answered_without_requests(
    namespace: str, api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock) as replica:
        api.calls.clear()
        name = "web-0" if namespace == NAMESPACE else "train-workers-0-5-xyz"
        assert await replica.core.evictions.attempted(namespace, name, None) is None
        assert api.calls == []


async def test_a_pod_that_is_not_ready_goes_where_its_budget_lets_it(api: MemoryApi, clock: Clock) -> None:
    strict = budget(0)
    strict["spec"]["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
    api.add(kinds.POD_DISRUPTION_BUDGETS, strict)
    unready = objects.pod(0)
    unready["status"]["conditions"] = [item for item in unready["status"]["conditions"] if item["type"] != "Ready"]
    async with running(api, clock) as replica:
        assert await evict(replica) is None
        assert replica.preemptions == [], "the API server refuses it"
        replica.see(kinds.PODS, unready)
        await until(lambda: not replica.core.cache.objects.pods["uid-pod-0-0"].ready, "the pod's condition")
        assert await evict(replica) is not None


async def test_unanswering_api_server_costs_bounded_time_and_no_hold(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOOK_WITHIN_S", 0.01)
    async with running(api, clock) as replica:

        async def silent(*args: object, **kwargs: object) -> Body:
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(api, "get", silent)
        held = await evict(replica)
        assert held is not None, "what the watches brought is enough to know that it is a gang's"
        assert await evict(replica, "train-unknown") is None
        clock.move(BOUND_S)
        assert await evict(replica) is None, "the bound needs no API server"


async def test_api_server_refusal_neither_holds_nor_fails_an_eviction(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        api.failing = [client.Unavailable("no")]
        assert await evict(replica, "train-unknown") is None
        api.failing = [client.Refused("forbidden")]
        assert await evict(replica) is not None


async def test_before_the_cluster_is_known_nothing_is_held(api: MemoryApi, clock: Clock) -> None:
    replica = Replica(api, clock, "replica-a")
    assert isinstance(replica.core.evictions, EvictionHold)
    assert await evict(replica) is None
    assert api.calls == []


async def test_a_replica_that_does_not_decide_yet_holds_nothing_whatever_it_knows(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.core.notifier.ready = False
        api.calls.clear()
        assert await evict(replica) is None
        assert (api.calls, replica.preemptions) == ([], [])


async def test_policy_edit_during_an_eviction_changes_nothing(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        assert await evict(replica) is not None
        await replica.phase("Noticed")
        replica.see(kinds.POLICIES, objects.policy(signals=["NodeTaint"]))

        def counts() -> bool:
            policy = replica.core.cache.policies.get((NAMESPACE, "careful"))
            return policy is None or policy.spec.counts(SignalKind.EVICTION)

        await until(lambda: not counts(), "the policy")
        assert await evict(replica) is not None
        clock.move(100)
        await replica.phase("Expired")
        clock.move(400)
        assert await evict(replica) is None, "it counts for the next disruption"


async def test_an_eviction_during_a_drill_is_a_separate_disruption(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.REQUESTS, objects.request("rehearse", mode="Drill"))
        await replica.phase_of(f"train-{objects.JOBSET_UID[:8]}-1", "Noticed")
        clock.move(1)
        api.add(kinds.POD_DISRUPTION_BUDGETS, forbids := budget(0))
        assert await evict(replica) is None, "the API server refuses it"
        assert len(replica.preemptions) == 1, "the drill"
        api.remove(kinds.POD_DISRUPTION_BUDGETS, forbids)
        assert await evict(replica) is not None
        await replica.phase_of(f"train-{objects.JOBSET_UID[:8]}-2", "Noticed")


async def test_where_evictions_are_no_signal_nobody_is_asked_about_them(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, signals=["NodeTaint"])
    async with running(api, clock) as replica:
        api.calls.clear()
        assert await evict(replica) is None
        assert api.calls == []


def epoch(
    *, attempted_at: float | None = NOW, created_at: float = NOW, phase: str = "Noticed", **spec: object
) -> PreemptionRecord:
    body = objects.preemption(phase=phase, created_at=created_at, ended_at=NOW if phase == "Committed" else None)
    if attempted_at is not None:
        body["spec"]["evictionAttemptedAt"] = objects.stamp(attempted_at)
    body["spec"] |= spec
    return PreemptionRecord.of(body)


def held(of: PreemptionRecord | None, now: float = NOW) -> bool:
    return evictions.hold([] if of is None else [of], the_pod(), None, now) is not None


def the_pod() -> Pod:
    return read_pod(objects.pod(0))


def test_whether_an_eviction_waits_follows_from_the_preemption_and_the_time_alone() -> None:
    observed = {"name": "careful", "spec": {"mode": "Observe"}}
    assert held(epoch())
    assert held(epoch(), NOW + BOUND_S - 0.1)
    assert not held(epoch(), NOW + BOUND_S)
    assert not held(None)
    assert not held(epoch(phase="Committed"))
    assert not held(epoch(attempted_at=None)), "without a first attempt there is nothing to count from"
    assert not held(epoch(created_at=NOW - 200)), "the pod is of the life after it"
    assert not held(epoch(mode="Observe"))
    assert not held(epoch(mode="Drill"))
    assert not held(epoch(policy=observed))


@pytest.mark.parametrize(("ours", "theirs"), [(NOW, NOW + 5), (NOW + 5, NOW), (NOW, None), (None, NOW)])
def test_two_replicas_knowledge_joins_to_the_earlier_attempt(ours: float | None, theirs: float | None) -> None:
    joined = epoch(attempted_at=ours).joined(epoch(attempted_at=theirs))
    assert joined.spec.eviction_attempted_at is not None
    assert joined.spec.eviction_attempted_at.timestamp() == NOW


def _helper(replica: Replica, *, backoff_limit: int) -> str:
    """A pod that does not train, and its Job. Returns its name."""
    job, pod = objects.job(completions=1), objects.pod(0, on="node-2")
    job["metadata"] |= {"name": "train-data-0", "uid": "uid-job-data"}
    job["spec"]["backoffLimit"] = backoff_limit
    pod["metadata"] |= {"name": "train-data-0-0-0abc", "uid": "uid-data"}
    pod["metadata"]["labels"] |= {
        names.LABEL_ROLE: names.ROLE_HELPER,
        names.JOBSET_LABEL_REPLICATED_JOB: "data",
        "batch.kubernetes.io/job-name": "train-data-0",
        "batch.kubernetes.io/controller-uid": "uid-job-data",
    }
    replica.see(kinds.JOBS, job)
    replica.see(kinds.PODS, pod)
    return str(pod["metadata"]["name"])


async def test_a_helper_without_which_the_gang_restarts_waits_for_the_save_too(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0)
        name = _helper(replica, backoff_limit=0)
        await asyncio.sleep(0)
        assert await evict(replica, name) is not None
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert notice.cause == "Drain"
        made = await replica.phase("Noticed")
        assert made["spec"]["pods"] == [name]
        assert made["status"]["acknowledgements"]["expected"] == 2
        await replica.report(Phase.COMMITTED)
        assert await evict(replica, name) is None


async def test_a_helper_that_its_job_replaces_goes_at_once(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        name = _helper(replica, backoff_limit=6)
        await asyncio.sleep(0)
        assert await evict(replica, name) is None
        assert replica.preemptions == []
