"""The multihost utilities and the distributed state on real JAX processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracepoint.wire.names import DEFAULT_NOT_JOINED_EXIT_CODE as NOT_JOINED
from tests.multiprocess.launcher import Processes, Result

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("multihost_process.py")


def run(
    count: int,
    part: str,
    *arguments: str,
    devices: int = 2,
    environments: list[dict[str, str]] | None = None,
) -> list[Result]:
    with Processes.start(
        SCRIPT, count, arguments=[part, *arguments], devices=devices, environments=environments
    ) as processes:
        return processes.wait(timeout_s=150)


def succeeded(results: list[Result]) -> bool:
    return all(r.code == 0 and "done" in r.output for r in results)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_processes_meet_in_foreground_and_background_and_learn_of_failures(count: int) -> None:
    results = run(count, "barriers", devices=1)
    assert succeeded(results), results


def test_pytree_is_broadcast_from_any_process_bit_for_bit() -> None:
    results = run(3, "broadcast")
    assert succeeded(results), results


UID = {"GRACEPOINT_JOBSET_UID": "uid-1"}
TOLD_FOUR = {"GRACEPOINT_PROCESS_COUNT": "4", "GRACEPOINT_PODS_PER_JOB": "4", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("part", "counts"),
    [
        pytest.param(
            "split", [{"GRACEPOINT_PROCESS_COUNT": "2"}] * 2, id="two clusters of one, where two were counted"
        ),
        pytest.param("miscounted", [{}, TOLD_FOUR], id="one cluster, where one was told four"),
        pytest.param("split_without_a_count", [{}] * 2, id="two clusters of one, which nobody counted"),
    ],
)
def test_processes_outside_one_cluster_are_refused_before_overwriting(
    tmp_path: Path, part: str, counts: list[dict[str, str]]
) -> None:
    results = run(2, part, str(tmp_path), devices=1, environments=[UID | count for count in counts])
    assert succeeded(results), results


@pytest.mark.parametrize("recoverable", ["recoverable", "not"])
def test_cluster_is_joined_from_pod_environment_once_and_left_by_all(recoverable: str) -> None:
    results = run(2, "state", recoverable)
    assert succeeded(results), results


@pytest.mark.parametrize("found_in", ["Slurm", "JAX's own variables"])
def test_jax_detects_place_and_devices_under_slurm_and_from_its_variables(found_in: str) -> None:
    results = run(2, "left_to_jax", found_in)
    assert succeeded(results), results
    if found_in != "Slurm":
        assert "Starting JAX distributed service on 127.0.0.1:" in results[0].output


def test_process_0_joins_before_its_own_name_can_be_looked_up() -> None:
    results = run(2, "unpublished", devices=1)
    assert succeeded(results), results


def test_processes_with_the_same_id_do_not_join() -> None:
    results = run(3, "one_id_twice", devices=1)
    assert [result.code for result in results] == [NOT_JOINED] * 3, results
    assert not any("joined" in result.output.splitlines() for result in results)


def test_a_process_that_ends_without_shutdown_leaves_as_well() -> None:
    results = run(2, "at_exit")
    assert succeeded(results), results


def test_processes_that_are_numbered_in_three_ways_train_and_survive_a_preemption(tmp_path: Path) -> None:
    results = run(3, "permuted", str(tmp_path))
    assert [r.code for r in results] == [77] * 3, results
    (saved,) = [p.name for p in tmp_path.iterdir() if p.name.isdecimal()]
    assert int(saved) >= 1
