"""What holds for all tests: a skip is a failure where nothing may be left out (``CI=true``)."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

CI = os.environ.get("CI", "").lower() in {"1", "true"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure in CI, with the reason that it gave."""
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure where CI=true: {report.longrepr}"
    return report
