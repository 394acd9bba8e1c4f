"""Which policy and which limits apply where several are there."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint_operator.cache.resource_stores import PolicyStore
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy
from tests.unit.operator.fakes import objects

GOLD = {"matchLabels": {"tier": "gold"}}
KEY = ("team-a", "careful")


@pytest.fixture
def store() -> PolicyStore:
    """With two namespaces: team-a, which is gold, and team-b."""
    made = PolicyStore(600)
    made.put_labels("team-a", {"tier": "gold"})
    made.put_labels("team-b", {})
    return made


def of_cluster(name: str, selector: Any = None, default: Any = None, **limits: Any) -> ClusterCheckpointPolicy:
    return ClusterCheckpointPolicy.of(objects.cluster_policy(name, selector, default, **limits))


def of_user(namespace: str = "team-a", **spec: Any) -> CheckpointPolicy:
    body = objects.policy(**spec)
    body["metadata"]["namespace"] = namespace
    return CheckpointPolicy.of(body)


def mode(store: PolicyStore, namespace: str = "team-a") -> str | None:
    found = store.get((namespace, "careful"))
    return None if found is None else str(found.spec.mode)


def test_the_namespaces_own_policy_comes_before_the_clusters_of_the_same_name(store: PolicyStore) -> None:
    store.put_cluster(of_cluster("careful", default={"mode": "Observe"}))
    assert mode(store) == mode(store, "team-b") == "Observe"
    store.put(KEY, of_user(mode="Drill"))
    assert (mode(store), mode(store, "team-b")) == ("Drill", "Observe")
    store.drop(KEY)
    assert mode(store) == "Observe"


def test_a_policy_of_a_user_that_cannot_be_read_is_not_replaced_by_the_clusters(store: PolicyStore) -> None:
    store.put_cluster(of_cluster("careful", default={"mode": "Observe"}))
    store.put_unreadable(KEY)
    assert mode(store) is None
    assert store.original(KEY) is None


def test_a_default_is_for_the_namespaces_that_it_selects(store: PolicyStore) -> None:
    store.put_cluster(of_cluster("careful", GOLD, default={}))
    assert (mode(store), mode(store, "team-b")) == ("Enforce", None)
    store.put_labels("team-b", {"tier": "gold"})
    assert mode(store, "team-b") == "Enforce"
    store.put_labels("team-a", {})
    assert mode(store) is None


def test_the_copy_of_a_default_applies_as_the_default_is_now(store: PolicyStore) -> None:
    """Whoever changes the copy changes nothing, and an edit of the default does not wait for its copies."""
    first = of_cluster("careful", default={"mode": "Observe"})
    store.put_cluster(first)
    copied = first.as_policy("team-a")
    assert copied is not None
    body = first.copy_for("team-a")
    body["spec"]["mode"] = "Drill"
    store.put(KEY, CheckpointPolicy.of({**body, "status": {"observedGeneration": 7}}))
    assert mode(store) == "Observe"
    store.put_cluster(of_cluster("careful", default={}))
    assert mode(store) == "Enforce"
    found = store.get(KEY)
    assert found is not None
    assert found.status.observed_generation == 7
    store.drop_cluster("careful")
    assert mode(store) == "Drill", "until the garbage collector takes the copy away"


def test_a_copy_whose_default_was_withdrawn_says_what_was_found(store: PolicyStore) -> None:
    first = of_cluster("careful", default={})
    copied, own = first.as_policy("team-b"), of_user("team-b")
    assert copied is not None
    found = []
    for now in (first, of_cluster("careful"), of_cluster("careful", GOLD, default={})):
        store.put_cluster(now)
        found.append(store.why_withdrawn(copied))
        assert store.why_withdrawn(own) is None, "a user wrote it"
    store.drop_cluster("careful")
    found.append(store.why_withdrawn(copied))
    assert [why and why.partition(",")[0] for why in found] == [
        None,
        "found no spec.default in the ClusterCheckpointPolicy careful",
        "found a spec.namespaceSelector of the ClusterCheckpointPolicy careful that is not for this namespace",
        "found no ClusterCheckpointPolicy careful",
    ]


def test_what_has_changed_is_logged_once_and_only_where_it_matters(store: PolicyStore) -> None:
    other = ("team-b", "careful")

    def changed() -> list[bool]:
        told = store.take_changed()
        return [told(key) for key in (KEY, other)]

    assert changed() == [True, True], "both namespaces are new"
    store.put(KEY, of_user(mode="Drill"))
    assert changed() == [True, False]
    store.put(KEY, of_user(mode="Drill"))
    assert changed() == [False, False], "the same again"
    store.put_labels("team-b", {"tier": "gold"})
    assert changed() == [False, True]
    store.put_cluster(of_cluster("chart", longestHoldSeconds=0))
    assert changed() == [True, True]
    store.put_cluster(of_cluster("chart", longestHoldSeconds=0))
    assert changed() == [False, False]
    store.drop_cluster("chart")
    assert changed() == [True, True]


def test_of_several_limits_the_strictest_holds(store: PolicyStore) -> None:
    store.put(KEY, of_user(evictionHold={"boundSeconds": 3600}))
    store.put(("team-b", "careful"), of_user("team-b", evictionHold={"boundSeconds": 3600}))

    def bound_s(namespace: str) -> int:
        found = store.get((namespace, "careful"))
        assert found is not None
        return found.spec.eviction_hold.bound_seconds if found.spec.eviction_hold.enabled else 0

    assert (bound_s("team-a"), bound_s("team-b")) == (600, 600)
    assert store.hold_limit("team-a").set_by == "the chart's evictions.longestHoldSeconds"
    store.put_cluster(of_cluster("gold", GOLD, longestHoldSeconds=120))
    store.put_cluster(of_cluster("more", longestHoldSeconds=900))
    assert (bound_s("team-a"), bound_s("team-b")) == (120, 600)
    assert "ClusterCheckpointPolicy gold" in store.hold_limit("team-a").set_by
    store.put_cluster(of_cluster("incident", longestHoldSeconds=0))
    assert (bound_s("team-a"), bound_s("team-b")) == (0, 0)
    store.drop_cluster("incident")
    assert (bound_s("team-a"), bound_s("team-b")) == (120, 600)


def test_a_namespace_that_is_not_known_yet_is_selected_by_its_name_and_by_all(store: PolicyStore) -> None:
    store.put_cluster(of_cluster("incident", longestHoldSeconds=0))
    assert store.hold_limit("new").seconds == 0
    store.put_cluster(
        of_cluster("incident", {"matchLabels": {"kubernetes.io/metadata.name": "new"}}, longestHoldSeconds=0)
    )
    assert (store.hold_limit("new").seconds, store.hold_limit("team-a").seconds) == (0, 600)


def test_only_what_changes_something_counts_as_a_change(store: PolicyStore) -> None:
    assert store.put_cluster(of_cluster("gold", GOLD))
    assert not store.put_cluster(of_cluster("gold", GOLD))
    assert store.put_cluster(of_cluster("gold", GOLD, longestHoldSeconds=5))
    assert not store.put_labels("team-a", {"tier": "gold"})
