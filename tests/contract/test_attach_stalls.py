"""A stall in ``attach``, before any session is open, shows in the cluster: library and operator over TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.preemption.stall_watch import AttachWatch
from tests.contract.fakes.replicas import Replica
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.replica import progressing
from tests.waiting import until


@pytest.fixture
def replica(start: Callable[..., Replica], api: MemoryApi) -> Replica:
    return start(api)


@pytest.mark.parametrize("restarted", [False, True], ids=["the pod is new", "its container was restarted"])
def test_the_policy_names_the_process_that_does_not_come(replica: Replica, restarted: bool) -> None:
    if restarted:
        before = replica.stream(0, "s-before")
        before.next()
        before.close()
    settings = replica.settings(stall_after_s=0.3)
    gang = StoreProcessGroup(InMemoryStore(), 0, 2)
    with AttachWatch(settings) as watch, watch.at("meeting of the processes"):
        watch.met(gang, ["pod-0-0", "pod-0-1"])
        with gang.waiting.expecting("backend"):
            until(lambda: "in meeting of the processes" in progressing(replica.api)[1], "the condition")
            told = progressing(replica.api)
    assert told[0] == "False"
    assert "this process waits for process 1 (pod-0-1)" in told[1]
    until(lambda: progressing(replica.api)[0] == "True", "the end of the condition")
