"""What a fault costs in a fleet: the goodput of policies, by a model.

    python -m tests.replay.fleet [--results FILE] [--json FILE] [--picture FILE]
    python -m tests.replay.fleet --check build/replay/results.jsonl

Goodput is the share of the time in which a job trains what it keeps. ``fleet_model`` has the model, the policies and
the figures with their sources. ``--results`` puts what a replay has measured in the place of two of them. ``--check``
lets the model say what the replay's own goodput should be, and compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gracepoint_cli import timeline_picture
from tests.replay import results
from tests.replay.fleet_model import (
    POLICIES,
    Costs,
    Fault,
    Figures,
    Fleet,
    Outcome,
    Tier,
    costs,
    random_faults,
    simulate,
)
from tests.replay.results import Result
from tests.replay.workloads import WORKLOADS

HOUR_S = 3600.0
#: Meta's Llama 3: 419 unexpected interruptions in 54 days on 2,048 hosts (https://arxiv.org/abs/2407.21783).
HOST_MTTF_S = 54 * 24 * HOUR_S * 2048 / 419
MTTFS_S = {"30 min": 0.5 * HOUR_S, "1 h": HOUR_S, "3 h": 3 * HOUR_S, "12 h": 12 * HOUR_S, "1 day": 24 * HOUR_S,
           "1 week": 168 * HOUR_S}  # fmt: skip
ANNOUNCED = {"none": 0.0, "half": 0.5, "all": 1.0}
MODELS = {"8B": 8e9, "70B": 70e9, "405B": 405e9}
#: 2.5 GB/s: FSx in Gemini's evaluation. 2,000 GB/s: what Meta's Tectonic sustains (Llama 3).
STORAGES = {"2.5 GB/s": 2.5e9, "20 GB/s": 20e9, "200 GB/s": 200e9, "2,000 GB/s": 2000e9}
NOTICES_S = {"15 s": 15.0, "30 s": 30.0, "2 min": 120.0, "1 h": HOUR_S}
REFERENCE = Fleet(hosts=64, parameters=70e9, storage_bytes_per_s=20e9, mttf_s=HOUR_S, announced=0.5)
#: From a save to the next one, or from a snapshot in memory, by what trains: as the replay's policies have it.
INTERVAL_STEPS = {workload.name: workload.interval_steps for workload in WORKLOADS.values()}
#: The model's goodput may differ from the replay's by so much.
GOAL = 0.03
#: What stopped training for less ended no process.
_PAUSE_S = 5.0
#: Kinds of faults: one that every platform has, and one in which only its silence tells that a node is off.
_ANNOUNCED_END, _LOST_NODE = "drain", "node-off"
_COLOURS = ("#0072b2", "#56b4e9", "#777777", "#cc79a7", "#a05195", "#e69f00", "#d55e00")


@dataclasses.dataclass(frozen=True)
class Row:
    """One fleet with one policy."""

    table: str
    column: str
    fleet: Fleet
    policy: str
    outcome: Outcome


def rows(figures: Figures, *, seed: int, faults: int) -> Iterator[Row]:
    """Runs the model for the fleets of all tables."""
    for table, column, fleet in fleets():
        come = random_faults(fleet.mttf_s, fleet.announced, figures.both_copies, count=faults, seed=seed)
        for policy in POLICIES:
            yield Row(table, column, fleet, policy.name, simulate(costs(policy, fleet, figures), come))


def fleets() -> Iterator[tuple[str, str, Fleet]]:
    """Returns tables, columns and fleets. What a table does not vary is that of ``REFERENCE``."""
    for share, announced in ANNOUNCED.items():
        for name, mttf_s in MTTFS_S.items():
            yield f"MTTF, {share} announced", name, dataclasses.replace(REFERENCE, mttf_s=mttf_s, announced=announced)
    for name, hosts in (("8B", 8), ("70B", 64), ("405B", 512), ("405B", 4096)):
        fleet = dataclasses.replace(REFERENCE, hosts=hosts, parameters=MODELS[name], storage_bytes_per_s=200e9)
        yield "a fault an hour, 200 GB/s", f"{name}, {hosts:,} hosts", fleet
    for hosts in (128, 512, 2048, 4096):
        mttf_s = HOST_MTTF_S / hosts
        fleet = Fleet(hosts=hosts, parameters=405e9, storage_bytes_per_s=200e9, mttf_s=mttf_s, announced=0.5)
        yield "405B, 200 GB/s, as many faults a host as Llama 3", f"{hosts:,} hosts, {mttf_s / HOUR_S:.1f} h", fleet
    for name, storage in STORAGES.items():
        yield "storage", name, dataclasses.replace(REFERENCE, storage_bytes_per_s=storage)
    for name, notice_s in NOTICES_S.items():
        yield "notice, all announced", name, dataclasses.replace(REFERENCE, announced=1.0, notice_s=notice_s)


def save_times(figures: Figures) -> list[list[str]]:
    """Returns how long a save takes, by state and storage."""
    lines = [["a save of", "bytes", *STORAGES]]
    for name, parameters in MODELS.items():
        fleet = dataclasses.replace(REFERENCE, parameters=parameters)
        seconds = [figures.save_factor * fleet.state_bytes / storage for storage in STORAGES.values()]
        times = (f"{each:,.0f} s" if each >= 10 else f"{each:.2g} s" for each in seconds)
        lines.append([name, f"{fleet.state_bytes / 1e9:,.0f} GB", *times])
    return lines


def tables(found: Sequence[Row]) -> Iterator[tuple[str, list[list[str]]]]:
    for table in dict.fromkeys(row.table for row in found):
        within = [row for row in found if row.table == table]
        columns = list(dict.fromkeys(row.column for row in within))
        goodput = {(row.policy, row.column): f"{100 * row.outcome.goodput:.2f}%" for row in within}
        lines = [[policy.name, *(goodput[policy.name, column] for column in columns)] for policy in POLICIES]
        yield table, [["goodput", *columns], *lines]


def picture(found: Iterable[Row]) -> str:
    """Returns an SVG: the time that is no goodput, over the MTTF, for each share of announced faults."""
    import vl_convert

    values = [
        {
            "facet": row.table.removeprefix("MTTF, "),
            "policy": row.policy,
            "hours": row.fleet.mttf_s / HOUR_S,
            "spent": 100 * (1 - row.outcome.goodput),
        }
        for row in found
        if row.table.startswith("MTTF")
    ]
    names = [policy.name for policy in POLICIES]
    x = {
        "field": "hours",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [0.4, 200]},
        "title": "hours between two faults",
    }
    y = {
        "field": "spent",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [0.05, 20]},
        "title": "% of the time without goodput",
    }
    facets = [f"{name} announced" for name in ANNOUNCED]
    spec = {
        "config": {**timeline_picture.CONFIG, "aria": False},
        "padding": 16,
        "title": {
            "text": "What faults cost, by policy",
            "subtitle": [
                "A model: 70B on 64 hosts, storage of 20 GB/s, a notice of two minutes.",
                "SIGTERM's lines are those of periodic saves, as a save of 52 s does not fit into 30 s.",
            ],
        },
        "data": {"values": values},
        "facet": {"column": {"field": "facet", "type": "nominal", "sort": facets, "title": None}},
        "spec": {
            "width": 250,
            "height": 260,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {**x, "axis": {"values": [0.5, 1, 3, 12, 24, 168]}},
                "y": {**y, "axis": {"values": [0.1, 0.3, 1, 3, 10]}},
                "color": {
                    "field": "policy",
                    "type": "nominal",
                    "title": None,
                    "scale": {"domain": names, "range": list(_COLOURS)},
                    "legend": {"orient": "bottom", "columns": 4, "symbolType": "stroke"},
                },
            },
        },
    }
    return str(vl_convert.vegalite_to_svg(json.dumps(spec)))


def measured(found: Sequence[Result]) -> Figures:
    """Returns the figures with what a replay has measured: of a drained node, and of one that is off.

    Raises:
        ValueError: It has no recovered fault of both kinds.
    """
    seconds = {}
    for kind in (_ANNOUNCED_END, _LOST_NODE):
        of_kind = [result.until_training_s for result in found if result.recovered and result.kind == kind]
        if not of_kind:
            raise ValueError(f"found no recovered fault of the kind {kind} among {len(found)}; expected one")
        seconds[kind] = statistics.median(of_kind)
    restart_s = seconds[_ANNOUNCED_END]
    return Figures(restart_s=restart_s, lost_node_s=max(0.0, seconds[_LOST_NODE] - restart_s))


@dataclasses.dataclass(frozen=True)
class Job:
    """One training job of a replay.

    Attributes:
        workload: Name of what trained (``workloads``).
        faults: What its faults led to, in their order.
        steps: How many it trained in the end.
        outcome: Where its time went, by the trainers' records.
        ends_s: What its start, the deletion before its end and its last step took beyond training, together. None: an
            older version has not measured it.
    """

    workload: str
    faults: tuple[Result, ...]
    steps: int
    outcome: Outcome
    ends_s: float | None = None


def read_jobs(path: Path) -> list[Job]:
    """Returns the jobs that came to their end, from ``results.jsonl`` and from ``ends.jsonl`` beside it.

    Raises:
        ValueError: There is none, or a line is no end.
    """
    known = {(result.seed, result.fault): result for result in results.newest(results.read(path))}
    ends, jobs = path.with_name("ends.jsonl"), []
    for number, line in enumerate(ends.read_text().splitlines(), 1):
        try:
            end = json.loads(line)
            seconds = {category: own for category, own, _ in end["account"]}
            faults = tuple(known[end["seed"], fault] for fault in end["faults"] if (end["seed"], fault) in known)
            if "at" in end and results.again_since(end["at"], faults):
                continue
            if seconds and any(result.until_training_s > _PAUSE_S for result in faults):
                outcome = Outcome(sum(seconds.values()), seconds["training"], seconds["recomputation"])
                times = [end.get(name) for name in ("start_s", "again_s", "over_s")]
                ends_s = None if None in times else sum(times)
                jobs.append(Job(end["workload"], faults, end["steps"], outcome, ends_s))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{ends}, line {number}: expected the end of a job, found {line[:200]!r}") from error
    if not jobs:
        raise ValueError(f"{ends} has no job that a fault has ended, with an account; expected one")
    return jobs


def expected(jobs: Sequence[Job], *, seed: int = 0) -> Outcome:
    """Lets the model say where the time of a replay should have gone.

    It gets from the replay how long each job trained, how many faults ended it, which kinds cost steps, and for how
    long on average training stood still after a fault of these and of the others. Pauses, in which the processes go
    on, it takes as they were; and so a job's start, the deletion before its end and its last moments, if they are
    known. It says the steps that were lost, and so the goodput.
    """
    ends = [result for job in jobs for result in job.faults if result.until_training_s > _PAUSE_S]
    losing = {result.kind for result in ends if result.steps_lost}
    kept_s = _mean_s([result for result in ends if result.kind not in losing] or ends)
    lost_s = _mean_s([result for result in ends if result.kind in losing] or ends)
    outcome = Outcome(0.0, 0.0, 0.0)
    for number, job in enumerate(jobs):
        pauses_s = sum(result.until_training_s for result in job.faults if result.until_training_s <= _PAUSE_S)
        kept = [result.kind not in losing for result in job.faults if result.until_training_s > _PAUSE_S] + [True]
        # Spread evenly around the mean.
        between_s = (job.outcome.kept_s + job.outcome.lost_s) / len(kept)
        gaps_s = [between_s * (0.5 + (place + 0.5) / len(kept)) for place in range(len(kept))]
        random.Random(seed + number).shuffle(gaps_s)
        interval_s = INTERVAL_STEPS[job.workload] * job.outcome.kept_s / job.steps
        of = Costs(
            storage=Tier(interval_s, cost_s=0.0, durable_s=0.0, restore_s=0.0),
            final_save_s=0.0,
            restart_s=kept_s,
            unseen_s=lost_s - kept_s,
        )
        # The model has a start and the deletion in it, each as long as a fault.
        other_s = 0.0 if job.ends_s is None else job.ends_s - 2 * kept_s
        outcome += simulate(of, map(Fault, gaps_s, kept), only_in_training=True) + Outcome(pauses_s + other_s, 0.0, 0.0)
    return outcome


def _mean_s(found: Sequence[Result]) -> float:
    return statistics.fmean(result.until_training_s if result.stood_s is None else result.stood_s for result in found)


def _check(path: Path) -> int:
    jobs = read_jobs(path)
    replay, model = sum((job.outcome for job in jobs), Outcome(0.0, 0.0, 0.0)), expected(jobs)
    difference = model.goodput / replay.goodput - 1
    lines = [
        ["", "replay", "model"],
        ["goodput", f"{replay.goodput:.2%}", f"{model.goodput:.2%}"],
        ["lost", f"{replay.lost:.2%}", f"{model.lost:.2%}"],
    ]
    print(_aligned(lines))
    print(
        f"{sum(len(job.faults) for job in jobs)} faults of {len(jobs)} jobs; the model's goodput differs by "
        f"{difference:+.1%}, expected at most {GOAL:.0%}"
    )
    return 0 if abs(difference) <= GOAL else 1


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(line.rstrip() for line in aligned)


def _as_json(found: Iterable[Row], figures: Figures) -> dict[str, Any]:
    return {
        "figures": dataclasses.asdict(figures),
        "policies": [{"name": each.name, "assumes": each.assumes, "source": each.source} for each in POLICIES],
        "rows": [{**dataclasses.asdict(row), "goodput": row.outcome.goodput} for row in found],
    }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, metavar="FILE", help="a replay's results, whose figures are used")
    made.add_argument("--json", type=Path, metavar="FILE", help="write figures, policies and tables there too")
    made.add_argument("--picture", type=Path, metavar="FILE", help="draw the tables by MTTF as SVG")
    made.add_argument(
        "--check", type=Path, metavar="FILE", help="compare with the goodput of the replay of these results"
    )
    made.add_argument("--seed", type=int, default=1, help="of the faults (default: 1)")
    made.add_argument("--faults", type=int, default=500, help="how many in each run (default: 500)")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """See the module."""
    options = parser().parse_args(words)
    if options.check is not None:
        return _check(options.check)
    figures = Figures() if options.results is None else measured(results.newest(results.read(options.results)))
    found = list(rows(figures, seed=options.seed, faults=options.faults))
    print("\n".join(f"{each.name}: {each.assumes} [{each.source}]" for each in POLICIES), "\n")
    print(_aligned(save_times(figures)), "\n")
    for table, lines in tables(found):
        print(f"{table}\n{_aligned(lines)}\n")
    if options.json is not None:
        _write(options.json, json.dumps(_as_json(found, figures), indent=2))
    if options.picture is not None:
        _write(options.picture, picture(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
