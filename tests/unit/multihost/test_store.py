"""The in-memory store keeps the contract that JAX's own keeps (see tests/multiprocess/test_parts.py)."""

from __future__ import annotations

from gracepoint.multihost import InMemoryStore
from tests.unit.multihost.fakes.store_contract import check


def test_the_in_memory_store_keeps_the_contract() -> None:
    check(InMemoryStore(), "contract")
