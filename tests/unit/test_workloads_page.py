"""What the page about workloads claims: a test on a cluster holds each cell, and runs for this kind of workload."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("JobSet", "Job", "TrainJob")
#: The tests of each column of what a kind of workload gets.
COLUMNS = {
    "notice": ("test_a_notice_saves_the_step_and_loses_none", "test_the_workload_comes_back_on_other_nodes"),
    "hold": ("test_an_eviction_is_held_until_the_commit",),
    "resume, bitwise": ("test_the_disturbed_run_equals_the_undisturbed_one",),
    "restarts not counted": ("test_saved_exits_do_not_count_as_failures",),
    "record": ("test_the_record_says_who_answered_and_has_every_stage",),
    "suspend, resume": ("test_a_suspended_workload_saves_and_resumes",),
    "Kueue": ("test_a_run_waits_for_quota_and_gives_way_to_a_higher_priority",),
}
#: The tests of each row of what a workload gets in a queue of Kueue.
IN_A_QUEUE = {
    "waits for quota, gives way to a higher priority, returns on other nodes": (
        "test_a_run_waits_for_quota_and_gives_way_to_a_higher_priority",
    ),
    "saves before its time is over, continues with more time": (
        "test_a_run_saves_before_its_time_in_the_queue_is_over",
    ),
    "is pinned to nodes (topology-aware scheduling), returns on other nodes, twice": (
        "test_pods_that_kueue_pins_to_nodes_return_on_other_nodes_each_time",
    ),
    "is pinned, and there is no other node: waits in the queue, returns": (
        "test_a_run_whose_node_has_no_replacement_waits_in_the_queue",
    ),
    "is pinned to a node that goes before the job starts: is placed anew": (
        "test_a_run_that_is_pinned_to_a_node_that_goes_before_it_starts_is_placed_anew",
    ),
    "is admitted with fewer processes, uses each sample once": ("test_a_partly_admitted_job_uses_each_sample_once",),
}


def tables() -> list[list[list[str]]]:
    """The tables of the page: their rows, header first, as cells."""
    found: list[list[list[str]]] = []
    before = ""
    for line in (ROOT / "docs/workloads.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            if not line.startswith("|---"):
                found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        before = line
    return found


def table(first: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table whose first column is called so."""
    (found,) = (rows for rows in tables() if rows[0][0] == first)
    return found[0], found[1:]


def kind_of(cell: str) -> str:
    """The kind of workload that a row is about; its name may be a link."""
    return re.sub(r"\[(\w+)\]\(.*?\)", r"\1", cell).split()[0].rstrip(",")


def claims() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Each claimed cell: its kind of workload, its column, and the tests that hold it."""
    columns, rows = table("workload")
    for first, *cells in rows:
        for column, cell in zip(columns[1:], cells, strict=True):
            if "yes" in cell:
                yield kind_of(first), column, COLUMNS.get(column, ())
    header, rows = table("in a queue of Kueue")
    for what, *cells in rows:
        for kind, cell in zip(header[1:], cells, strict=True):
            if cell == "yes":
                yield kind, what, IN_A_QUEUE.get(what, ())


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "tests/cluster").glob("test_*.py"))]


def runs_for(test: str) -> set[str]:
    """The ids with which a test on a cluster runs: of its own parameters, else of those of its fixtures."""
    for tree in trees():
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if test in functions:
            function = functions[test]
            own = ids(tree, function.decorator_list)
            fixtures = (functions[item.arg] for item in function.args.args if item.arg in functions)
            return own or {found for fixture in fixtures for found in ids(tree, fixture.decorator_list)}
    return set()


def ids(tree: ast.Module, decorators: list[ast.expr]) -> set[str]:
    """The ids of parameters, also of those in a constant of the module."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    nodes = [node for decorator in decorators for node in ast.walk(decorator)]
    nodes += [
        inner
        for node in list(nodes)
        if isinstance(node, ast.Name) and node.id in constants
        for inner in ast.walk(constants[node.id])
    ]
    return {
        str(node.value.value)
        for node in nodes
        if isinstance(node, ast.keyword) and node.arg == "id" and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize(
    ("kind", "what", "tests"), [pytest.param(*claim, id=f"{claim[0]}-{claim[1]}") for claim in claims()]
)
def test_every_claimed_cell_has_a_test_on_a_cluster_for_its_kind(kind: str, what: str, tests: tuple[str, ...]) -> None:
    assert tests, f"{what} of {kind}: found no test of that name here, expected one that runs for {kind}"
    for test in tests:
        assert kind in runs_for(test), f"{test}: found {sorted(runs_for(test))}, expected {kind} among its ids"


def test_the_page_claims_every_column_of_every_kind_that_is_handled() -> None:
    columns, _ = table("workload")
    found = {(kind, what) for kind, what, _ in claims()}
    assert {(kind, column) for kind in KINDS for column in columns[1:]} <= found


def test_a_test_that_does_not_run_for_a_kind_would_be_noticed() -> None:
    assert runs_for("test_the_trainjob_never_failed_and_is_complete") == {"TrainJob"}
    assert runs_for("test_nobody_wrote_this") == set()
