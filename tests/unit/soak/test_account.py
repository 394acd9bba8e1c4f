"""The account of a soak: where the time of a run went, by its own records."""

from __future__ import annotations

import math

from demo.records import Step
from tests.soak import trainer
from tests.soak.account import CATEGORIES, PodTimes, Word, compared, lives, spent, steps_lost


def pod(name: str, attempt: int, process: int, *times: float) -> PodTimes:
    created, bound, ended = times
    return PodTimes(name, attempt, process, created, bound, ended)


def said(began: float, joined: float, restored: float, step: int, left: float | None = None) -> list[Word]:
    words = [
        Word(began, trainer.BEGAN),
        Word(joined, "attached process=0 of=2 attempt=a directory=/d"),
        Word(restored, f"resumed restored_step={step or None} training=False"),
    ]
    return words if left is None else [*words, Word(left, "preempted saved=True drill=False step=9 steps_lost=0")]


def step(number: int, unix_s: float, process: int = 0, attempt: int = 0) -> Step:
    return Step(process=process, attempt=attempt, step=number, loss="0x1p0", batch="", unix_s=unix_s)


PODS = [
    pod("a-0", 0, 0, 1, 2, 31),
    pod("a-1", 0, 1, 1, 3, 32),
    pod("b-0", 1, 0, 34, 35, 60),
    pod("b-1", 1, 1, 34, 36, 60),
]
WORDS = {
    "a-0": said(5, 8, 9, 0, left=30),
    "a-1": said(6, 8, 9, 0, left=30),
    "b-0": said(38, 40, 41, 10),
    "b-1": said(38, 40, 41, 10),
}


def steps(*, saved: int) -> list[Step]:
    first = [step(n, 9 + 2 * n) for n in range(1, 11)]  # the first step is done at 11
    again = [step(n, 43 + n - saved, attempt=1) for n in range(saved + 1, saved + 10)]
    return first + again


def test_every_second_is_in_one_category() -> None:
    found = lives(PODS, WORDS, steps(saved=10), end_s=60)
    seconds = spent(found, since_s=0, end_s=60)
    assert seconds == {
        "waiting": 1 + 2,
        "scheduling": 2 + 2,
        "image": 3 + 2,
        "join": 2 + 2,
        "restore": 1 + 1,
        "compile": 2 + 3,
        "training": 19 + 16,
        "recomputation": 0,
        "leaving": 2,
    }
    assert math.isclose(sum(seconds.values()), 60)
    assert steps_lost(found, 0) == 0


def test_the_first_step_is_done_when_its_process_says_so() -> None:
    """It is recorded when the second one begins."""
    trains = Word(10.5, "resumed restored_step=None training=True")
    found = lives(PODS, {**WORDS, "a-0": [*WORDS["a-0"], trains]}, steps(saved=10), end_s=60)
    seconds = spent(found, since_s=0, end_s=60)
    assert (seconds["compile"], seconds["training"]) == (1.5 + 3, 19.5 + 16)


def test_steps_that_were_done_again_are_recomputation() -> None:
    words = {**WORDS, "a-0": said(5, 8, 9, 0), "a-1": said(6, 8, 9, 0), "b-0": said(38, 40, 41, 6)}
    found = lives(PODS, words, steps(saved=6), end_s=60)
    seconds = spent(found, since_s=0, end_s=60)
    # Step 6 was done at 21, and the first process ended at 31 without a save.
    assert (seconds["training"], seconds["recomputation"], seconds["leaving"]) == (10 + 16, 10, 1)
    assert steps_lost(found, 0) == 4
    assert math.isclose(sum(seconds.values()), 60)


def test_a_start_that_ended_before_its_first_step_has_no_training() -> None:
    words = {"a-0": said(5, 8, 9, 0)[:2], "a-1": said(6, 8, 9, 0)[:2], "b-0": WORDS["b-0"], "b-1": WORDS["b-1"]}
    found = lives(PODS, words, [step(n, 43 + n - 10, attempt=1) for n in range(11, 20)], end_s=60)
    seconds = spent(found, since_s=0, end_s=60)
    assert (seconds["restore"], seconds["training"]) == (23 + 1, 16)
    assert math.isclose(sum(seconds.values()), 60)


def test_a_suspended_job_starts_again_under_the_same_number() -> None:
    pods = [*PODS[:2], pod("c-0", 0, 0, 34, 35, 60), pod("c-1", 0, 1, 34, 36, 60)]
    found = lives(pods, {}, [], end_s=60)
    assert [life.created_s for life in found] == [1, 34]


def test_saves_are_training_in_a_comparison() -> None:
    rows = {
        category: (own, theirs) for category, own, theirs in compared({"training": 9}, {"training": 7, "saving": 2})
    }
    assert rows["training"] == (9, 9)
    assert list(rows) == list(CATEGORIES)
