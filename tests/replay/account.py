"""Where the time of a run went, by its own records and by the ends of its processes. Pure.

It has the categories of the operator's account (docs/goodput.md), found in another way: from the steps that the
trainers recorded, from what they logged, from the moments at which the kernel ended their processes, and from a watch
of the pods. ``training`` has the time of saves here, as the records do not tell how long a step waited for one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from demo.records import Step
from tests.replay import trainer

CATEGORIES = (
    "training",
    "recomputation",
    "leaving",
    "waiting",
    "scheduling",
    "image",
    "join",
    "restore",
    "compile",
)
#: Categories that are compared as one. The operator knows from when on something other than time keeps pods from being
#: made or bound, which a watch of the pods does not show.
_TOGETHER = {"saving": "training", "scheduling": "waiting", "blocked": "waiting"}
_RESTORED = re.compile(r"resumed restored_step=(\d+|None) training=False")
_TRAINED = re.compile(r"resumed restored_step=(\d+|None) training=True")
_LEFT = re.compile(r"preempted saved=\w+ drill=False")  # to the library, each save after which it trains on is a drill
_JOINED = re.compile(r"attached process=")
#: A snapshot that was skipped, or that a single server has, so that the death of that server's node takes it.
NO_SNAPSHOT = re.compile(r"no snapshot of step (\d+): |snapshot is safe step=(\d+) copies=1 ")


@dataclasses.dataclass(frozen=True)
class PodTimes:
    """One pod. Times are seconds since the epoch; None: it did not come to that.

    Attributes:
        name: Its name.
        attempt: Number of the JobSet's restarts before it.
        process: Its completion index.
        created_s: When it was created.
        bound_s: When it was bound to a node.
        ended_s: When its process ended.
    """

    name: str
    attempt: int
    process: int
    created_s: float
    bound_s: float | None
    ended_s: float | None


@dataclasses.dataclass(frozen=True)
class Word:
    """A line that a process has logged."""

    unix_s: float
    message: str


@dataclasses.dataclass(frozen=True)
class Life:
    """One start of the gang. Times are seconds since the epoch; None: it did not come to that.

    Attributes:
        pod: Name of the pod of its first process.
        created_s: When its first pod was created.
        bound_s: When its last pod was bound.
        started_s: When its last process was started.
        joined_s: When its process 0 had joined the others.
        restored_s: When its process 0 had restored.
        trained_s: When its process 0 had passed its first step.
        stopped_s: When it stopped to train: after its emergency save, or when its first process ended.
        gone_s: When its last process had ended.
        restored_step: The step that it restored; 0: none. None if it did not come to that.
        steps: When its process 0 had done each step.
    """

    pod: str
    created_s: float
    bound_s: float | None
    started_s: float | None
    joined_s: float | None
    restored_s: float | None
    trained_s: float | None
    stopped_s: float
    gone_s: float
    restored_step: int | None
    steps: Mapping[int, float]


def read_words(output: Path) -> dict[str, list[Word]]:
    """Returns what the trainers of a run logged, by the name of the pod."""
    found: dict[str, list[Word]] = {}
    for path in sorted(output.glob("words.*.jsonl")):
        lines = path.read_bytes().split(b"\n")[:-1]  # the last one may be half of a line
        parsed = [json.loads(line) for line in lines]
        pod = path.name.removeprefix("words.").removesuffix(".jsonl")
        found[pod] = [Word(line["unix_s"], line["message"]) for line in parsed]
    return found


def lives(
    pods: Iterable[PodTimes], words: Mapping[str, Sequence[Word]], steps: Iterable[Step], *, end_s: float
) -> list[Life]:
    """Returns the starts of the gang, in their order.

    Args:
        pods: All pods that the run had.
        words: What they logged, by their names.
        steps: What they recorded.
        end_s: When the run ended.
    """
    starts: dict[tuple[int, int], list[PodTimes]] = {}
    seen: dict[tuple[int, int], int] = {}
    for pod in sorted(pods, key=lambda pod: pod.created_s):
        # A JobSet that was suspended starts again under the same number, so that each index has another pod.
        again = seen.get((pod.attempt, pod.process), 0)
        seen[pod.attempt, pod.process] = again + 1
        starts.setdefault((pod.attempt, again), []).append(pod)
    recorded = [step for step in steps if step.process == 0]
    ordered = sorted(starts.values(), key=lambda of: min(pod.created_s for pod in of))
    return [_life(of, words, recorded, end_s) for of in ordered]


def _life(pods: Sequence[PodTimes], words: Mapping[str, Sequence[Word]], recorded: list[Step], end_s: float) -> Life:
    first = min(pods, key=lambda pod: pod.process)
    ends = [pod.ended_s for pod in pods if pod.ended_s is not None] or [end_s]
    gone_s = min(end_s, max(ends))
    created_s = min(pod.created_s for pod in pods)
    said = words.get(first.name, ())
    joined, restored, trained, left = (_first(said, pattern) for pattern in (_JOINED, _RESTORED, _TRAINED, _LEFT))
    began = [word.unix_s for pod in pods for word in words.get(pod.name, ()) if word.message == trainer.BEGAN]
    steps = {step.step: step.unix_s for step in recorded if created_s <= step.unix_s <= gone_s + 1}
    found = _RESTORED.match(restored.message) if restored else None
    return Life(
        pod=first.name,
        created_s=created_s,
        bound_s=_last([pod.bound_s for pod in pods]),
        started_s=max(began) if len(began) == len(pods) else None,
        joined_s=joined.unix_s if joined else None,
        restored_s=restored.unix_s if restored else None,
        # A step is recorded when the next one begins, and then with the time of its record: up to a step too late.
        trained_s=trained.unix_s if trained else min(steps.values(), default=None),
        stopped_s=min(ends) if left is None else min(left.unix_s, *ends),
        gone_s=gone_s,
        restored_step=(0 if found[1] == "None" else int(found[1])) if found else None,
        steps=steps,
    )


def spent(lives: Sequence[Life], *, since_s: float, end_s: float) -> dict[str, float]:
    """Returns the seconds from ``since_s`` to ``end_s`` by category. They add up to all of them."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    at = since_s

    def until(moment: float | None, category: str, limit: float) -> None:
        nonlocal at
        if moment is not None:
            later = min(max(at, moment), limit)
            seconds[category] += later - at
            at = later

    for number, life in enumerate(lives):
        after = lives[number + 1].created_s if number + 1 < len(lives) else end_s
        gone, stopped = min(life.gone_s, after), min(life.stopped_s, life.gone_s, after)
        until(life.created_s, "waiting", end_s)
        stages = (
            (life.bound_s, "scheduling"),
            (life.started_s, "image"),
            (life.joined_s, "join"),
            (life.restored_s, "restore"),
            (life.trained_s, "compile"),
        )
        for moment, category in stages:
            until(moment, category, stopped)
        lost = _lost(life, lives[number + 1 :], stopped)
        until(stopped - lost, _doing(life), stopped)
        until(stopped, "recomputation", stopped)
        until(gone, "leaving", gone)
    until(end_s, "waiting", end_s)
    return seconds


def steps_lost(lives: Sequence[Life], number: int) -> int:
    """Returns how many steps that life ``number`` had done were done again after it."""
    later = next((life for life in lives[number + 1 :] if life.restored_step is not None), None)
    if later is None or not lives[number].steps:
        return 0
    return max(0, max(lives[number].steps) - (later.restored_step or 0))


def lost_too_many(
    lives: Sequence[Life], judged: int, lacking: Sequence[int], *, interval_steps: int, most: int
) -> list[str]:
    """Says which starts have lost more steps than they may.

    They may lose those since the newest save or snapshot, and those of the next one, which was under way: two
    intervals. One more for each snapshot that is lacking, if the log says so.

    Args:
        lives: All starts.
        judged: How many of them there were before.
        lacking: What ``lacking_snapshots`` returns of these.
        interval_steps: From one save or snapshot to the next. 0: no step may be lost.
        most: How many may be lost in any case: two intervals of saves in storage.
    """
    found = []
    for number, count in enumerate(lacking, start=max(0, judged - 1)):
        may, lost = min((2 + count) * interval_steps, most), steps_lost(lives, number)
        if lost > may:
            found.append(f"{lost} steps lost, expected at most {may}; the log says of {count} snapshots why they lack")
    return found


def lacking_snapshots(lives: Sequence[Life], judged: int, words: Mapping[str, Sequence[Word]]) -> list[int]:
    """Returns for each of the newest starts how many snapshots of lost steps were skipped, or had one copy.

    Args:
        lives: All starts.
        judged: How many of them there were before.
        words: What the pods logged, by their names.
    """
    found = []
    for number in range(max(0, judged - 1), len(lives)):
        life = lives[number]
        kept = max(life.steps, default=0) - steps_lost(lives, number)
        said = (NO_SNAPSHOT.match(word.message) for word in words.get(life.pod, ()))
        found.append(len({step for match in said if match and (step := int(match[1] or match[2])) > kept}))
    return found


def trains_anew(lives: Sequence[Life], old: Collection[str], since_s: float) -> float | None:
    """Returns when the newest start did its first step. None: it is an old one, or has not come to that.

    Args:
        lives: All starts so far.
        old: The pods of starts that do not count: those that a fault came to.
        since_s: The first step must be later.
    """
    newest = lives[-1] if lives else None
    if newest is None or newest.pod in old or newest.restored_step is None:
        return None
    first_s = first_step_s(newest)
    return first_s if first_s is not None and first_s > since_s else None


def first_step_s(life: Life) -> float | None:
    """Returns when a start did its first step. None: it has not come to that."""
    if life.joined_s is None:
        return None
    # Before it had joined, a process of the start before it may have recorded its last steps.
    return min((at for at in life.steps.values() if at > life.joined_s), default=None)


def stood_s(lives: Iterable[Life], since_s: float, until_s: float) -> float:
    """Returns for how many seconds of a time none of these starts trained."""
    trained = [
        min(life.stopped_s, until_s) - max(life.trained_s, since_s) for life in lives if life.trained_s is not None
    ]
    return max(0.0, until_s - since_s - sum(max(0.0, seconds) for seconds in trained))


def between(lives: Sequence[Life], judged: int) -> tuple[int, int]:
    """Returns how many starts there were beside the first ``judged`` ones, and how many steps were lost by them."""
    return len(lives) - judged, sum(steps_lost(lives, number) for number in range(max(0, judged - 1), len(lives)))


def beside(lives: Sequence[Life], judged: int, after: str, allowed: int, *, one_by_one: bool = False) -> list[str]:
    """Says what happened to a job between two faults, which must be nothing.

    Args:
        lives: All starts so far.
        judged: How many of them were there when the last fault was judged.
        after: That fault.
        allowed: How many more starts it may lead to.
        one_by_one: Whether pods are replaced one by one, so that the number of starts says little.
    """
    starts, lost = between(lives, judged)
    found = []
    if starts > allowed and not one_by_one:
        found.append(f"{starts} starts after {after} was judged, expected at most {allowed}")
    if lost:
        found.append(f"{lost} steps lost after {after} was judged, expected none")
    return found


def compared(own: Mapping[str, float], theirs: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Returns each category with its seconds here and in the operator's account."""
    ours, others = _joined(own), _joined(theirs)
    return [(category, ours.get(category, 0.0), others.get(category, 0.0)) for category in {**ours, **others}]


def _joined(seconds: Mapping[str, float]) -> dict[str, float]:
    joined: dict[str, float] = {}
    for category, value in seconds.items():
        name = _TOGETHER.get(category, category)
        joined[name] = joined.get(name, 0.0) + value
    return joined


def _lost(life: Life, later: Sequence[Life], stopped_s: float) -> float:
    """Returns for how long it trained after the step from which a later life went on."""
    restored = next((each.restored_step for each in later if each.restored_step is not None), None)
    if restored is None or not life.steps or restored >= max(life.steps) or life.trained_s is None:
        return 0.0
    passed = max((at for step, at in life.steps.items() if step <= restored), default=life.trained_s)
    return max(0.0, stopped_s - passed)


def _doing(life: Life) -> str:
    """What a life did when it ended."""
    if life.trained_s is not None:
        return "training"
    if life.restored_s is not None:
        return "compile"
    if life.joined_s is not None:
        return "restore"
    if life.started_s is not None:
        return "join"
    return "scheduling" if life.bound_s is None else "image"


def _first(said: Sequence[Word], pattern: re.Pattern[str]) -> Word | None:
    return next((word for word in said if pattern.match(word.message)), None)


def _last(times: Sequence[float | None]) -> float | None:
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) else None
