"""Keeping pods off nodes that are going away."""

from __future__ import annotations

from typing import Any

from gracepoint_operator.webhooks import avoid_nodes
from gracepoint_operator.webhooks.injection import MOST_NODES

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def off(*nodes: str) -> dict[str, Any]:
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return {"weight": 100, "preference": {"matchFields": fields}}


def node_affinity(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod["spec"]["affinity"]["nodeAffinity"]
    return found


def test_without_disrupted_nodes_a_pod_stays_as_it_is() -> None:
    assert avoid_nodes({"spec": {}}, frozenset()) == {"spec": {}}


def test_a_pod_prefers_every_other_node_to_the_disrupted_ones() -> None:
    assert node_affinity(avoid_nodes({"spec": {}}, frozenset({"b", "a"}))) == {PREFERRED: [off("a", "b")]}


def test_node_affinity_is_only_preferred() -> None:
    assert REQUIRED not in node_affinity(avoid_nodes({"spec": {}}, frozenset({"a"})))


def test_the_users_own_affinity_stays() -> None:
    mine = {"weight": 7, "preference": {"matchExpressions": [{"key": "tpu", "operator": "Exists"}]}}
    zone = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]}]}
    pod = {
        "spec": {"affinity": {"podAffinity": {"x": 1}, "nodeAffinity": {PREFERRED: [mine], REQUIRED: zone}}},
    }
    made = avoid_nodes(pod, frozenset({"a"}))
    assert made["spec"]["affinity"]["podAffinity"] == {"x": 1}
    assert node_affinity(made) == {PREFERRED: [mine, off("a")], REQUIRED: zone}
    assert node_affinity(pod)[PREFERRED] == [mine]  # the object that was given is not changed


def test_a_second_call_adds_only_what_is_new() -> None:
    once = avoid_nodes({"spec": {}}, frozenset({"a"}))
    assert avoid_nodes(once, frozenset({"a"})) == once
    assert node_affinity(avoid_nodes(once, frozenset({"a", "b"}))) == {PREFERRED: [off("a"), off("b")]}


def test_a_pod_never_carries_the_names_of_a_whole_cluster() -> None:
    made = avoid_nodes({"spec": {}}, frozenset(f"node-{number:04}" for number in range(5000)))
    (term,) = node_affinity(made)[PREFERRED]
    assert len(term["preference"]["matchFields"]) == MOST_NODES
