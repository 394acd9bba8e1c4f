"""Keeping pods off nodes that are going away."""

from __future__ import annotations

from typing import Any

from gracepoint_operator.admission import avoid_nodes

KEY = "requiredDuringSchedulingIgnoredDuringExecution"


def off(node: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": "NotIn", "values": [node]}


def terms(pod: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pod["spec"]["affinity"]["nodeAffinity"][KEY]["nodeSelectorTerms"]
    return found


def with_terms(*items: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"affinity": {"nodeAffinity": {KEY: {"nodeSelectorTerms": list(items)}}}}}


def test_without_disrupted_nodes_a_pod_stays_as_it_is() -> None:
    assert avoid_nodes({"spec": {}}, frozenset()) == {"spec": {}}


def test_a_pod_without_affinity_keeps_off_every_disrupted_node() -> None:
    assert terms(avoid_nodes({"spec": {}}, frozenset({"b", "a"}))) == [{"matchFields": [off("a"), off("b")]}]


def test_every_alternative_of_the_users_is_narrowed() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["z"]}
    tpu = {"key": "tpu", "operator": "Exists"}
    made = avoid_nodes(with_terms({"matchExpressions": [zone]}, {"matchExpressions": [tpu]}), frozenset({"a"}))
    assert terms(made) == [
        {"matchExpressions": [zone], "matchFields": [off("a")]},
        {"matchExpressions": [tpu], "matchFields": [off("a")]},
    ]


def test_an_empty_term_which_matches_no_node_is_not_made_to_match() -> None:
    assert terms(avoid_nodes(with_terms({}), frozenset({"a"}))) == [{}]


def test_preferences_and_pod_affinity_stay() -> None:
    pod = {"spec": {"affinity": {"podAffinity": {"x": 1}, "nodeAffinity": {"preferred": 2}}}}
    affinity = avoid_nodes(pod, frozenset({"a"}))["spec"]["affinity"]
    assert affinity["podAffinity"] == {"x": 1}
    assert affinity["nodeAffinity"]["preferred"] == 2


def test_a_second_call_adds_only_what_is_new() -> None:
    once = avoid_nodes({"spec": {}}, frozenset({"a"}))
    assert avoid_nodes(once, frozenset({"a"})) == once
    assert terms(avoid_nodes(once, frozenset({"a", "b"}))) == [{"matchFields": [off("a"), off("b")]}]
