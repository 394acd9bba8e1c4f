"""What most tests of the operator begin with: a clock that they move, and an API server with a gang on its nodes."""

from __future__ import annotations

import pytest

from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import cluster


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    made = MemoryApi(clock)
    cluster(made)
    return made
