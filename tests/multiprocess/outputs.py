"""A pytest plugin: the report of a failed test has the whole output of each process that the test started.

pytest cuts the values of a failed assertion, and so what a process says in one. Sections of a report are never cut.

A test that hangs has no report: its process is ended by the thread of a timer, which prints the same (``tests.hangs``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import pytest

from tests import hangs
from tests.multiprocess.launcher import Processes, started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [section for number, group in enumerate(started) for section in _sections(number, group)]
    return report


def _show(config: pytest.Config) -> None:
    """Prints what the processes of a test that hangs have printed, with the stacks of those that still run."""
    groups = [(number, group) for number, group in enumerate(started) if not group.closed]
    for _, group in groups:
        with contextlib.suppress(OSError, RuntimeError):  # the nursery has ended: what is printed so far is shown
            group.dump_stacks()
    terminal = config.get_terminal_writer()
    for number, group in groups:
        for title, output in _sections(number, group):
            terminal.sep("~", title=title)
            terminal.line(output)
    terminal.flush()


hangs.show_more.append(_show)


def _sections(number: int, group: Processes) -> list[tuple[str, str]]:
    of = f" of group {number}" if len(started) > 1 else ""
    return [(f"process {i}{of}, {p.end}", p.output or "(nothing)") for i, p in enumerate(group)]
