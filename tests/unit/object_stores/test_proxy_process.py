"""The proxy in a process of its own takes the same rules, and gives the same counts."""

from __future__ import annotations

import time

import pytest
import tensorstore as ts

from tests.object_stores.faults import Fault, How, Rule, Shape
from tests.object_stores.fixtures import set_environment
from tests.object_stores.proxy_process import open_proxy
from tests.object_stores.servers import Server


def test_rules_and_counts_cross_the_processes(gcs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_proxy(gcs.url, Shape(round_trip_s=0.05)) as proxy:
        store = ts.KvStore.open(set_environment(gcs.bucket(url=proxy.url), monkeypatch).kvstore()).result()
        proxy.set_rules(Rule(Fault(How.ANSWER, 503), kinds=("write",), times=1))
        begin = time.monotonic()
        store.write("key", b"value").result()
        assert time.monotonic() - begin >= 0.1  # two attempts
        writes = proxy.counts()["POST write"]
        assert (writes.requests, writes.failed) == (2, 1)
        assert proxy.processor_s > 0
        proxy.reset()
        assert proxy.counts() == {}
