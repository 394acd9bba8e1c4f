"""What changes the account of a workload, and what does not."""

from __future__ import annotations

import dataclasses
import random

import pytest

from gracepoint_operator.goodput.accounts import GoodputLedger, is_later, read, written
from gracepoint_operator.goodput.life import (
    BlockedTimes,
    Category,
    Moment,
    PodsObservation,
    ProcessTimes,
    StallTimes,
    StepMark,
    total_ms,
)
from gracepoint_operator.workloads import WorkloadIdentity

NEW = GoodputLedger(since_ms=0)


def moment(at_ms: int) -> Moment:
    return Moment(stamp_ms=at_ms // 1000 * 1000, at_ms=at_ms)


def pods(attempt: int, created: int, **seen: int | None) -> PodsObservation:
    """Pods that are created, bound two seconds later, and started three seconds after that."""
    return PodsObservation(
        attempt=attempt,
        created=moment(created),
        bound=moment(created + 2000),
        started=moment(created + 5000),
        broke_ms=seen.get("broke"),
        gone_ms=seen.get("gone"),
    )


def says(session: str, attached: int, **said: int | None) -> ProcessTimes:
    """A process that joins within a second, restores in two and compiles in four."""
    return ProcessTimes(
        session=session,
        attempt=said.get("attempt") or 0,
        created_ms=attached // 1000 * 1000,
        attached_ms=attached,
        joined_ms=attached + 1000,
        restored_ms=attached + 3000,
        first_step=said.get("first_step") or 0,
        trained_ms=attached + 7000,
        left_ms=said.get("left"),
        saving_ms=said.get("saving") or 0,
        saves=said.get("saves") or 0,
        saves_ms=said.get("saves_ms") or 0,
    )


#: Begins to train at 20 s, is at step 100 after 10 s of training, leaves at 35 s after a save of a second.
FIRST = (
    pods(0, 2000),
    dataclasses.replace(
        says("a", 13_000, left=36_000, saving=1000),
        created_ms=2000,
        marks=(StepMark(100, 10_000), StepMark(150, 15_000)),
    ),
    pods(0, 2000, broke=37_000, gone=38_000),
)


def ledger_of(*changes: PodsObservation | ProcessTimes | StallTimes | BlockedTimes) -> GoodputLedger:
    ledger = NEW
    for change in changes:
        ledger = ledger.with_observation(change)
    return ledger


def second(first_step: int) -> tuple[PodsObservation, ProcessTimes]:
    told = dataclasses.replace(says("b", 50_000, first_step=first_step, attempt=1), created_ms=40_000)
    return pods(1, 40_000), told


def test_each_second_of_a_life_is_in_one_category() -> None:
    assert ledger_of(*FIRST).spent(40_000) == {
        Category.WAITING: 2000 + 2000,
        Category.SCHEDULING: 2000,
        Category.IMAGE: 3000,
        Category.JOIN: 7000,
        Category.RESTORE: 2000,
        Category.COMPILE: 4000,
        Category.TRAINING: 15_000,
        Category.SAVING: 1000,
        Category.LEAVING: 2000,
    }


def blocked(since_ms: int, until_ms: int | None = None) -> BlockedTimes:
    return BlockedTimes(since_ms=since_ms, until_ms=until_ms)


def test_what_blocks_a_start_is_taken_from_the_stages_that_it_is_in() -> None:
    ledger = ledger_of(*FIRST, blocked(1000), blocked(1000, 5500))
    spent = ledger.spent(40_000)
    assert spent[Category.BLOCKED] == 4500
    assert (spent[Category.WAITING], spent.get(Category.SCHEDULING), spent[Category.IMAGE]) == (1000 + 2000, None, 1500)
    assert total_ms(spent) == 40_000


def test_what_blocks_while_processes_join_or_train_is_not_counted() -> None:
    plain = ledger_of(*FIRST).spent(40_000)
    assert ledger_of(*FIRST, blocked(8000), blocked(8000, 30_000)).spent(40_000) == plain


def test_a_gang_that_is_blocked_now_is_so_until_the_end_is_seen() -> None:
    ledger = ledger_of(blocked(1000))
    assert (ledger.state(), ledger.spent(9000)) == (Category.BLOCKED, {Category.WAITING: 1000, Category.BLOCKED: 8000})
    ended = ledger.with_observation(blocked(1000, 9000))
    assert (ended.state(), ended.spent(10_000)[Category.BLOCKED]) == (Category.WAITING, 8000)


def test_two_replicas_may_tell_the_same_block_in_any_order() -> None:
    changes = [blocked(1000), blocked(1000, 5000), blocked(1000), blocked(1000, 5040)]
    ledger = ledger_of(*FIRST, *changes)
    assert (ledger.blocked, ledger.blocked_since_ms) == (((1000, 5040),), None)
    assert ledger.with_observation(changes[-1]) == ledger


def test_blocked_times_stay_with_the_lives_that_are_settled() -> None:
    ledger = ledger_of(
        pods(0, 2000), blocked(2500), blocked(2500, 6000), pods(0, 2000, broke=8000, gone=8000), pods(1, 10_000)
    )
    assert ledger.settled[Category.BLOCKED] == 3500
    assert total_ms(ledger.spent(20_000)) == 20_000


def test_blocked_times_are_written_and_read() -> None:
    ledger = ledger_of(*FIRST, blocked(1000, 5500), blocked(39_000))
    workload = WorkloadIdentity("JobSet", "team", "train", "uid")
    assert read(written(ledger, workload, 40_000)) == ledger


def test_no_step_is_lost_if_the_newest_one_is_restored() -> None:
    ledger = ledger_of(*FIRST, *second(150))
    assert Category.RECOMPUTATION not in ledger.spent(60_000)
    assert (ledger.disruptions, ledger.all_losses) == (1, 0)


def test_what_was_trained_after_the_restored_step_is_recomputation() -> None:
    spent = ledger_of(*FIRST, *second(100)).spent(60_000)
    assert spent[Category.RECOMPUTATION] == 5000
    assert spent[Category.TRAINING] == 10_000 + 3000
    assert total_ms(spent) == 60_000


def test_a_step_between_two_known_ones_counts_in_proportion() -> None:
    assert ledger_of(*FIRST, *second(120)).spent(60_000)[Category.RECOMPUTATION] == 3000


def test_without_a_checkpoint_everything_is_lost() -> None:
    ledger = ledger_of(*FIRST, *second(0))
    assert ledger.spent(60_000)[Category.RECOMPUTATION] == 15_000
    assert ledger.all_losses == 1


def test_a_step_saved_and_not_reported_counts_at_the_pace_until_then() -> None:
    killed = (
        pods(0, 2000),
        dataclasses.replace(says("a", 13_000), created_ms=2000, marks=(StepMark(100, 10_000),)),
        pods(0, 2000, broke=50_000, gone=50_000),
    )
    again = (pods(1, 60_000), dataclasses.replace(says("b", 70_000, first_step=200, attempt=1), created_ms=60_000))
    assert ledger_of(*killed, *again).spent(80_000)[Category.RECOMPUTATION] == 30_000 - 20_000


def test_a_life_that_reported_no_step_counts_with_the_pace_of_the_next_one() -> None:
    killed = (
        pods(0, 2000),
        dataclasses.replace(says("a", 13_000), created_ms=2000),
        pods(0, 2000, broke=50_000, gone=50_000),
    )
    told = dataclasses.replace(says("b", 70_000, first_step=200, attempt=1), created_ms=60_000)
    ledger = ledger_of(*killed, pods(1, 60_000), told)
    assert (ledger.all_losses, Category.RECOMPUTATION in ledger.spent(78_000)) == (0, False), "no pace is known"
    ledger = ledger.with_process_times(dataclasses.replace(told, marks=(StepMark(210, 1000),)))
    assert (ledger.all_losses, ledger.spent(78_000)[Category.RECOMPUTATION]) == (1, 30_000 - 20_000)


def test_a_life_that_reported_no_step_lost_no_more_than_it_would_have_saved() -> None:
    """The replica that had heard its steps was lost with its node, and the next life makes them twice as fast."""
    killed = (
        pods(0, 2000),
        dataclasses.replace(says("a", 13_000), created_ms=2000),
        pods(0, 2000, broke=50_000, gone=50_000),
    )
    told = dataclasses.replace(
        says("b", 70_000, first_step=280, attempt=1, saves=3), created_ms=60_000, marks=(StepMark(340, 3000),)
    )
    spent = ledger_of(*killed, pods(1, 60_000), told).spent(81_000)
    assert spent[Category.RECOMPUTATION] == 1500
    assert total_ms(spent) == 81_000


@pytest.mark.parametrize("ended", [35_400, 36_200], ids=["before by the kubelet", "after"])
def test_a_process_that_says_it_leaves_has_not_ended(ended: int) -> None:
    spent = ledger_of(*FIRST[:2], pods(0, 2000, broke=ended, gone=ended)).spent(40_000)
    assert spent[Category.TRAINING] == 15_000
    assert spent.get(Category.LEAVING, 0) == max(0, ended - 36_000)


HALT = StallTimes(attempt=0, created_ms=2000, stalled_ms=36_000)
KILLED = (FIRST[0], dataclasses.replace(FIRST[1], left_ms=None), pods(0, 2000, broke=60_000, gone=61_000))


@pytest.mark.parametrize("told", [1, 2], ids=["once", "by two processes"])
def test_a_life_that_stalls_until_it_ends_trained_until_its_last_step(told: int) -> None:
    halts = [dataclasses.replace(HALT, stalled_ms=36_000 + later) for later in range(told)]
    ledger = ledger_of(*KILLED[:2], *halts)
    assert ledger.state() is Category.TRAINING, "it may go on"
    ended = ledger.with_pods(KILLED[2]).spent(61_000)
    assert (ended[Category.TRAINING], ended[Category.LEAVING]) == (15_000, 25_000)


def test_a_stall_that_is_over_was_training() -> None:
    told = dataclasses.replace(KILLED[1], marks=(*KILLED[1].marks, StepMark(151, 30_000)))
    ended = ledger_of(*KILLED[:2], HALT, told, KILLED[2]).spent(61_000)
    assert (ended[Category.TRAINING], ended[Category.LEAVING]) == (39_000, 1000)


def test_a_stall_that_is_reported_again_after_it_is_over_changes_nothing() -> None:
    """Each replica takes what it was told, whenever it can write it."""
    told = dataclasses.replace(KILLED[1], marks=(*KILLED[1].marks, StepMark(151, 30_000)))
    ledger = ledger_of(*KILLED[:2], HALT, told)
    assert ledger.with_stall(HALT) == ledger


def test_a_step_before_a_stall_that_comes_late_does_not_end_it() -> None:
    told = dataclasses.replace(KILLED[1], marks=(*KILLED[1].marks, StepMark(151, 15_900)))
    assert ledger_of(*KILLED[:2], HALT, told, KILLED[2]).spent(61_000)[Category.TRAINING] == 15_000


def test_a_stall_that_ends_with_a_preemption_counts_until_the_save() -> None:
    assert ledger_of(FIRST[0], KILLED[1], HALT, *FIRST[1:]).spent(40_000) == ledger_of(*FIRST).spent(40_000)


def test_a_save_that_turns_out_to_be_a_stall_takes_no_time_from_the_training_before() -> None:
    """It waits in a periodic save for a process that was lost. Training ended when that began, at 35 s."""
    at_save = dataclasses.replace(KILLED[1], saving_ms=20_000)
    at_end = dataclasses.replace(KILLED[1], left_ms=35_000, saving_ms=0)
    spent = ledger_of(FIRST[0], at_save, at_end, at_save, KILLED[2]).spent(61_000)
    assert (spent[Category.TRAINING], spent.get(Category.SAVING), spent[Category.LEAVING]) == (15_000, None, 26_000)


@pytest.mark.parametrize(
    "stall_times",
    [
        pytest.param(dataclasses.replace(HALT, attempt=1), id="of another attempt"),
        pytest.param(dataclasses.replace(HALT, created_ms=1000), id="of pods before"),
    ],
)
def test_a_stall_of_another_life_changes_nothing(stall_times: StallTimes) -> None:
    ledger = ledger_of(*KILLED[:2])
    assert ledger.with_stall(stall_times) == ledger


@pytest.mark.parametrize(
    ("created", "leaving"),
    [pytest.param(40_000, 2000, id="soon"), pytest.param(90_000, 10_000, id="long after it")],
)
@pytest.mark.parametrize("told", ["by itself", "by the next life"])
def test_an_end_that_nobody_saw_is_soon_after_the_life_left(told: str, created: int, leaving: int) -> None:
    if told == "by itself":
        ledger = ledger_of(*FIRST[:2], pods(1, created))
    else:
        former = dataclasses.replace(FIRST[1], attempt=1, created_ms=created, of_former=True)
        ledger = ledger_of(*KILLED[:2], pods(1, created), former, former)
    spent = ledger.spent(created)
    assert (spent[Category.TRAINING], spent[Category.LEAVING]) == (15_000, leaving)
    assert spent[Category.WAITING] == 2000 + created - 36_000 - leaving
    assert total_ms(spent) == created


def test_an_end_that_nobody_saw_is_no_earlier_than_that_of_the_process_that_was_seen() -> None:
    """Training had stalled at 36 s, long before its processes ended."""
    spent = ledger_of(*FIRST[:2], pods(0, 2000, broke=60_000), pods(1, 90_000)).spent(90_000)
    assert (spent[Category.TRAINING], spent[Category.LEAVING]) == (15_000, 34_000)


def test_a_life_whose_end_nobody_saw_trained_until_it_would_have_saved() -> None:
    """All replicas were lost with the node of one of its processes. It saved every 5 s of training."""
    told = dataclasses.replace(KILLED[1], saving_ms=3000, saves=3, saves_ms=3000)
    unseen = ledger_of(FIRST[0], told, *second(150))
    assert unseen.spent(60_000)[Category.TRAINING] > 15_000
    later = (pods(1, 90_000), dataclasses.replace(second(150)[1], created_ms=90_000, attached_ms=100_000))
    later = (later[0], dataclasses.replace(later[1], joined_ms=101_000, restored_ms=103_000, trained_ms=107_000))
    spent = ledger_of(FIRST[0], told, *later, later[1]).spent(107_000)
    # Step 150 was passed after 15 s of training and 3 s of saving, at 38 s.
    assert (spent[Category.TRAINING], spent[Category.RECOMPUTATION]) == (15_000, 7500)
    assert (spent[Category.LEAVING], spent[Category.WAITING]) == (10_000, 2000 + 90_000 - 38_000 - 17_500)
    assert total_ms(spent) == 107_000


@pytest.mark.parametrize("first", ["what the next life did", "when the life before left"])
def test_when_a_life_left_is_known_better_than_guessed(first: str) -> None:
    """The next start tells both in one message, of itself first. It saved every 5 s of training."""
    before = dataclasses.replace(KILLED[1], saving_ms=3000, saves=3, saves_ms=3000)
    after = dataclasses.replace(says("b", 100_000, first_step=150, attempt=1), created_ms=90_000)
    former = dataclasses.replace(before, attempt=1, created_ms=90_000, left_ms=39_500, of_former=True)
    said = (after, former) if first == "what the next life did" else (former, after)
    spent = ledger_of(FIRST[0], before, pods(1, 90_000), *said, *said).spent(107_000)
    assert (spent[Category.LEAVING], total_ms(spent)) == (10_000, 107_000)
    assert spent[Category.WAITING] == 2000 + 90_000 - 49_500


def test_an_end_that_was_seen_is_no_guess() -> None:
    former = dataclasses.replace(FIRST[1], attempt=1, created_ms=50_000, of_former=True)
    ledger = ledger_of(*KILLED[:2], pods(0, 2000, broke=37_000, gone=38_000), pods(1, 50_000), former)
    assert ledger.spent(50_000)[Category.LEAVING] == 2000


def test_the_start_before_another_is_known_by_its_session() -> None:
    ledger = ledger_of(*FIRST, *second(100))
    assert ledger.session_before("b", by_ms=30_000) == "a"
    assert ledger.session_before("b", by_ms=1000) == ""  # its pods did not exist then
    assert ledger.session_before("a", by_ms=30_000) == ""
    assert ledger.session_before("c", by_ms=30_000) == ""
    workload = WorkloadIdentity("JobSet", "team", "train", "uid")
    assert read(written(ledger, workload, 60_000)).session_before("b", by_ms=30_000) == "a"


def test_a_start_of_which_nothing_was_heard_is_between_those_before_and_after_it() -> None:
    third = dataclasses.replace(says("c", 70_000, attempt=2), created_ms=60_000)
    ledger = ledger_of(*FIRST, pods(1, 40_000), pods(1, 40_000, broke=50_000, gone=51_000), pods(2, 60_000), third)
    assert [life.session for life in ledger.lives] == ["a", "c"]
    assert ledger.session_before("c", by_ms=45_000) == ""


def test_losses_wait_until_a_later_life_restores() -> None:
    died = pods(1, 40_000, broke=47_000, gone=47_000)
    third = (pods(2, 50_000), dataclasses.replace(says("c", 60_000, first_step=100, attempt=2), created_ms=50_000))
    before = ledger_of(*FIRST, died)
    assert Category.RECOMPUTATION not in before.spent(49_000)
    after = ledger_of(*FIRST, died, *third)
    assert after.spent(80_000)[Category.RECOMPUTATION] == 5000
    assert (after.disruptions, after.all_losses, len(after.lives)) == (2, 1, 2)


def test_the_order_in_which_one_life_becomes_known_does_not_matter() -> None:
    expected = ledger_of(*FIRST)
    told_late = ledger_of(FIRST[0], FIRST[2], FIRST[1])
    assert told_late.spent(40_000) == expected.spent(40_000)


def test_what_is_known_twice_changes_nothing() -> None:
    changes: list[PodsObservation | ProcessTimes] = [*FIRST, *second(100)]
    once = ledger_of(*changes)
    assert ledger_of(*(change for change in changes for _ in range(2))) == once
    assert ledger_of(*changes, *random.Random(1).sample(changes, len(changes))) == once


def test_containers_that_start_again_in_their_pods_are_a_new_life() -> None:
    again = dataclasses.replace(says("b", 60_000, first_step=100), created_ms=2000)
    ledger = ledger_of(*FIRST[:1], dataclasses.replace(FIRST[1], left_ms=None), again)
    assert ledger.disruptions == 1
    assert ledger.state() is Category.TRAINING
    assert total_ms(ledger.spent(70_000)) == 70_000


def test_containers_about_which_nothing_is_known_are_unknown_time() -> None:
    ledger = ledger_of(pods(0, 2000))
    assert ledger.state() is Category.UNKNOWN
    assert ledger.spent(100_000)[Category.UNKNOWN] == 100_000 - 7000


def test_nothing_counts_after_the_workload_has_finished() -> None:
    ledger = ledger_of(*FIRST).with_end(39_000)
    assert total_ms(ledger.spent(10**9)) == 38_000
    assert ledger.state() is None
    assert ledger.with_pods(pods(1, 100_000)) == ledger


def test_a_pod_made_again_while_training_delays_no_start() -> None:
    late = dataclasses.replace(pods(0, 2000), bound=moment(30_000), started=moment(31_000))
    assert ledger_of(*FIRST[:2], late).spent(33_000)[Category.SCHEDULING] == 2000


def test_a_process_of_an_attempt_that_was_not_seen_changes_nothing() -> None:
    ledger = ledger_of(*FIRST[:1], dataclasses.replace(FIRST[1], left_ms=None))
    assert ledger.with_process_times(says("b", 60_000, attempt=1)) == ledger


def test_processes_know_better_than_kubelets_when_they_were_started() -> None:
    told = dataclasses.replace(FIRST[1], started_ms=6450)
    for order in ((FIRST[0], told), (FIRST[0], told, FIRST[0]), (FIRST[0], FIRST[1], told)):
        spent = ledger_of(*order).spent(40_000)
        assert (spent[Category.IMAGE], spent[Category.JOIN]) == (6450 - 4000, 14_000 - 6450)


def test_a_start_that_is_reported_late_counts_from_the_fastest_message() -> None:
    told = dataclasses.replace(FIRST[1], started_ms=6450)
    late = dataclasses.replace(told, attached_ms=13_700, joined_ms=14_700, started_ms=7150, restored_ms=16_700)
    for order in ((late, told), (told, late)):
        assert ledger_of(FIRST[0], *order).spent(40_000)[Category.IMAGE] == 6450 - 4000


def test_a_clock_that_is_behind_starts_no_process_before_its_pod() -> None:
    ledger = ledger_of(FIRST[0], dataclasses.replace(FIRST[1], started_ms=1500))
    assert ledger.current is not None
    assert ledger.current.started_ms == ledger.current.created_ms == 2000
    assert total_ms(ledger.spent(40_000)) == 40_000


@pytest.mark.parametrize(("created", "later"), [(3000, False), (5000, True)], ids=["a clock behind", "another life"])
def test_a_pod_that_is_made_long_after_the_start_is_later(created: int, later: bool) -> None:
    """Pods that were made at 2.9 s and 3.1 s, whose processes say by the operator's clock that they began at 2.95 s."""
    ledger = ledger_of(pods(0, 2900), dataclasses.replace(FIRST[1], started_ms=2950))
    assert ledger.current is not None
    assert is_later(ledger.current, created) == later


def test_all_pods_are_bound_when_one_made_in_the_same_second_is() -> None:
    one, both = (
        dataclasses.replace(pods(0, 2000), started=None, pods=count, bound=Moment(stamp_ms=2000, at_ms=at_ms))
        for count, at_ms in ((1, 2100), (2, 2400))
    )
    later = dataclasses.replace(both, bound=Moment(stamp_ms=2000, at_ms=2600))  # of a replica that is slow
    for order in ((one, both), (one, both, later), (both, one)):
        assert ledger_of(*order).spent(10_000)[Category.SCHEDULING] == 400


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the late message first", "the late message last"])
def test_times_are_those_of_the_message_that_took_least(order: tuple[int, int]) -> None:
    seen, punctual, ended = FIRST
    first = dataclasses.replace(punctual, trained_ms=None, left_ms=None, saving_ms=0, marks=())
    late = {
        name: getattr(first, name) + 700
        for name in ("attached_ms", "joined_ms", "restored_ms")  # it took 0.7 s longer than the other
    }
    messages = (dataclasses.replace(first, **late), punctual)
    ledger = ledger_of(seen, *(messages[number] for number in order), ended)
    assert ledger.spent(40_000) == ledger_of(*FIRST).spent(40_000)


@pytest.mark.parametrize("session", ["", "b"], ids=["of which nothing was told", "of another process"])
def test_a_process_of_a_settled_life_says_nothing_of_the_current(session: str) -> None:
    """The other replica has settled it meanwhile, after the note of it was read."""
    seen, told = second(150)
    ledger = ledger_of(seen, dataclasses.replace(told, session=session)) if session else ledger_of(seen)
    late = dataclasses.replace(FIRST[1], attempt=1, created_ms=40_000, attached_ms=45_000, of_former=True)
    assert ledger.with_process_times(late) == ledger
