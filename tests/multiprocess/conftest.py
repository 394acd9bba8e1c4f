"""Closes the nursery that the tests' processes are forked off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.launcher import close_nursery


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    yield
    close_nursery()
