"""What holds for all unit tests: the profiles of Hypothesis, and that they start no process.

Tests that start processes or servers, or that compile programs for a second and more, have the marker ``integration``,
and so have modules of tests that save and restore whole states. `make test-unit` leaves them out. It does not even
import a module whose tests all have it: imports take a large part of its time.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests import hypothesis_profiles

hypothesis_profiles.register()

FOLDER = Path(__file__).parent
#: The markers of this folder's tests that `make test-unit` leaves out.
LEFT_OUT = frozenset({"integration", "long", "mounts", "installs"})
#: How a module begins to say that all its tests have the marker.
OF_THE_MODULE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.integration\b", re.MULTILINE)
#: The fixtures that start a server.
SERVERS = {"gcs", "s3", "moto"}
#: The unit test that runs now and starts no process; none between two tests.
running: list[str] = []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules none of whose tests is asked for."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if not is_test or "not integration" not in config.option.markexpr:
        return None
    return True if OF_THE_MODULE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test that asks for a server of an object store."""
    if SERVERS & set(getattr(item, "fixturenames", ())):
        item.add_marker("integration")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes the test that runs."""
    if FOLDER in item.path.parents and LEFT_OUT.isdisjoint(mark.name for mark in item.iter_markers()):
        running.append(item.nodeid)
    try:
        return (yield)
    finally:
        running.clear()


_start = subprocess.Popen.__init__


@functools.wraps(_start)
def _started(process: Any, *args: Any, **options: Any) -> None:
    __tracebackhide__ = True  # the arguments have the whole environment
    if running:
        command = args[0] if args else options["args"]
        raise AssertionError(f"{running[0]} starts a process, so it needs the marker integration: {command}")
    _start(process, *args, **options)


subprocess.Popen.__init__ = _started  # type: ignore[assignment, method-assign]
