"""Replicas of the operator for a test, and the cluster that they see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from tests.contract.fakes.replicas import Replica, bound_cluster, replicas
from tests.unit.operator.fakes.api import MemoryApi


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def start(authority: trustme.CA, tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Starts replicas; stops them all in the end."""
    with replicas(authority, tmp_path) as make:
        yield make


@pytest.fixture
def api() -> MemoryApi:
    """A cluster that trains, and the tokens of its pods."""
    return bound_cluster()
