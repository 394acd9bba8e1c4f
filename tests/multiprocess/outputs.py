"""A pytest plugin: the report of a failed test has the whole output of each process that the test started.

pytest cuts the values of a failed assertion, and so what a process says in one. Sections of a report are never cut.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

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


def _sections(number: int, group: Processes) -> list[tuple[str, str]]:
    of = f" of group {number}" if len(started) > 1 else ""
    return [(f"process {i}{of}, {p.end}", p.output or "(nothing)") for i, p in enumerate(group)]
