"""Stores with S3's API that differ from S3: real servers behind a proxy that takes or refuses what others do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gracepoint.checkpoint import CheckpointManager
from gracepoint.checkpoint.storage.storage_path import storage_path
from gracepoint.checkpoint.verification import verify
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.fixtures import set_environment
from tests.object_stores.http_messages import Head
from tests.object_stores.servers import Bucket, Server
from tests.unit.checkpoint.fakes.engine import assert_same, small_state

pytestmark = pytest.mark.integration

Behind = Callable[[Server, Callable[[Head], Head | bytes]], Bucket]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behind]:
    """Makes a bucket of a server behind a proxy that changes or answers requests."""
    proxies: list[FaultProxy] = []

    def make(server: Server, passed: Callable[[Head], Head | bytes]) -> Bucket:
        proxies.append(FaultProxy(server.url))
        proxies[-1].passed = passed
        return set_environment(server.bucket(url=proxies[-1].url), monkeypatch)

    yield make
    for proxy in proxies:
        proxy.close()


def refusal(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
    return f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ignoring_versions_of_deletions(head: Head) -> Head:
    return Head(head.without("if-match")) if head.first.startswith("DELETE ") else head


def without_versions_of_deletions(head: Head) -> Head | bytes:
    if head.first.startswith("DELETE ") and "if-match" in head.headers:
        return refusal(501, "NotImplemented")
    return head


@pytest.mark.parametrize("passed", [ignoring_versions_of_deletions, without_versions_of_deletions])
def test_a_store_without_conditions_on_deletions_holds_a_run_and_is_named(
    behind: Behind, moto: Server, passed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    root: Any = f"{behind(moto, passed).uri}/run"
    with caplog.at_level(logging.WARNING):
        storage_path(root).check_usable()
    assert "the store ignores which version of an object a deletion is for" in caplog.text
    with CheckpointManager(root, keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, small_state(step))
        manager.wait_until_finished()
        assert_same(manager.restore(like=small_state()).state, small_state(3))
    assert {entry.key.partition("/")[0] for entry in storage_path(root).entries()} == {"2", "3"}
    assert verify(storage_path(root) / "3").ok
