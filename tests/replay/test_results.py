"""A trace is the same for a seed, and has every kind; results go on where a replay was cut; the report adds them up."""

from __future__ import annotations

import collections
import dataclasses
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gracepoint_operator.trust.bundle import OwnCertificates, issuers, renewed
from tests.replay import account, report, results, trace
from tests.replay.__main__ import main
from tests.replay.account import Life
from tests.replay.kinds import KINDS, last_year_of
from tests.replay.owners import Owner, Owners
from tests.replay.results import End, Result
from tests.testcluster.providers import CONTEXT_VARIABLE

ABLE = {name: kind.workloads for name, kind in KINDS.items()}
ONE = Result(
    seed=7,
    fault=1,
    kind="drain",
    announced=True,
    workload="JobSet",
    recovered=True,
    steps_lost=0,
    until_training_s=6.25,
    counted_restarts=0,
    at="2026-01-02T03:04:05+00:00",
)


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "results.jsonl"
    other = dataclasses.replace(ONE, fault=2, broken=("lost 3 steps in spite of its notice",))
    assert results.read(path) == []
    for result in (ONE, other):
        results.append(result, path)
    assert results.read(path) == [ONE, other]


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.append(ONE, path)
    whole = path.read_text()
    path.write_text(whole + whole[:30])
    assert results.read(path) == [ONE]


def test_what_is_appended_takes_the_place_of_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for cut in ("", '{"seed": 7, "fau'):
        path.write_text(cut)
        for _ in range(2):
            results.append(ONE, path)
        with path.open("a") as file:
            file.write(cut)
        other = dataclasses.replace(ONE, fault=2)
        results.append(other, path)
        assert results.read(path) == [ONE, ONE, other]


def test_a_result_of_an_earlier_version_is_of_an_unknown_commit(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    fields = dataclasses.asdict(dataclasses.replace(ONE, commit="0123"))
    del fields["commit"]
    path.write_text(json.dumps(fields) + "\n")
    assert [result.commit for result in results.read(path)] == [results.UNKNOWN]


def test_the_commit_is_that_of_the_clone_and_says_if_files_differ_from_it(tmp_path: Path) -> None:
    assert results.commit_of(tmp_path) == results.UNKNOWN

    def git(*words: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        return subprocess.run(
            ("git", "-C", tmp_path, *who, *words), check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    file = tmp_path / "file"
    file.write_text("1")
    git("add", "file")
    git("commit", "--message=One")
    git("tag", "v1")
    assert results.commit_of(tmp_path) == git("rev-parse", "HEAD")
    file.write_text("2")
    assert results.commit_of(tmp_path) == git("rev-parse", "HEAD") + "-dirty"


def test_a_line_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"seed": 7}\n')
    with pytest.raises(ValueError, match=r"results.jsonl, line 1: expected a result with seed, fault, kind"):
        results.read(path)


def test_of_a_fault_that_was_replayed_the_last_result_counts() -> None:
    again = dataclasses.replace(ONE, steps_lost=1)
    assert results.newest([ONE, dataclasses.replace(ONE, fault=2), again]) == [
        again,
        dataclasses.replace(ONE, fault=2),
    ]
    assert results.redone([ONE, dataclasses.replace(ONE, fault=2), again]) == [ONE]


def test_a_seed_makes_the_same_trace_again_and_another_one_another() -> None:
    assert trace.made(7, 40, ABLE) == trace.made(7, 40, ABLE)
    assert trace.made(7, 40, ABLE) != trace.made(8, 40, ABLE)
    assert trace.made(7, 40, ABLE) == trace.made(7, 60, ABLE)[:40]


def test_a_trace_has_each_kind_about_as_often_on_workloads_that_it_can_be_done_to() -> None:
    made = trace.made(7, 300, ABLE)
    assert len(KINDS) >= 25
    assert all(fault.workload in ABLE[fault.kind] for fault in made)
    counts = collections.Counter(fault.kind for fault in made)
    assert counts.keys() == KINDS.keys()
    on = {(fault.workload, fault.kind) for fault in made}
    assert {workload for workload, _ in on} == {trace.JOBSET, trace.JOB, trace.BUCKET, trace.KEPT, trace.QUEUED}
    # What the few jobs of a workload have in common with all others is not left to these.
    assert {(trace.BUCKET, "storage-503"), (trace.KEPT, "keeper-killed"), (trace.QUEUED, "kueue-preemption")} <= on
    assert (trace.JOBSET, "node-off") in on
    assert [fault.fault for fault in made] == list(range(1, 301))


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    """Returns with what the command line ends, which comes to no cluster."""
    monkeypatch.delenv(CONTEXT_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["replay", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_kind_that_cannot_be_done_here_is_named_and_left_out_and_refused_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(KINDS, "drain", dataclasses.replace(KINDS["drain"], why_not=lambda: "no drains today"))
    path = tmp_path / "trace.jsonl"
    assert asked(monkeypatch, f"--faults={len(KINDS)}", f"--write-trace={path}") == 0
    assert "left out: drain cannot be done here: no drains today" in capsys.readouterr().out
    made = {fault.kind for fault in trace.read(path, KINDS)}
    assert "drain" not in made
    assert "eviction" in made
    assert asked(monkeypatch, "--kinds", "eviction", "drain") == 2
    assert "drain cannot be done: no drains today" in capsys.readouterr().err
    assert asked(monkeypatch, "--context=theirs", "--nodes", "a", "b", "--kinds", "node-off") == 2
    assert "node-off cannot be done: it needs a cluster of its own" in capsys.readouterr().err


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    made = trace.made(7, 20, ABLE)
    trace.write(made, path)
    assert trace.read(path, KINDS) == made
    trace.write([dataclasses.replace(made[0], kind="flood")], path)
    with pytest.raises(ValueError, match=r"line 1: expected one of the kinds .*, found flood"):
        trace.read(path, KINDS)
    trace.write([dataclasses.replace(made[0], workload="Pod")], path)
    with pytest.raises(ValueError, match=r"line 1: expected one of Job, JobSet, JobSet in .*, found Pod"):
        trace.read(path, KINDS)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1: expected a JSON object with seed, fault, job"):
        trace.read(path, KINDS)


def test_a_trace_has_the_workloads_that_are_asked_for_and_on_a_cluster_of_others_those_that_reach_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "trace.jsonl", ("--context=mine", "--nodes", "a", "b")
    assert asked(monkeypatch, "--workloads", trace.BUCKET, "--faults=9", f"--write-trace={path}") == 0
    made = trace.read(path, KINDS)
    assert {fault.workload for fault in made} == {trace.BUCKET}
    assert "storage-503" in {fault.kind for fault in made}
    assert asked(monkeypatch, *other, f"--trace={path}") == 2
    assert f"of a {trace.BUCKET}, which needs a cluster of its own" in capsys.readouterr().err
    assert asked(monkeypatch, *other, f"--write-trace={path}") == 0
    assert {fault.workload for fault in trace.read(path, KINDS)} == {trace.JOBSET, trace.JOB, trace.KEPT}
    assert asked(monkeypatch, "--kinds=kueue-preemption", "--faults=1", f"--write-trace={path}") == 0
    assert [fault.workload for fault in trace.read(path, KINDS)] == [trace.QUEUED]


def test_a_trace_without_faults_or_without_a_kind_for_its_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one fault"):
        trace.made(7, 0, ABLE)
    with pytest.raises(ValueError, match="can be done to a Job"):
        trace.made(7, 3, {"priority": (trace.JOBSET,)})


def test_the_report_adds_up_what_each_kind_cost() -> None:
    lost = dataclasses.replace(
        ONE, fault=2, kind="node-off", announced=False, steps_lost=12, until_training_s=80.0, counted_restarts=1
    )
    gone = dataclasses.replace(lost, fault=3, recovered=False, broken=("not recovered",))
    end = End(
        seed=7,
        workload="JobSet",
        faults=(1, 2, 3),
        steps=900,
        account=(("training", 90.0, 90.5), ("restore", 10.0, 9.5)),
        broken=("file lost+found",),
        at=ONE.at,
    )
    found = report.rendered([ONE, lost, gone], [end])
    assert "| `drain` | yes | 1 | 1 | 1 | 0 | 0 | 6.2 | 6.2 | 0 |" in found
    assert "| `node-off` | no | 2 | 1 | 1 | 12 | 12 | 80.0 | 80.0 | 2 |" in found
    assert "3 faults of 2 kinds, 2 recovered; 1 jobs came to their end, after 900 steps." in found
    assert "fault 3 of seed 7, node-off: not recovered" in found
    assert "the JobSet of the faults 1 to 3 of seed 7: file lost+found" in found
    points = ElementTree.fromstring(report.picture([ONE, lost, gone])).iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(points)) == 3 + 3, "a point of each fault, and those of the legend"


@pytest.mark.parametrize(
    ("workload", "shown"),
    [(trace.JOBSET, True), (trace.BUCKET, True), (trace.KEPT, True), (trace.QUEUED, True), (trace.JOB, False)],
)
def test_the_report_has_the_accounts_of_all_jobsets(workload: str, shown: bool) -> None:
    account = (("training", 90.0, 90.5),)
    end = End(seed=7, workload=workload, faults=(1,), steps=900, account=account, broken=("a file",), at=ONE.at)
    found = report.rendered([dataclasses.replace(ONE, workload=workload)], [end])
    assert ("| training | 90.0 | 90.5 |" in found) is shown
    assert f"the {workload} of the faults 1 to 1 of seed 7: a file" in found


def test_the_report_says_after_which_faults_alerts_were_not_judged() -> None:
    def told(*reasons: str) -> str:
        faults = [dataclasses.replace(ONE, fault=fault, alerts=why) for fault, why in enumerate(reasons, 1)]
        return report.rendered(faults, [])

    assert "Alerts were not judged after 2 faults: prometheus is not built." in told(
        "", *["prometheus is not built"] * 2
    )
    assert "Alerts were not judged" not in told("", "")


def test_the_report_tells_what_was_cut_what_was_done_again_and_of_which_commits_it_is() -> None:
    end = End(seed=7, workload="Job", faults=(1,), steps=900, account=(), broken=(), at=ONE.at)
    other = dataclasses.replace(ONE, fault=2, commit="0123")
    before = dataclasses.replace(ONE, broken=("lost 3 steps",))
    found = report.rendered([ONE, other], [end], [before])
    assert "1 faults came to jobs that were cut, or of which a fault was done again since, and so were not" in found
    assert "Commit unknown: 1 faults.\nCommit 0123: 1 faults." in found
    assert "1 results are of faults that were done again since; of these:\nfault 1 of seed 7, drain: lost 3" in found
    assert "that were cut" not in report.rendered([ONE], [end])


def test_the_end_of_a_job_counts_no_more_when_one_of_its_faults_was_done_again_since() -> None:
    end = End(seed=7, workload="Job", faults=(1, 2), steps=900, account=(), broken=("file lost+found",), at=ONE.at)
    other = dataclasses.replace(ONE, fault=2)
    again = dataclasses.replace(other, at="2026-01-02T04:00:00+00:00")
    assert len(report.problems([ONE, other], [end])) == 1
    assert report.problems([ONE, again], [end]) == []
    assert len(report.problems([ONE, dataclasses.replace(again, seed=8)], [end])) == 1, "that of another trace"
    found = report.rendered([ONE, again], [end], [other])
    assert "0 jobs came to their end, after 0 steps." in found
    assert "2 faults came to jobs that were cut" in found
    assert "Nothing was found that must not be." in found
    newer = dataclasses.replace(end, faults=(2,), broken=(), at="2026-01-02T04:30:00+00:00")
    assert results.counting([end, newer], [ONE, again]) == [newer]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.99, 4), (0.25, 1)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    assert report.percentile([1, 2, 3, 4], share) == expected


@pytest.mark.parametrize(
    ("category", "seconds", "unlike"),
    [
        pytest.param("compile", 2.9, False, id="within a percent"),
        pytest.param("compile", 3.1, True, id="known exactly"),
        pytest.param("leaving", 10.9, False, id="within a second of each start"),
        pytest.param("leaving", 11.1, True, id="more than a second of each start"),
        pytest.param("training", 10.9, False, id="an end that kubelets know in whole seconds"),
        pytest.param("training", 11.1, True, id="more than all ends"),
    ],
)
def test_an_account_is_held_to_a_percent_and_to_the_whole_seconds_of_kubelets(
    category: str, seconds: float, unlike: bool
) -> None:
    account = [("join", 200.0, 200.0 - seconds), (category, 100.0, 100.0 + seconds)]
    found = [text for text in report.unlike(account, starts=8) if text.startswith(f"account, {category}")]
    assert bool(found) is unlike, found


@pytest.mark.parametrize(("category", "unlike"), [("training", False), ("leaving", False), ("compile", True)])
def test_an_account_may_guess_the_end_of_a_start_of_which_nobody_heard(category: str, unlike: bool) -> None:
    account = [("join", 200.0, 200.0), (category, 100.0, 120.0)]
    assert bool(report.unlike(account, starts=8, unheard=1)) is unlike
    assert report.unlike(account, starts=8)


def test_pods_that_something_keeps_on_their_node_wait_to_the_operator_alone() -> None:
    account = [("training", 200.0, 200.0), ("waiting", 10.0, 50.0), ("image", 60.0, 20.0)]
    assert len(report.unlike(account, starts=4)) == 2
    assert report.unlike(account, starts=4, held_up=True) == []
    account[1] = ("waiting", 10.0, 60.0)
    (found,) = report.unlike(account, starts=4, held_up=True)
    assert found.startswith("account, waiting and image: 80.0 s by the operator, 70.0 s by the trainers")


def test_a_save_after_which_the_gang_trains_on_does_not_end_its_training() -> None:
    pod = account.PodTimes(name="p-0", attempt=0, process=0, created_s=0.0, bound_s=1.0, ended_s=60.0)
    said = [
        account.Word(10.0, "resumed restored_step=None training=True"),
        account.Word(20.0, "preempted saved=True drill=True step=5 steps_lost=0 seconds_to_spare=47.6"),
        account.Word(59.0, "preempted saved=True drill=False step=50 steps_lost=0 seconds_to_spare=59.8"),
    ]
    (life,) = account.lives([pod], {"p-0": said}, [], end_s=60.0)
    assert (life.trained_s, life.stopped_s, life.gone_s) == (10.0, 59.0, 60.0)


def life(pod: str, *, created_s: float, restored: int | None, steps: Mapping[int, float]) -> Life:
    """A start that has joined a second after its pods were made, if it came to that."""
    joined_s = None if restored is None else created_s + 1
    return Life(
        pod=pod,
        created_s=created_s,
        bound_s=created_s,
        started_s=created_s,
        joined_s=joined_s,
        restored_s=joined_s,
        trained_s=min(steps.values(), default=None),
        stopped_s=created_s + 50,
        gone_s=created_s + 50,
        restored_step=restored,
        steps=steps,
    )


OLD = life("old-0", created_s=0.0, restored=0, steps={1: 10.0, 2: 11.0, 3: 12.0})


@pytest.mark.parametrize(
    ("newest", "first_s"),
    [
        pytest.param([], None, id="the old start trains on"),
        pytest.param([life("new-0", created_s=20.0, restored=None, steps={})], None, id="it has not restored"),
        pytest.param([life("new-0", created_s=20.0, restored=3, steps={})], None, id="it has done no step"),
        pytest.param([life("new-0", created_s=20.0, restored=3, steps={4: 30.0, 5: 31.0})], 30.0, id="it trains"),
        pytest.param(
            [life("new-0", created_s=20.0, restored=3, steps={3: 20.5, 4: 30.0})], 30.0, id="a last step of the old one"
        ),
        pytest.param([life("again-0", created_s=20.0, restored=3, steps={4: 30.0})], None, id="the fault ends it, too"),
        pytest.param([life("new-0", created_s=10.0, restored=3, steps={4: 14.0})], None, id="it trained before"),
        pytest.param(
            [
                life("new-0", created_s=20.0, restored=3, steps={4: 30.0}),
                life("newer-0", created_s=40.0, restored=None, steps={}),
            ],
            None,
            id="one more start",
        ),
    ],
)
def test_a_job_has_gone_on_when_its_newest_start_has_restored_and_trained(
    newest: list[Life], first_s: float | None
) -> None:
    assert account.trains_anew([OLD, *newest], {"old-0", "again-0"}, since_s=15.0) == first_s
    assert account.trains_anew([], set(), since_s=15.0) is None


@pytest.mark.parametrize(
    ("start", "first_s"),
    [
        pytest.param(life("a-0", created_s=20.0, restored=3, steps={4: 30.0, 5: 31.0}), 30.0, id="its own steps"),
        pytest.param(
            life("a-0", created_s=20.0, restored=3, steps={3: 20.5, 4: 30.0}), 30.0, id="a last step of the old one"
        ),
        pytest.param(life("a-0", created_s=20.0, restored=3, steps={3: 20.5}), None, id="none of its own"),
        pytest.param(life("a-0", created_s=20.0, restored=None, steps={3: 20.5}), None, id="it has not joined"),
    ],
)
def test_the_first_step_of_a_start_is_one_that_came_after_it_had_joined(start: Life, first_s: float | None) -> None:
    assert account.first_step_s(start) == first_s


def test_steps_are_lost_to_the_next_start_that_restored() -> None:
    failed = life("failed-0", created_s=20.0, restored=None, steps={})
    new = life("new-0", created_s=30.0, restored=1, steps={2: 40.0})
    assert account.between([OLD, failed], 1) == (1, 0)
    assert account.between([OLD, failed, new], 1) == (2, 2)


@pytest.mark.parametrize(
    ("said", "lacking"),
    [
        pytest.param([], 0, id="none"),
        pytest.param(["no snapshot of step 2: the snapshot of step 1 is still sent, for 1.2 s"], 1, id="skipped"),
        pytest.param(["no snapshot of step 3: its server went", "no snapshot of step 3: again"], 1, id="said twice"),
        pytest.param(["no snapshot of step 1: there is no snapshot server for this process"], 0, id="not lost"),
        pytest.param(["snapshot is safe step=2 copies=1 bytes=5 sent_s=0.1"], 1, id="a single copy"),
        pytest.param(["snapshot is safe step=2 copies=2 bytes=5 sent_s=0.1"], 0, id="two copies"),
        pytest.param(["a periodic save failed"], 0, id="something else"),
    ],
)
def test_snapshots_of_lost_steps_that_are_lacking_are_counted(said: list[str], lacking: int) -> None:
    new = life("new-0", created_s=20.0, restored=1, steps={2: 30.0})
    words = {OLD.pod: [account.Word(10.0, message) for message in said]}
    assert account.lacking_snapshots([OLD, new], 1, words) == [lacking, 0]


def trained(name: str, created_s: float, restored: int, until: int) -> Life:
    """A start that trained from the step that it restored, up to another one."""
    steps = {step: created_s + 1 + step for step in range(restored + 1, until + 1)}
    return life(name, created_s=created_s, restored=restored, steps=steps)


def lost_too_many(lives: list[Life], words: Mapping[str, list[account.Word]], interval_steps: int) -> list[str]:
    lacking = account.lacking_snapshots(lives, 1, words)
    return account.lost_too_many(lives, 1, lacking, interval_steps=interval_steps, most=60)


@pytest.mark.parametrize(
    ("restored", "skipped", "interval_steps", "told"),
    [
        pytest.param(80, [], 10, None, id="two intervals"),
        pytest.param(79, [], 10, "21 steps lost, expected at most 20", id="more than two intervals"),
        pytest.param(70, [90], 10, None, id="one more for a snapshot that was skipped"),
        pytest.param(69, [90], 10, "31 steps lost, expected at most 30", id="more than that"),
        pytest.param(39, [50, 60, 70, 80, 90], 10, "61 steps lost, expected at most 60", id="more than saves cost"),
        pytest.param(40, [], 30, None, id="two intervals of saves"),
        pytest.param(99, [], 0, "1 steps lost, expected at most 0", id="announced"),
    ],
)
def test_a_start_loses_two_intervals_at_most(
    restored: int, skipped: list[int], interval_steps: int, told: str | None
) -> None:
    lives = [trained("a-0", 0.0, 0, 100), trained("b-0", 200.0, restored, restored + 1)]
    words = {"a-0": [account.Word(9.0, f"no snapshot of step {step}: it is late") for step in skipped]}
    found = lost_too_many(lives, words, interval_steps)
    assert [text.partition(";")[0] for text in found] == ([told] if told else [])


def test_each_start_is_judged_alone() -> None:
    """One may lose no more because another one lost less, or lacks snapshots."""
    lives = [trained("a-0", 0.0, 0, 100), trained("b-0", 200.0, 85, 110), trained("c-0", 400.0, 95, 96)]
    assert lost_too_many(lives, {}, 10) == [], "15 steps each"
    later = [*lives[:2], trained("c-0", 400.0, 85, 86)]
    words = {"a-0": [account.Word(9.0, "no snapshot of step 90: it is late")]}
    assert len(lost_too_many(later, words, 10)) == 1


def test_between_two_faults_nothing_starts_and_no_step_is_lost() -> None:
    new = life("new-0", created_s=20.0, restored=1, steps={2: 30.0})
    assert account.beside([OLD], 1, "fault 1", 0) == []
    assert account.beside([OLD, new], 2, "fault 1", 0) == []
    lost = "2 steps lost after fault 1 was judged, expected none"
    assert account.beside([OLD, new], 1, "fault 1", 0) == [
        "1 starts after fault 1 was judged, expected at most 0",
        lost,
    ]
    assert account.beside([OLD, new], 1, "fault 1", 1) == [lost]
    assert account.beside([OLD, new], 1, "fault 1", 0, one_by_one=True) == [lost]


@pytest.mark.parametrize(
    ("kind", "starts", "later"),
    [
        pytest.param("drain", 1, (1, 0, 0), id="announced"),
        pytest.param("two-notices", 2, (2, 1, 0), id="announced twice"),
        pytest.param("operator-away", 1, (1, 0, 0), id="announced without a record"),
        pytest.param("node-off", None, (2, 1, 0), id="not announced, with two records"),
        pytest.param("process-0-killed", None, (0, 0, 0), id="not announced, without a record"),
        pytest.param("drill", 0, (0, 0, 0), id="announced, and it goes on"),
        pytest.param("dns-away", 0, (0, 0, 0), id="not announced, and it goes on"),
        pytest.param("kueue-preemption", 1, (1, 0, 0), id="announced by the queue"),
        pytest.param("storage-503", 0, (0, 0, 0), id="of the store, and it goes on"),
    ],
)
def test_a_fault_leads_to_no_more_starts_than_it_has_notices(
    kind: str, starts: int | None, later: tuple[int, ...]
) -> None:
    assert KINDS[kind].starts == starts
    assert tuple(map(KINDS[kind].later_starts, range(3))) == later


def preemptions(*causes: str) -> list[dict[str, Any]]:
    return [{"metadata": {"name": f"job-{n}"}, "spec": {"cause": cause}} for n, cause in enumerate(causes)]


DRAIN = Owner("fault 1, drain", 1, frozenset({"Drain"}))
QUIET = Owner("fault 2, dns-away", 0, frozenset())
LOST = Owner("fault 3, node-off", 2, frozenset({"NodeLost"}))


def owned(*things: tuple[Owner, int], causes: tuple[str, ...], excused: bool = False) -> list[str]:
    """Lets things happen, each when there were so many of the records; returns the surplus in the end."""
    owners, every = Owners(), preemptions(*causes)
    for owner, there in things:
        owners.begin(owner, every[:there])
        if excused:
            owners.excuse(owner.name)
    owners.note(every)
    return owners.surplus()


def test_each_preemption_of_a_job_belongs_to_a_fault() -> None:
    assert owned((DRAIN, 0), (QUIET, 1), (LOST, 1), causes=("Drain", "NodeLost", "NodeLost")) == []


@pytest.mark.parametrize(
    ("things", "causes", "found"),
    [
        pytest.param([(DRAIN, 1)], ["Drain", "Drain"], "job-0 (Drain) belongs to nothing: it came after its start"),
        pytest.param([(DRAIN, 0), (QUIET, 2)], ["Drain", "Drain"], "job-1 (Drain) belongs to nothing: it came after"),
        pytest.param([(QUIET, 0)], ["Drain"], "after fault 2, dns-away, which has 0 at most, of no cause"),
        pytest.param([(LOST, 0)], ["PodDeletion"], "after fault 3, node-off, which has 2 at most, of NodeLost"),
    ],
)
def test_a_preemption_beside_those_of_the_faults_is_named(
    things: list[tuple[Owner, int]], causes: list[str], found: str
) -> None:
    (surplus,) = owned(*things, causes=tuple(causes))
    assert found in surplus


def test_a_fault_that_was_not_as_expected_may_have_any_preemption() -> None:
    assert owned((QUIET, 0), (DRAIN, 2), causes=("Drain", "NodeLost", "Drain"), excused=True) == []


def test_training_stands_still_from_the_stop_of_one_start_until_the_next_one_trains() -> None:
    stopped = dataclasses.replace(OLD, stopped_s=30.0)
    between = life("again-0", created_s=40.0, restored=3, steps={4: 45.0})
    new = life("new-0", created_s=60.0, restored=4, steps={5: 70.0})
    assert account.stood_s([stopped, new], 20.0, 70.0) == 40.0
    assert account.stood_s([stopped, dataclasses.replace(between, stopped_s=50.0), new], 20.0, 70.0) == 35.0
    assert account.stood_s([OLD], 20.0, 30.0) == 0.0


def test_an_authority_in_its_last_year_is_followed_and_what_it_has_signed_can_be_checked_with_it() -> None:
    now = time.time()
    made = renewed(OwnCertificates(), "gracepoint", ["gp"], now)
    assert made.leaf is not None
    older = last_year_of(made.authorities[0], now)
    assert issuers(made.leaf.chain, [older.certificate]) == [older.certificate]
    ssl.create_default_context(cadata=older.certificate.pem)
    state = renewed(OwnCertificates((*made.authorities, older), made.leaf), "gracepoint", ["gp"], now)
    assert (state.authorities[:2], len(state.authorities)) == ((*made.authorities, older), 3)
    assert state.leaf == made.leaf
