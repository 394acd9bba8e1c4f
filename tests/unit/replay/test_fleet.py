"""The model of a fleet: against a closed form, between policies, and against a replay."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from tests.replay import fleet, results
from tests.replay.fleet_model import (
    POLICIES,
    Costs,
    Figures,
    Fleet,
    Tier,
    best_interval_s,
    costs,
    random_faults,
    simulate,
)
from tests.replay.results import Result

MTTF_S = 3600.0
SMALL = Fleet(hosts=8, parameters=8e9, storage_bytes_per_s=20e9, mttf_s=MTTF_S, announced=1.0)
LARGE = Fleet(hosts=64, parameters=70e9, storage_bytes_per_s=20e9, mttf_s=MTTF_S, announced=1.0)


def goodput(of: Fleet, policy: str) -> float:
    figures = Figures()
    chosen = next(each for each in POLICIES if each.name == policy)
    come = random_faults(of.mttf_s, of.announced, figures.both_copies, count=300, seed=5)
    return simulate(costs(chosen, of, figures), come).goodput


def daly(interval_s: float, save_s: float, restart_s: float) -> float:
    """The goodput of saves that stop training until they are complete: Daly (2006), equation 20."""
    whole_s = MTTF_S * math.exp(restart_s / MTTF_S) * math.expm1(interval_s / MTTF_S)
    return (interval_s - save_s) / whole_s


@pytest.mark.parametrize(("interval_s", "save_s", "restart_s"), [(330, 30, 200), (1200, 120, 900), (600, 5, 20)])
def test_the_model_comes_to_the_goodput_of_dalys_formula(interval_s: float, save_s: float, restart_s: float) -> None:
    of = Costs(
        storage=Tier(interval_s, cost_s=save_s, durable_s=save_s, restore_s=0.0),
        final_save_s=None,
        restart_s=restart_s,
        unseen_s=0.0,
    )
    found = simulate(of, random_faults(MTTF_S, 0.0, 0.0, count=10_000, seed=3))
    assert found.goodput == pytest.approx(daly(interval_s, save_s, restart_s), rel=0.01)


@pytest.mark.parametrize("save_s", [0.2, 5.0, 60.0, 600.0])
def test_no_other_interval_is_better_in_dalys_formula(save_s: float) -> None:
    best_s = best_interval_s(save_s, MTTF_S)
    others = [daly(best_s * factor, save_s, 60.0) for factor in (0.7, 1.4)]
    assert daly(best_s, save_s, 60.0) > max(others)


def test_a_notice_helps_whoever_can_save_within_it() -> None:
    unannounced = dataclasses.replace(LARGE, announced=0.0)
    assert goodput(unannounced, "Gracepoint") == goodput(unannounced, "periodic saves")
    assert goodput(LARGE, "Gracepoint") > goodput(LARGE, "periodic saves")
    short = dataclasses.replace(LARGE, notice_s=30.0)  # the save takes 52 s
    assert goodput(short, "Gracepoint") == goodput(short, "periodic saves")


def test_snapshot_servers_take_the_last_step_if_storage_is_too_slow_for_the_notice() -> None:
    short = dataclasses.replace(LARGE, notice_s=30.0)
    figures = Figures()
    by_name = {policy.name: policy for policy in POLICIES}
    found = costs(by_name["Gracepoint, snapshots"], short, figures)
    assert found.evacuates
    assert costs(by_name["Gracepoint"], short, figures).final_save_s is None
    come = random_faults(MTTF_S, 1.0, 0.0, count=50, seed=1)
    assert simulate(found, come).lost < 0.001  # only where a fault comes during the save


def test_one_node_saves_a_small_state_within_its_grace_period_but_no_large_one() -> None:
    for policy in ("SIGTERM, one node", "SIGTERM, all nodes"):
        assert goodput(SMALL, policy) > goodput(SMALL, "periodic saves")
        assert goodput(LARGE, policy) == goodput(LARGE, "periodic saves")


def test_each_step_from_saves_to_copies_to_living_processes_costs_less() -> None:
    unannounced = dataclasses.replace(LARGE, announced=0.0)
    order = ("periodic saves", "Gracepoint, snapshots", "copies in memory", "in-place restarts")
    found = [goodput(unannounced, policy) for policy in order]
    assert found == sorted(found)


def test_copies_that_a_fault_takes_leave_the_saves() -> None:
    of = Costs(
        storage=Tier(1000.0, 0.0, 0.0, 0.0),
        memory=Tier(10.0, 0.0, 0.0, 0.0),
        final_save_s=None,
        restart_s=60.0,
        unseen_s=0.0,
    )
    faults = [random_faults(MTTF_S, 0.0, taken, count=300, seed=2) for taken in (0.0, 0.1, 1.0)]
    lost = [simulate(of, come).lost for come in faults]
    assert lost == sorted(lost)
    assert lost[0] == pytest.approx(5 / MTTF_S, rel=0.1)  # half of an interval


def write_replay(
    folder: Path, *, unexplained_s: float = 0.0, trains_on_s: float = 0.0, start_s: float = 7.0, measured: bool = False
) -> Path:
    """Writes what a replay of six jobs with 15 faults each leaves. Every third fault costs the steps since a snapshot.

    Args:
        folder: Where to.
        unexplained_s: How long each job waited for what was no fault.
        trains_on_s: How long a job trains on after each drain.
        start_s: How long the start of each job takes.
        measured: Whether the results have how long training stood still, and how long starts and ends took.
    """
    kinds = itertools.cycle((("drain", True, 6.0), ("drill", True, 0.5), ("node-off", False, 75.0)))
    lost_steps = itertools.cycle(range(10))
    found, ends = [], []
    for job in range(6):
        of_job = []
        stood_s = 0.0
        for number in range(15 * job + 1, 15 * job + 16):
            kind, announced, seconds = next(kinds)
            stands_s = seconds + 0.5 * (number % 5)
            on_s = trains_on_s if kind == "drain" else 0.0
            of_job.append(
                Result(
                    seed=1,
                    fault=number,
                    kind=kind,
                    announced=announced,
                    workload="JobSet",
                    recovered=True,
                    steps_lost=0 if announced else next(lost_steps),
                    until_training_s=stands_s + on_s,
                    counted_restarts=0,
                    at="2026-01-02T03:04:05+00:00",
                    stood_s=stands_s if measured else None,
                )
            )
            stood_s += stands_s
        standing_s = stood_s + start_s + 7.0  # and the end
        spent = {
            "training": 0.2 * 2000,
            "recomputation": 0.2 * sum(each.steps_lost for each in of_job),
            "waiting": standing_s + unexplained_s,
        }
        end = {"seed": 1, "workload": "JobSet", "faults": [each.fault for each in of_job], "steps": 2000}
        if measured:
            end |= {"start_s": start_s, "again_s": 5.0, "over_s": 2.0}
        ends.append(end | {"account": [[name, seconds, 0.0] for name, seconds in spent.items()]})
        found += of_job
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(dataclasses.asdict(each))}\n" for each in found))
    (folder / "ends.jsonl").write_text("".join(f"{json.dumps(end)}\n" for end in ends))
    return folder / "results.jsonl"


def test_a_replay_whose_time_the_faults_explain_is_close_to_its_model(tmp_path: Path) -> None:
    jobs = fleet.read_jobs(write_replay(tmp_path))
    model = fleet.expected(jobs)
    assert model.wall_s == pytest.approx(sum(job.outcome.wall_s for job in jobs), rel=0.01)
    assert model.lost_s == pytest.approx(sum(job.outcome.lost_s for job in jobs), rel=0.4)  # of 30 faults
    assert fleet.main(["--check", str(tmp_path / "results.jsonl")]) == 0


@pytest.mark.parametrize("how", [{"trains_on_s": 20.0}, {"start_s": 90.0}], ids=["trains on", "a slow start"])
def test_the_model_gets_what_was_measured_beside_the_faults(tmp_path: Path, how: dict[str, float]) -> None:
    for measured, code in ((False, 1), (True, 0)):
        assert fleet.main(["--check", str(write_replay(tmp_path, measured=measured, **how))]) == code


def test_a_replay_that_stood_still_for_something_else_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet.main(["--check", str(write_replay(tmp_path, unexplained_s=60.0))]) == 1
    assert "90 faults of 6 jobs; the model's goodput differs by +" in capsys.readouterr().out


def test_the_end_of_no_job_is_named(tmp_path: Path) -> None:
    path = write_replay(tmp_path)
    (tmp_path / "ends.jsonl").write_text('{"seed": 1}\n')
    with pytest.raises(ValueError, match=r'ends.jsonl, line 1: expected the end of a job, found \'{"seed": 1}'):
        fleet.read_jobs(path)
    (tmp_path / "ends.jsonl").write_text("")
    with pytest.raises(
        ValueError, match=r"ends.jsonl has no job that a fault has ended, with an account; expected one"
    ):
        fleet.read_jobs(path)


def test_a_job_of_which_a_fault_was_done_again_since_is_left_out(tmp_path: Path) -> None:
    path = write_replay(tmp_path)
    ends = [json.loads(line) for line in (tmp_path / "ends.jsonl").read_text().splitlines()]
    ends[0]["at"], ends[1]["at"] = "2026-01-02T03:04:04+00:00", "2026-01-02T03:04:06+00:00"  # its faults: at :05
    (tmp_path / "ends.jsonl").write_text("".join(f"{json.dumps(end)}\n" for end in ends))
    assert [job.faults[0].fault for job in fleet.read_jobs(path)] == [16, 31, 46, 61, 76]


def test_a_replays_figures_take_the_place_of_two(tmp_path: Path) -> None:
    figures = fleet.measured(results.read(write_replay(tmp_path)))
    assert figures.restart_s == 7.0
    assert figures.lost_node_s == 69.0
    with pytest.raises(ValueError, match="found no recovered fault of the kind drain among 0; expected one"):
        fleet.measured([])


def test_tables_and_picture_have_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet.main(["--faults", "3", "--picture", str(tmp_path / "p.svg"), "--json", str(tmp_path / "f.json")]) == 0
    printed, drawn = capsys.readouterr().out, (tmp_path / "p.svg").read_text()
    written = json.loads((tmp_path / "f.json").read_text())
    for policy in POLICIES:
        assert f"\n{policy.name}  " in printed
        assert policy.name in drawn
    assert {row["policy"] for row in written["rows"]} == {policy.name for policy in POLICIES}
