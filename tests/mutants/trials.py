"""Tries mutants in copies of the tree, one worker process for each copy.

As many threads as there are workers try the mutants; each takes a free worker for one mutant. They end with the last
mutant of a module. A worker process ends when its input is closed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.mutations import Mutant

_ROOTS = ("sidecar", "operator")
#: A mutant may make tests slower before they fail; the machine may be busier than it was in the first run.
_SLOWER = 5.0
_LEAST_S = 30.0
_FIRST_S = 600.0


class NotJudged(Exception):
    """The tests fail without any change, so that they say nothing about mutants."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a mutant. ``late``: the tests did not end in time."""

    mutant: Mutant
    detected: bool
    late: bool


class _Worker:
    def __init__(self, tree: Path) -> None:
        self.tree = tree
        roots = os.pathsep.join(str(tree / root) for root in _ROOTS)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.worker"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": roots, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], timeout_s: float, *, unchanged: bool = False) -> dict[str, Any]:
        """Runs the tests in the tree as it is. ``unchanged``: it has no mutant."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        trial = {"tests": list(tests), "timeout_s": timeout_s, "unchanged": unchanged}
        print(json.dumps(trial), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker in {self.tree} ended with code {self._process.wait()}; see its error above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Trials:
    """Tries the mutants of one module after another.

    Args:
        workers: One for each mutant that is tried at the same time.
    """

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers

    def of(
        self, file: Path, tests: Sequence[str], mutants: Sequence[Mutant], tell: Callable[[Outcome], None]
    ) -> list[Outcome]:
        """Tries the mutants of a file.

        Args:
            file: Relative to the root.
            tests: What judges it: paths relative to the root.
            mutants: Of the file.
            tell: Called with each outcome, by any thread.

        Raises:
            NotJudged: The tests fail without a change.
        """
        timeout_s = max(_LEAST_S, _SLOWER * max(self._prepare(file, tests)))
        free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            free.put(worker)

        def run(mutant: Mutant) -> Outcome:
            worker = free.get()
            place = worker.tree / file
            original = place.read_text()
            try:
                place.write_text(mutant.source)
                found = worker.run(tests, timeout_s)["outcome"]
            finally:
                place.write_text(original)
                free.put(worker)
            outcome = Outcome(mutant, detected=found != "passed", late=found == "late")
            tell(outcome)
            return outcome

        with concurrent.futures.ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(run, mutants))

    def _prepare(self, file: Path, tests: Sequence[str]) -> list[float]:
        """Runs the tests without a mutant in each worker. Returns the seconds that they took."""

        def unchanged(worker: _Worker) -> float:
            seconds = list[float]()
            for _ in range(2):  # the second time in the order of the trials: the quickest tests first
                answer = worker.run(tests, _FIRST_S, unchanged=True)
                if answer["outcome"] != "passed":
                    raise NotJudged(f"{file}: its tests fail without a change ({answer['outcome']}):\n{answer['text']}")
                seconds.append(answer["seconds"])
            return max(seconds)

        with concurrent.futures.ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(unchanged, self._workers))


@contextlib.contextmanager
def trials(root: Path, jobs: int) -> Iterator[Trials]:
    """Copies of the tree at ``root``, without what git ignores, and a worker in each."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="gracepoint-mutants-") as made, contextlib.ExitStack() as stack:
        workers = []
        for number in range(jobs):
            tree = Path(made) / str(number)
            for file in filter(None, files):
                if (root / file).is_file():
                    (tree / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / file, tree / file)
            workers.append(_Worker(tree))
            stack.callback(workers[-1].close)
        yield Trials(workers)
