"""Runs failures of many kinds beside each other, each kind on a gang of its own, and says what came of them.

Threads: one for each kind, of which ``AT_ONCE`` run at a time. Each owns its gang and its outcomes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Sequence

from tests.restart_budget.control_plane import ControlPlane, Refused
from tests.restart_budget.gang import NAMED_WITHIN_S, Account, Gang, NotReached
from tests.restart_budget.kinds import PROGRAM, Kind

AT_ONCE = 12
_LOOK_EVERY_S = 0.25
#: So many restarts that no error of the program ends a gang before its time.
_MANY = 1000
#: What the user of a loop writes.
LOOP_LIMIT = 2
#: How the outcomes of loops are named.
LOOP = "loop: "


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one failure.

    Attributes:
        kind: Name of its kind.
        infrastructure: Whether it is a failure of the infrastructure.
        counted: How many restarts it was counted as.
        named_s: After how many seconds the operator named it. None if it did not, or need not.
        said: What the operator said.
        problem: What is not as it should be. Empty if all is.
    """

    kind: str
    infrastructure: bool
    counted: int
    named_s: float | None = None
    said: str = ""
    problem: str = ""


def run(plane: ControlPlane, kinds: Sequence[Kind], times: int, say: Callable[[str], None]) -> list[Outcome]:
    """Lets each kind of failure happen so many times."""
    return _beside_each_other(
        [functools.partial(_of_kind, plane, f"gang-{number}", kind, times, say) for number, kind in enumerate(kinds)]
    )


def run_loops(plane: ControlPlane, say: Callable[[str], None]) -> list[Outcome]:
    """Lets the same errors of the program happen again and again, with what else happens in between."""
    return _beside_each_other([functools.partial(_loop, plane, kind, say) for kind in PROGRAM[:2]])


def _beside_each_other(parts: Sequence[Callable[[], list[Outcome]]]) -> list[Outcome]:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="gang") as threads:
        return list(itertools.chain.from_iterable(threads.map(lambda part: part(), parts)))


def _of_kind(plane: ControlPlane, namespace: str, kind: Kind, times: int, say: Callable[[str], None]) -> list[Outcome]:
    """The namespace says nothing of the kind: what the operator says has the names of pods and nodes in it."""
    gang = Gang(plane, namespace, _MANY if kind.counted else None)
    gang.prepare()
    gang.create()
    outcomes = []
    for _ in range(times):
        outcome = _once(gang, kind)
        say(f"{kind.name}: {outcome.problem or 'as it should be'}")
        outcomes.append(outcome)
        if outcome.problem:
            gang.create()
    return outcomes


def _once(gang: Gang, kind: Kind) -> Outcome:
    before, known = gang.account(), gang.said().keys()
    named_s, said, problem = None, "", ""
    try:
        try:
            kind.begin(gang)
            began_s = time.monotonic()
            if kind.words:
                said = _named(gang, kind, set(known))
                named_s = time.monotonic() - began_s
                if not said:
                    heard = "; ".join(text for where, text in gang.said().items() if where not in known) or "nothing"
                    problem = f"not named within {NAMED_WITHIN_S:.0f} s: {' '.join(kind.words)}; heard {heard}"
        finally:
            kind.end(gang)
        gang.wait_to_run(before.restarts + 1)
    except (NotReached, Refused, AssertionError) as error:
        problem = problem or str(error)
    after = gang.account()
    counted = after.counted - before.counted
    return Outcome(
        kind.name, not kind.counted, counted, named_s if said else None, said, problem or _wrong(kind, after, counted)
    )


def _wrong(kind: Kind, after: Account, counted: int) -> str:
    if after.end:
        return f"the JobSet is {after.end}"
    return "" if counted == int(kind.counted) else f"counted {counted} times, expected {int(kind.counted)}"


def _named(gang: Gang, kind: Kind, known: set[tuple[str, str]]) -> str:
    """What the operator has said since, with all words of the kind in one text. Empty if it says nothing in time."""
    words = [word.format(node=gang.nodes[1]) for word in kind.words]
    give_up_at = time.monotonic() + NAMED_WITHIN_S
    while time.monotonic() < give_up_at:
        for where, text in gang.said().items():
            if where not in known and all(re.search(re.escape(word), text, re.IGNORECASE) for word in words):
                return text
        time.sleep(_LOOK_EVERY_S)
    return ""


def _loop(plane: ControlPlane, kind: Kind, say: Callable[[str], None]) -> list[Outcome]:
    """An error after each restart, and a saved exit before each: the user's limit counts the errors alone."""
    gang = Gang(plane, f"loop-{re.sub('[^a-z]+', '-', kind.name)}", LOOP_LIMIT)
    gang.prepare()
    gang.create()
    problem = ""
    try:
        for errors in range(LOOP_LIMIT + 1):
            gang.leave()
            gang.wait_to_run(2 * errors + 1)
            kind.begin(gang)
            gang.wait_to_end() if errors == LOOP_LIMIT else gang.wait_to_run(2 * errors + 2)
        if (account := gang.account()).end != "Failed" or account.counted != LOOP_LIMIT:
            problem = f"expected Failed after {LOOP_LIMIT} restarts that count, found {account}"
    except (NotReached, Refused) as error:
        problem = str(error)
    say(f"loop of {kind.name}: {problem or 'ended as the user wrote'}")
    return [Outcome(f"{LOOP}{kind.name}", False, gang.account().counted, problem=problem)]
