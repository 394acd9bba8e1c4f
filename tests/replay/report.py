"""What the faults of a replay cost, as tables and as a picture. Pure but for ``write``."""

from __future__ import annotations

import collections
import html
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from demo.forms import JOBSET
from tests.replay.results import End, Result, counting
from tests.replay.workloads import WORKLOADS

#: The operator's account may differ by this share of the whole time, in each category,
GOAL = 0.01
#: and by so much for each start where a category begins or ends with what the API server has in whole seconds alone:
#: when a process ended (which also ends the training of one that was killed), when a pod was made and bound. No account
#: of the operator can be finer. In a short job this is more than the goal.
RESOLUTION_S = 1.0
_IN_WHOLE_SECONDS = frozenset({"training", "recomputation", "leaving", "waiting", "image", "waiting and image"})
#: And by so much where no replica of the operator heard how training ended, and it guesses (docs/goodput.md#limits).
_GUESS_S = 10.0
_GUESSED = frozenset({"training", "recomputation", "leaving", "waiting", "waiting and image"})
#: Categories of what comes before a process starts.
_BEFORE_A_START = ("waiting", "image")
_HEADER = (
    *("kind", "announced", "count", "recovered", "promises kept"),
    *("steps lost, p50", "max", "s until training, p50", "p99", "counted"),
)


def unlike(
    account: Sequence[tuple[str, float, float]], starts: int, unheard: int = 0, *, held_up: bool = False
) -> list[str]:
    """Returns the categories in which the accounts of a job differ by more than they may.

    Args:
        account: Each category with its seconds by the trainers' records and by the operator's account.
        starts: How often the job started.
        unheard: Of how many starts no replica of the operator heard the end.
        held_up: Whether something has kept pods from starting on their nodes. To the operator they wait then, which
            the watch of the pods does not show.
    """
    if held_up:
        one = [row for row in account if row[0] in _BEFORE_A_START]
        together = ("waiting and image", sum(own for _, own, _ in one), sum(theirs for _, _, theirs in one))
        account = [*(row for row in account if row not in one), together]
    whole = sum(own for _, own, _ in account)
    found = []
    for category, own, theirs in account:
        more_s = RESOLUTION_S * starts if category in _IN_WHOLE_SECONDS else 0.0
        more_s += _GUESS_S * unheard if category in _GUESSED else 0.0
        if abs(theirs - own) > GOAL * whole + more_s:
            found.append(
                f"account, {category}: {theirs:.1f} s by the operator, {own:.1f} s by the trainers' records; they "
                f"differ by {abs(theirs - own) / whole:.1%} of the whole time, expected at most {GOAL:.0%}"
                + (f" and {more_s:g} s for {starts} starts, {unheard} of them with an end unheard" if more_s else "")
            )
    return found


def problems(results: Iterable[Result], ends: Iterable[End]) -> list[str]:
    """Returns all that must not be, each with the fault or the job after which it was found.

    Args:
        results: The newest one of each fault.
        ends: Of all jobs. That of a job of which a fault was done again since counts no more.
    """
    results = list(results)
    found = [
        f"fault {result.fault} of seed {result.seed}, {result.kind}: {text}"
        for result in results
        for text in result.broken
    ]
    for end in counting(ends, results):
        faults = f"{min(end.faults)} to {max(end.faults)}" if end.faults else "none"
        found += [f"the {end.workload} of the faults {faults} of seed {end.seed}: {text}" for text in end.broken]
    return found


def rendered(results: Sequence[Result], ends: Sequence[End], redone: Sequence[Result] = ()) -> str:
    """Returns the report.

    Args:
        results: The newest one of each fault.
        ends: Of all jobs. That of a job of which a fault was done again since counts no more.
        redone: Earlier ones of the same faults, which count no more.
    """
    ends = counting(ends, results)
    parts = [table(results)]
    if accounts := [end.account for end in ends if end.account and WORKLOADS[end.workload].form is JOBSET]:
        parts.append(account_table(_together(accounts)))
    steps, jobs = sum(end.steps for end in ends), len(ends)
    recovered = sum(result.recovered for result in results)
    parts.append(
        f"{len(results)} faults of {len({result.kind for result in results})} kinds, {recovered} recovered; "
        f"{jobs} jobs came to their end, after {steps} steps."
    )
    compared = {(end.seed, fault) for end in ends for fault in end.faults}
    if cut := [result for result in results if (result.seed, result.fault) not in compared]:
        parts.append(
            f"{len(cut)} faults came to jobs that were cut, or of which a fault was done again since, and so were not "
            "held against an undisturbed run."
        )
    commits = collections.Counter(result.commit for result in results)
    parts.append("\n".join(f"Commit {commit}: {count} faults." for commit, count in commits.items()))
    not_judged = collections.Counter(result.alerts for result in results if result.alerts)
    parts += [f"Alerts were not judged after {count} faults: {why}." for why, count in not_judged.items()]
    if lacking := [result for result in results if result.lacking]:
        told = ", ".join(f"{result.lacking} at fault {result.fault} of seed {result.seed}" for result in lacking)
        parts.append(f"Snapshots in memory, of lost steps, that were skipped or had a single copy: {told}.")
    if redone:
        broke = [
            f"fault {each.fault} of seed {each.seed}, {each.kind}: {text}" for each in redone for text in each.broken
        ]
        told = f"{len(redone)} results are of faults that were done again since; of these:"
        parts.append("\n".join([told, *broke]) if broke else f"{told} nothing that must not be.")
    parts.append("\n".join(problems(results, ends)) or "Nothing was found that must not be.")
    return "\n\n".join(parts)


def table(results: Sequence[Result]) -> str:
    """Returns what each kind cost, as a table of Markdown."""
    rows: list[Sequence[str]] = [_HEADER, ["--"] * len(_HEADER)]
    for kind in sorted({result.kind for result in results}, key=lambda kind: _order(results, kind)):
        rows.append(_row(f"`{kind}`", [result for result in results if result.kind == kind]))
    for name, announced in (("all announced", True), ("all others", False)):
        if of := [result for result in results if result.announced is announced]:
            rows.append(_row(name, of))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _order(results: Sequence[Result], kind: str) -> tuple[bool, str]:
    announced = any(result.announced for result in results if result.kind == kind)
    return not announced, kind


def _row(name: str, of: Sequence[Result]) -> list[str]:
    lost = sorted(result.steps_lost for result in of)
    seconds = sorted(result.until_training_s for result in of if result.recovered)
    return [
        name,
        "yes" if of[0].announced else "no",
        str(len(of)),
        str(sum(result.recovered for result in of)),
        str(sum(not result.broken for result in of)),
        str(percentile(lost, 0.5)),
        str(max(lost)),
        f"{percentile(seconds, 0.5):.1f}" if seconds else "",
        f"{percentile(seconds, 0.99):.1f}" if seconds else "",
        str(sum(result.counted_restarts for result in of)),
    ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least so large a share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _together(accounts: Sequence[Sequence[tuple[str, float, float]]]) -> list[tuple[str, float, float]]:
    """Returns the sums of accounts."""
    sums: dict[str, tuple[float, float]] = {}
    for account in accounts:
        for category, own, theirs in account:
            before = sums.get(category, (0.0, 0.0))
            sums[category] = before[0] + own, before[1] + theirs
    return [(category, own, theirs) for category, (own, theirs) in sums.items()]


def account_table(account: Sequence[tuple[str, float, float]]) -> str:
    whole = sum(own for _, own, _ in account)
    header = ("category", "by the trainers, s", "by the operator, s", "difference, s", "of all")
    rows: list[Sequence[str]] = [header, ["--"] * len(header)]
    for category, own, theirs in (*account, ("all", whole, sum(theirs for _, _, theirs in account))):
        rows.append([category, f"{own:.1f}", f"{theirs:.1f}", f"{theirs - own:+.1f}", f"{(theirs - own) / whole:+.1%}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


_WIDTH, _LEFT, _RIGHT, _TOP, _LINE = 900, 250, 110, 54, 20
_TICKS_S = (0.1, 1, 10, 100, 1000)
_COLOURS = {True: "#2a6fbb", False: "#c2571a"}
_BROKEN = "#c0182b"


def picture(results: Sequence[Result]) -> str:
    """Returns an SVG: a row of each kind, a point of each fault, at its seconds until training."""
    kinds = sorted({result.kind for result in results}, key=lambda kind: _order(results, kind))
    height = _TOP + _LINE * len(kinds) + 50
    bottom = height - 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Seconds until training after each fault, by kind">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 20, f"{len(results)} faults: seconds until training, and steps lost", size=14),
        *(
            part
            for seconds in _TICKS_S
            for part in (
                f'<line x1="{_x(seconds):.1f}" x2="{_x(seconds):.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="#ddd"/>',
                _text(_x(seconds), bottom + 16, f"{seconds:g} s", anchor="middle"),
            )
        ),
        _text(_WIDTH - _RIGHT + 10, _TOP - 12, "steps lost, max"),
    ]
    for number, kind in enumerate(kinds):
        of = [result for result in results if result.kind == kind]
        y = _TOP + _LINE * number + 8
        parts.append(_text(_LEFT - 12, y + 4, f"{kind} ({len(of)})", anchor="end"))
        parts += [_point(result, y) for result in of]
        parts.append(_text(_WIDTH - _RIGHT + 10, y + 4, str(max(result.steps_lost for result in of))))
    legend = (("announced", _COLOURS[True]), ("not announced", _COLOURS[False]), ("a promise was broken", _BROKEN))
    for place, (text, colour) in enumerate(legend):
        parts.append(f'<circle cx="{_LEFT + 190 * place}" cy="{height - 10}" r="4" fill="{colour}"/>')
        parts.append(_text(_LEFT + 190 * place + 10, height - 6, text))
    return "\n".join([*parts, "</svg>\n"])


def _point(result: Result, y: float) -> str:
    colour = _BROKEN if result.broken else _COLOURS[result.announced]
    x = _x(result.until_training_s if result.recovered else _TICKS_S[-1])
    return f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}" fill-opacity="0.6"/>'


def _x(seconds: float) -> float:
    """Where so many seconds are, on a logarithmic axis."""
    first, last = math.log10(_TICKS_S[0]), math.log10(_TICKS_S[-1])
    share = (math.log10(min(max(seconds, _TICKS_S[0]), _TICKS_S[-1])) - first) / (last - first)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'


def write(results: Sequence[Result], ends: Sequence[End], folder: Path, redone: Sequence[Result] = ()) -> None:
    """Writes ``report.md`` and ``report.svg``."""
    files: dict[str, Callable[[], str]] = {
        "report.md": lambda: rendered(results, ends, redone) + "\n",
        "report.svg": lambda: picture(results),
    }
    for name, made in files.items():
        (folder / name).write_text(made(), encoding="utf-8")
