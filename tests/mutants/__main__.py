"""Command line and table; see the package."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutations import Mutant, mutants, names
from tests.mutants.trials import NotJudged, Outcome, trials

ROOT = Path(__file__).resolve().parents[2]
JUDGES = Path(__file__).with_name("judges.toml")
TABLE = ROOT / "build" / "mutants.txt"
WANTED_PERCENT = 95.0


@dataclasses.dataclass(frozen=True)
class Judged:
    """A decisive module.

    Attributes:
        name: Dotted.
        tests: Paths of the tests that judge it, relative to the root.
        equivalent: Names of the mutants that change nothing which can be observed, with the reason of each.
        once_unnoticed: Names of mutants that no test noticed once. They are always among those that are tried, until
            their line changes.
    """

    name: str
    tests: Sequence[str]
    equivalent: dict[str, str]
    once_unnoticed: Sequence[str] = ()

    @property
    def file(self) -> Path:
        """Where it is, relative to the root.

        Raises:
            ValueError: There is no such module.
        """
        path = Path(*self.name.split("."))
        for root in ("sidecar", "operator"):
            for file in (root / path.with_suffix(".py"), root / path / "__init__.py"):
                if (ROOT / file).is_file():
                    return file
        raise ValueError(f"{JUDGES.name}: found the module {self.name}, which is in no source root; was it renamed?")

    def mutants(self) -> list[Mutant]:
        """All but the equivalent ones.

        Raises:
            ValueError: An equivalent one is not among them any more.
        """
        found = list(_mutants((ROOT / self.file).read_text()))
        stale = self.equivalent.keys() - {mutant.name for mutant in found}
        if stale:
            raise ValueError(f"{JUDGES.name}: {self.name} has no such mutants any more: {sorted(stale)}; remove them")
        return [mutant for mutant in found if mutant.name not in self.equivalent]

    def changed(self) -> list[str]:
        """Names of mutants that no test noticed once, and that do not exist any more."""
        names = {mutant.name for mutant in self.mutants()}
        return [name for name in self.once_unnoticed if name not in names]


@functools.cache
def _mutants(source: str) -> tuple[Mutant, ...]:
    return tuple(mutants(source))


def judged() -> dict[str, Judged]:
    """The decisive modules, by name."""
    tables = tomllib.loads(JUDGES.read_text())
    return {
        name: Judged(
            name,
            table["tests"],
            {item["mutant"]: item["why"] for item in table.get("equivalent", ())},
            table.get("once_unnoticed", ()),
        )
        for name, table in tables.items()
    }


def sample(module: Judged, count: int | None, seed: int) -> list[Mutant]:
    """The mutants that are tried: the same ones for the same seed and source.

    Args:
        module: The module.
        count: How many are chosen, beside those that no test noticed once. None: all.
        seed: Decides which ones.
    """
    found = module.mutants()
    known = [mutant for mutant in found if mutant.name in module.once_unnoticed]
    others = [mutant for mutant in found if mutant.name not in module.once_unnoticed]
    if count is None or count >= len(others):
        return found
    chosen = random.Random(f"{seed} {module.name}").sample(others, count)
    return sorted([*known, *chosen], key=lambda mutant: mutant.line)


def _main() -> int:
    modules = judged()
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Measures what the tests notice.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="dotted names; all decisive ones if none is given")
    parser.add_argument("--sample", type=int, default=30, metavar="N", help="mutants of each module (default: 30)")
    parser.add_argument("--all", action="store_true", help="all mutants of each module")
    parser.add_argument("--known", action="store_true", help="only the mutants that no test noticed once")
    parser.add_argument("--seed", type=int, default=0, help="which ones are chosen (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at the same time (default: 2)")
    parser.add_argument("--list", action="store_true", help="show the mutants, and try none")
    options = parser.parse_args()
    unknown = sorted(set(options.modules) - modules.keys())
    if unknown:
        parser.error(f"found {', '.join(unknown)}, expected modules of {JUDGES.name}: {', '.join(modules)}")
    count = 0 if options.known else None if options.all else options.sample
    sampled = {name: sample(modules[name], count, options.seed) for name in options.modules or modules}
    chosen = {name: found for name, found in sampled.items() if found}
    for name in sampled:
        for changed in modules[name].changed():
            print(f"{JUDGES.name}: {name} has changed; bring this name up to date or remove it: {changed}")
    if options.list:
        for name, found in chosen.items():
            print(name, *names(found), sep="\n")
        return 0
    results: dict[str, list[Outcome]] = {}
    with trials(ROOT, options.jobs) as work:
        for name, found in chosen.items():
            print(f"{name}: {len(found)} mutants", flush=True)
            try:
                results[name] = work.of(modules[name].file, modules[name].tests, found, _tell)
            except NotJudged as error:
                print(error, file=sys.stderr)
                return 2
            print(_row(name, results[name]), flush=True)
    lines = [
        f"{'module':48} {'tried':>6} {'detected':>8} {'late':>5} {'':>6}",
        *(_row(*item) for item in results.items()),
    ]
    print("", *lines, sep="\n")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")
    return 0 if all(percent(outcomes) >= WANTED_PERCENT for outcomes in results.values()) else 1


def percent(outcomes: Sequence[Outcome]) -> float:
    """How many of these were detected; all of none."""
    return 100.0 * sum(outcome.detected for outcome in outcomes) / len(outcomes) if outcomes else 100.0


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    detected, late = sum(outcome.detected for outcome in outcomes), sum(outcome.late for outcome in outcomes)
    return f"{name:48} {len(outcomes):6} {detected:8} {late:5} {percent(outcomes):5.1f}%"


def _tell(outcome: Outcome) -> None:
    if not outcome.detected:
        print(f"not noticed: line {outcome.mutant.line}, {outcome.mutant.name}", flush=True)


if __name__ == "__main__":
    sys.exit(_main())
