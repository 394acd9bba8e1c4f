"""Where the parts of a gang go: to servers that stay, in other failure domains, evenly, and few move at a change."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.wire.messages import SnapshotReport
from gracepoint_operator.decisions.snapshot_placement import (
    REASON_FEWER,
    REASON_LATE,
    REASON_NO_SERVERS,
    Usable,
    place,
    shortfall,
    snapshots_condition,
    snapshots_note,
    snapshots_of,
)
from gracepoint_operator.resources import CheckpointPolicy, ConditionStatus
from gracepoint_operator.workloads import WorkloadIdentity
from tests.unit.operator.fakes import objects

NOW = objects.NOW


def named(count: int, kind: str = "node") -> list[str]:
    return [f"{kind}-{index}" for index in range(count)]


def loads(chosen: Mapping[str, tuple[str, ...]]) -> collections.Counter[str]:
    """How many other nodes' parts each server has."""
    return collections.Counter(server for node, servers in chosen.items() for server in servers if server != node)


@given(st.data())
def test_parts_go_to_different_usable_servers_the_own_one_first_and_evenly(data: st.DataObject) -> None:
    gang = named(data.draw(st.integers(1, 12)))
    everybody = [*gang, *named(data.draw(st.integers(0, 4)), "other")]
    usable = set(data.draw(st.lists(st.sampled_from(everybody), unique=True)))
    doomed = set(data.draw(st.lists(st.sampled_from(everybody), max_size=3)))
    racks = {node: (data.draw(st.sampled_from(["a", "b", "c", ""])),) for node in everybody}
    copies = data.draw(st.sampled_from([1, 2]))
    chosen = place(gang, Usable(usable), racks, copies, "uid", doomed=doomed)
    left = usable - doomed
    assert chosen.keys() == set(gang)
    for node, servers in chosen.items():
        assert len(set(servers)) == len(servers) == min(copies, len(left))
        assert left.issuperset(servers)
        assert node not in left or servers[0] == node
    inside = left.intersection(gang)
    lacking = sum(copies - (node in left) for node in gang)
    assert all(load <= math.ceil(lacking / max(1, len(inside))) + 1 for load in loads(chosen).values())


@given(st.integers(2, 40), st.integers(1, 4), st.data())
def test_a_server_that_goes_moves_its_own_parts_alone(count: int, racks: int, data: st.DataObject) -> None:
    gang = named(count)
    domains = {node: (f"rack-{index % racks}",) for index, node in enumerate(gang)}
    before = place(gang, Usable(gang), domains, 2, "uid")
    gone = data.draw(st.sampled_from(gang))
    after = place(gang, Usable(set(gang) - {gone}), domains, 2, "uid")
    moved = {node for node in gang if before[node] != after[node]}
    concerned = {node for node in gang if gone in before[node]}
    assert concerned <= moved
    # Those for which the ring has no peer of another rack share what is left.
    assert len(moved - concerned) <= max(0, 2 * max(collections.Counter(domains.values()).values()) - count)
    assert place(gang, Usable(gang), domains, 2, "uid") == before, "and they come back with it"


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6))
def test_each_server_has_one_peer_and_it_is_of_another_rack_where_no_rack_has_more_than_half(sizes: list[int]) -> None:
    domains = {f"{rack}-{index}": (str(rack),) for rack, size in enumerate(sizes) for index in range(size)}
    chosen = place(list(domains), Usable(domains), domains, 2, "uid")
    same = [node for node, (_, peer) in chosen.items() if domains[node] == domains[peer]]
    assert len(same) <= max(0, 2 * max(sizes) - len(domains))
    if 2 * max(sizes) <= len(domains):
        assert set(loads(chosen).values()) == {1}


def test_all_replicas_find_the_same_and_gangs_find_different_ones() -> None:
    gang = named(50)
    first = place(gang, Usable(gang), {}, 2, "uid-1")
    assert place(gang[::-1], Usable(gang[::-1]), {}, 2, "uid-1") == first
    assert place(gang, Usable(gang), {}, 2, "uid-2") != first


def test_the_widest_label_that_separates_the_gang_counts() -> None:
    domains = {f"node-{index}": ("the only zone", f"rack-{index // 4}") for index in range(16)}
    chosen = place(list(domains), Usable(domains), domains, 2, "uid")
    assert all(domains[node] != domains[peer] for node, (_, peer) in chosen.items())


def test_an_outer_node_with_room_is_taken_if_no_inner_one_is_of_another_domain() -> None:
    domains = {"a": ("rack-1",), "b": ("rack-1",), "full": ("rack-2",), "free": ("rack-2",)}
    chosen = place(["a", "b"], Usable(domains), domains, 2, "uid", has_room=lambda node: node != "full")
    assert sorted(chosen.values()) == [("a", "free"), ("b", "a")] or sorted(chosen.values()) == [
        ("a", "b"),
        ("b", "free"),
    ]
    alone = place(["a"], Usable(["a", "free"]), {}, 2, "uid")
    assert alone == {"a": ("a", "free")}


def test_parts_of_a_doomed_rack_are_spread_over_all_that_stay() -> None:
    domains = {f"node-{index}": (f"rack-{index // 16}",) for index in range(64)}
    doomed = {node for node, (rack,) in domains.items() if rack == "rack-0"}
    chosen = place(list(domains), Usable(domains), domains, 2, "uid", doomed=doomed)
    assert all(len(servers) == 2 and not doomed & set(servers) for servers in chosen.values())
    assert max(loads(chosen).values()) == 2  # 48 peers and 32 homeless parts at 48 servers


def test_without_enough_servers_there_are_fewer_copies_and_it_is_said_why() -> None:
    assert place(["a"], Usable(["a"]), {}, 2, "uid") == {"a": ("a",)}
    assert place(["a"], Usable([]), {}, 2, "uid") == {"a": ()}
    assert shortfall(2, 2, 9) == ""
    assert "1 of 2 copies" in shortfall(1, 2, 9)
    assert "there is no snapshot server" in shortfall(0, 2, 0)


WORKLOAD = WorkloadIdentity(namespace=objects.NAMESPACE, name="train", uid=objects.JOBSET_UID, kind="JobSet")
POLICY = CheckpointPolicy.of(objects.policy())


def report(step: int | None = 100, *, copies: int = 2, age_s: float | None = 5.0, skipped: int = 0) -> SnapshotReport:
    return SnapshotReport(
        pod_uid="uid-pod-0-0",
        session="s-0",
        workload_uid=objects.JOBSET_UID,
        process_index=0,
        safe_step=step,
        copies=copies,
        age_s=age_s,
        interval_s=60.0,
        skipped=skipped,
        skipped_reason="that of step 90 was still being sent" if skipped else "",
        bytes=1 << 20,
        servers=["node-1"],
    )


@pytest.mark.parametrize(
    ("found", "lacking", "later_s", "reason", "words"),
    [
        pytest.param(report(), "", 100.0, None, "", id="safe"),
        pytest.param(report(skipped=3), "", 300.0, REASON_LATE, "step 100, 305 s ago", id="late"),
        pytest.param(
            report(skipped=3), "", 300.0, REASON_LATE, "3 were skipped, the last one as that of", id="skipped"
        ),
        pytest.param(report(None, copies=0, age_s=None), "", 100.0, None, "", id="none yet"),
        pytest.param(report(None, copies=0, age_s=None), "", 500.0, REASON_LATE, "no snapshot is safe", id="none"),
        pytest.param(report(copies=1), "1 of 2: why", 0.0, REASON_FEWER, "in 1 of 2 servers; 1 of 2: why", id="fewer"),
        pytest.param(report(), "there is no server", 900.0, REASON_NO_SERVERS, "there is no server", id="no servers"),
    ],
)
def test_snapshots_are_unsafe_for_a_reason(
    found: SnapshotReport, lacking: str, later_s: float, reason: str | None, words: str
) -> None:
    entry = snapshots_of(WORKLOAD, found, NOW, 2, lacking, NOW + later_s)
    assert entry.reason == reason
    assert words in (entry.message or "")
    condition = snapshots_condition(POLICY, [entry], NOW)
    assert condition.status is (ConditionStatus.TRUE if reason is None else ConditionStatus.FALSE)
    assert words in condition.message or reason is None
    assert snapshots_note(entry).warning is (reason is not None)


def test_the_age_counts_from_when_the_step_was_passed() -> None:
    entry = snapshots_of(WORKLOAD, report(), NOW, 2, "", NOW)
    assert entry.passed is not None
    assert entry.passed.timestamp() == NOW - 5.0
    assert snapshots_condition(POLICY, [], NOW).status is ConditionStatus.UNKNOWN
