"""Shows what processes have printed where a test fails or hangs, and closes the nursery that they are forked off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.launcher import close_nursery
from tests.multiprocess.outputs import pytest_runtest_makereport, pytest_runtest_setup

__all__ = ["pytest_runtest_makereport", "pytest_runtest_setup"]


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    yield
    close_nursery()
