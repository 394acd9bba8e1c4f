"""What a worker process sees of its training process shows in the cluster: library and operator over TLS."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from gracepoint.preemption.stall_detector import ProcessAt
from gracepoint.preemption.trainer_watch import SharedHeartbeat, TrainerWatch, Watched
from gracepoint.receivers import Operator
from tests.contract.fakes.replicas import Replica
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.replica import progressing
from tests.waiting import until

SESSION = "s-1"
LIMIT_S = 10.0


@pytest.fixture
def replica(start: Callable[..., Replica], api: MemoryApi) -> Replica:
    return start(api)


def test_a_replica_that_hears_the_trainer_takes_the_word_of_its_worker(replica: Replica) -> None:
    trainer = replica.stream(0, SESSION)
    trainer.next()
    settings = replica.settings(stall_after_s=LIMIT_S)
    operator = Operator.known_to(settings, time.monotonic)
    assert operator is not None
    heartbeat, seconds = SharedHeartbeat(), itertools.count()
    beside = TrainerWatch(
        heartbeat, Watched(settings, SESSION, 0, ProcessAt(1, 0, 1)), lambda: operator, lambda: next(seconds)
    )
    heartbeat.beat("training after step 40")
    for _ in range(2 * int(LIMIT_S)):
        beside.look()
    until(lambda: "process 0 (pod-0-0) does not run" in progressing(replica.api)[1], "the condition")
    heartbeat.beat("training after step 41")
    beside.look()
    until(lambda: "are stalled" in progressing(replica.api)[1], "the end of the condition")
    operator.close()
    trainer.close()
