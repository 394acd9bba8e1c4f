"""Runs tests in one copy of the tree, again and again: whatever the project needs is imported once, then forked.

It is started in the copy, with its source roots on the path, and imports nothing of the project itself. Each line of
its input is a trial: {"tests": [...], "timeout_s": ...}. Each line of its output is the outcome: {"outcome": "passed",
"failed" or "late", "seconds": ..., "text": what pytest wrote}. It ends when its input does.
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

_PRELOADED = ("jax", "jax.numpy", "tensorstore", "aiohttp", "kubernetes", "kopf", "pydantic", "prometheus_client")
_OUTPUT = pathlib.Path(".trial")


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
        print(json.dumps(_outcome(trial["tests"], trial["timeout_s"])), file=answers, flush=True)


def _outcome(tests: list[str], timeout_s: float) -> dict[str, object]:
    begun_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
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

        # ``conftest`` has imported Hypothesis before pytest could rewrite its assertions.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", *quiet, *tests]
        )
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
