"""Snapshot servers for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.snapshots.fakes.servers import Served, serving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts servers with other limits."""
    with serving(tmp_path) as start:
        yield start


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
