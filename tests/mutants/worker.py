"""Runs tests in one copy of the tree, again and again: whatever the project needs is imported once, then forked.

It is started in the copy, with its source roots on the path, and imports nothing of the project itself. Each line of
its input is a trial: {"tests": [...], "timeout_s": ..., "unchanged": whether no mutant is in the copy}. Each line of
its output is the outcome: {"outcome": "passed", "failed" or "late", "seconds": ..., "text": what pytest wrote}. It ends
when its input does.

A trial ends with the first test that fails. So the tests that were quick in the trials before run first, and
Hypothesis looks for no simpler example of a failure. Bytecode is written in trials without a mutant alone: Python tells
a module's bytecode from that of a mutant by the second in which the file was written, which may be the same.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_PRELOADED = (
    *("jax", "jax.numpy", "tensorstore", "aiohttp", "kubernetes", "kopf", "pydantic", "prometheus_client"),
    *("pytest", "hypothesis"),
)
_OUTPUT = pathlib.Path(".trial")
_SECONDS = pathlib.Path(".trial-seconds")
_PROFILE = "mutants"


def main() -> None:
    from tests.jax_environment import set_environment  # not conftest: it imports what pytest wants to import itself

    set_environment()
    for module in list(sys.modules):
        if module.split(".")[0] == "tests":
            del sys.modules[module]  # pytest imports its own, with better assertions
    for module in _PRELOADED:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        trial = json.loads(line)
        shutil.rmtree(".hypothesis", ignore_errors=True)  # no mutant's failure is tried first with another
        print(json.dumps(_outcome(**trial)), file=answers, flush=True)


def _outcome(tests: list[str], timeout_s: float, *, unchanged: bool) -> dict[str, object]:
    begun_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        sys.dont_write_bytecode = not unchanged
        _judge(tests)
    status = None
    while status is None and time.monotonic() < begun_s + timeout_s:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = code
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and whatever a test has started and left
    if status is None:
        os.waitpid(pid, 0)
    outcome = "late" if status is None else "passed" if status == 0 else "failed"
    text = _OUTPUT.read_text(errors="replace")
    return {"outcome": outcome, "seconds": time.monotonic() - begun_s, "text": text}


def _judge(tests: list[str]) -> None:
    """In the child: runs the tests and ends."""
    code = 70
    try:
        os.setsid()
        output = os.open(_OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            _PROFILE,
            deadline=None,
            phases=[Phase.explicit, Phase.generate, Phase.target],
            suppress_health_check=list(HealthCheck),  # a busy machine is no failure
        )
        hypothesis = ["--hypothesis-seed=0", f"--hypothesis-profile={_PROFILE}"]
        # They were imported before pytest could rewrite their assertions.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *hypothesis, *quiet, *tests], [_QuickestFirst()]
        )
        sys.stdout.flush()
    finally:
        os._exit(code)


class _QuickestFirst:
    """Orders the tests by the time that each took when it last passed. Tests that never passed keep their place."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = json.loads(_SECONDS.read_text()) if _SECONDS.exists() else {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._seconds[report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        whole = _SECONDS.with_suffix(".new")  # the trial may be killed while it writes
        whole.write_text(json.dumps(self._seconds))
        whole.replace(_SECONDS)


if __name__ == "__main__":
    main()
