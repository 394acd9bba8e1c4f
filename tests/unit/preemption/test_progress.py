"""Stages of a save: seconds since the notice, and their summary over processes."""

from __future__ import annotations

import json
import time
from typing import cast

import pytest

from gracepoint.multihost import InMemoryStore
from gracepoint.preemption.exit import ProcessExit
from gracepoint.preemption.forecast import TimeBudget
from gracepoint.preemption.outcome import Outcome, Shared
from gracepoint.preemption.reporter import EpochProgress, Reporter, Stages, summary
from gracepoint.preemption.substitute import Substitute
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import SingleProcess
from gracepoint.receivers import Disruption, Mailbox, Sender
from gracepoint.settings import Settings
from gracepoint.wire.messages import Phase
from tests.unit.checkpoint.fakes.thread_limit import refuse_threads
from tests.unit.multihost.fakes.gangs import gangs
from tests.unit.preemption.fakes.reporters import Sent, without_operator
from tests.unit.preemption.fakes.time_left import Left


def test_stages_are_counted_from_the_notice_in_seconds() -> None:
    now_s = iter([11.0, 12.5])
    stages = Stages(10.0, lambda: next(now_s))
    assert stages.last is None
    stages.mark("frozen")
    stages.mark("agreed")
    assert json.loads(stages.to_json()) == {"frozen": 1.0, "agreed": 2.5}
    assert stages.last == "agreed"


def test_an_unknown_stage_is_an_error() -> None:
    with pytest.raises(ValueError, match="'frozzen'"):
        Stages(0.0, lambda: 0.0).mark("frozzen")


def test_summary_covers_all_processes_and_stages_that_all_reached() -> None:
    found = summary(['{"frozen": 1.0, "written": 2.0}', '{"frozen": 2.0}', '{"frozen": 6.0, "written": 1.0}'])
    assert {k: (t.p50_s, t.max_s) for k, t in found.items()} == {"frozen": (2.0, 6.0)}


@pytest.mark.parametrize("runs", [True, False], ids=["process 0 runs", "process 0 does not run"])
def test_the_end_of_a_drill_is_reported_once_also_without_process_0(runs: bool) -> None:
    most_s = 60.0 if runs else 1.5  # time for an answer on a busy machine
    store, sent, mailbox = InMemoryStore(), Sent(), Mailbox(lambda: 0.0)
    primary, substitute = (
        Substitute(store, index, 2, ("pod-0",), Left(30.0 if runs else 2.0), most_s) for index in range(2)
    )
    if runs:
        primary.opened(5)
    group = gangs(2, store)[1]
    reporter = Reporter(cast(Sender, sent), Settings(), "session", group, mailbox, TimeSpent(lambda: 0.0))
    mailbox.post(Disruption(preemption="gpt-1", cause="Drill", signal="drill", remaining_s=30.0, drill=True))
    epoch = EpochProgress(5, True, Stages(0.0, lambda: 0.0), mailbox, reporter, substitute)
    epoch.report(Phase.FAILED, message="drill: not saved: the disk is full")
    mailbox.drop("gpt-1")  # a drill that failed is over at once
    substitute.wait(60)
    primary.close()
    if runs:
        assert sent.messages == []
    else:
        (told,) = sent.messages
        assert (told.preemption, told.phase) == ("gpt-1", Phase.FAILED)
        assert told.message.startswith("drill: not saved: the disk is full; process 0 (pod-0) does not answer")


@pytest.mark.parametrize(
    ("phase", "threads"),
    [(Phase.COMMITTED, True), (Phase.FAILED, False)],
    ids=["a commit", "a failure while the interpreter ends"],
)
def test_process_0_has_reported_an_end_before_its_session_ended(
    phase: Phase, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InMemoryStore()
    primary, other = (Substitute(store, index, 2, ("pod-0",), Left(30.0), most_s=60.0) for index in range(2))
    primary.opened(5)
    with monkeypatch.context() as ending:
        if not threads:  # as of Python 3.12 then
            refuse_threads(ending)
        without_operator_at(5, primary).report(phase)
        primary.close()
    told: list[str] = []
    other.report(5, told.append)
    other.wait(60)
    assert told == []


@pytest.mark.parametrize(
    ("index", "count", "reports"),
    [(0, 100, True), (1, 100, True), (2, 100, False), (5, 100, True)],
    ids=["process 0, if it lives", "the first other", "one of many more", "one of a few more"],
)
def test_a_preemption_of_which_process_0_does_not_hear_is_reported_by_a_few_others(
    index: int, count: int, reports: bool
) -> None:
    store, sent, clock = InMemoryStore(), Sent(), time.monotonic
    group, settings, mailbox = gangs(count, store)[index], Settings(), Mailbox(clock)
    mailbox.post(Disruption(preemption="gpt-1", cause="Spot", signal="taint", remaining_s=0.0))
    reporter = Reporter(cast(Sender, sent), settings, "session", group, mailbox, TimeSpent(clock))
    budget = TimeBudget(mailbox, settings, lambda: None, clock)
    process_exit = ProcessExit(store, index, count, clock=clock)
    substitute = Substitute(store, index, count, (), budget)
    outcome = Outcome(
        Shared(group, settings, clock, mailbox, budget, reporter, process_exit),
        committed_step=lambda: 7,
        current_step=lambda: 10,
        substitute=substitute,
    )
    outcome.unheard()
    told = [(report.preemption, report.phase) for report in sent.messages]
    assert told == ([("gpt-1", Phase.FAILED)] if reports else [])
    substitute.close()


def without_operator_at(number: int, substitute: Substitute) -> EpochProgress:
    clock = time.monotonic
    return EpochProgress(number, False, Stages(0.0, clock), Mailbox(clock), without_operator(), substitute)


def test_nothing_is_reported_after_the_end_whatever_other_threads_still_have_to_report() -> None:
    sent, mailbox = Sent(), Mailbox(lambda: 0.0)
    reporter = Reporter(cast(Sender, sent), Settings(), "session", SingleProcess(), mailbox, TimeSpent(lambda: 0.0))
    epoch = EpochProgress(5, False, Stages(0.0, lambda: 0.0), mailbox, reporter)
    epoch.report(Phase.DRAINED)
    epoch.succeeded()
    epoch.report(Phase.WRITTEN, step=2, bytes=9)
    epoch.report(Phase.COMMITTED)
    epoch.report(Phase.AGREED, ordinal=3)
    epoch.has_doubt("there is probably no time")
    phases = [report.phase for report in sent.messages]
    assert phases == [Phase.DRAINED, Phase.WRITTEN, Phase.COMMITTED]
    assert (sent.messages[-1].step, sent.messages[-1].bytes) == (2, 9)


@pytest.mark.parametrize(
    ("phases", "left_s"),
    [
        ([Phase.FROZEN, Phase.FAILED], 40.0),
        ([Phase.FROZEN, Phase.AGREED, Phase.FAILED], 40.0),
        ([Phase.FROZEN, Phase.PROMOTED], 40.0),
        ([Phase.FROZEN, Phase.AGREED, Phase.DRAINED, Phase.FAILED], 90.0),
        ([Phase.FROZEN, Phase.AGREED, Phase.DRAINED, Phase.WRITTEN, Phase.COMMITTED], 90.0),
        ([Phase.FROZEN, Phase.AGREED, Phase.WRITTEN, Phase.DURABLE, Phase.COMMITTED], 90.0),
    ],
    ids=[
        "its peers never came",
        "its peers never came to the agreed step",
        "its peers never came, and an older step is committed",
        "a save that failed",
        "a save",
        "a save by the training loop",
    ],
)
def test_training_ended_with_its_newest_step_unless_a_save_followed(phases: list[Phase], left_s: float) -> None:
    """The newest step was passed after 40 s, and the end is reported after 90 s."""
    clock_s, mailbox = [0.0], Mailbox(lambda: 0.0)
    time_spent = TimeSpent(lambda: clock_s[0])
    clock_s[0] = 30.0
    time_spent.trains(1)
    clock_s[0] = 90.0
    reporter = Reporter(None, Settings(), "session", SingleProcess(), mailbox, time_spent, lambda: 50.0)
    epoch = EpochProgress(5, False, Stages(0.0, lambda: 0.0), mailbox, reporter)
    for phase in phases:
        epoch.report(phase)
    assert time_spent.spent().left_s == left_s
