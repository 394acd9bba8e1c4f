"""Snapshot servers for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.snapshots.fakes.servers import Served


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts servers with other limits."""
    with contextlib.ExitStack() as ended:

        def start(**limits: Any) -> Served:
            served = Served(tmp_path, **limits)
            ended.callback(served.close)
            return served

        yield start


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
