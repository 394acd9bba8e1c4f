"""The operator's side of the channel, for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.receivers.fakes.server import OperatorServer


@pytest.fixture
def server() -> Iterator[OperatorServer]:
    with OperatorServer() as server:
        yield server
