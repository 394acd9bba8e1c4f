"""What the webhooks ask of the operator: whose Evictions it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.server import Admission
from gracepoint_operator.trust.certificates import Certificates
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, running


def admission(replica: Replica) -> Admission:
    return Admission(cast(KubeClient, replica.api), replica.core, cast(Certificates, None), "https://o:443")


def name_of_policy(replica: Replica) -> str:
    return str(replica.api.of(kinds.POLICIES)[0]["metadata"]["name"])


@pytest.mark.parametrize(
    ("policy", "holds"),
    [
        pytest.param({}, True, id="hold"),
        pytest.param({"evictionHold": {"enabled": False}}, False, id="hold is off"),
        pytest.param({"mode": "Observe"}, False, id="observed only"),
        pytest.param({"mode": "Drill"}, False, id="drill"),
        pytest.param({"signals": ["NodeTaint"]}, False, id="evictions do not count"),
    ],
)
async def test_evictions_are_answered_under_policies_that_hold(clock: Clock, policy: Any, holds: bool) -> None:
    api = MemoryApi(clock)
    cluster(api, **policy)
    async with running(api, clock) as replica:
        replica.core.watches.answered(kinds.EVICTIONS, listed=True)
        assert admission(replica).answers_evictions(NAMESPACE, name_of_policy(replica)) is holds
        assert not admission(replica).answers_evictions(NAMESPACE, "another")


async def test_evictions_that_cannot_be_seen_are_not_answered(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api)
    async with running(api, clock) as replica:
        watches, asked = replica.core.watches, admission(replica)
        steps: list[Callable[[], None]] = [
            lambda: watches.absent(kinds.EVICTIONS, optional=True),
            lambda: watches.asked("thread", kinds.EVICTIONS),
            lambda: watches.failed(kinds.EVICTIONS, "HTTP 403", optional=True),
            lambda: watches.answered(kinds.EVICTIONS, listed=True),
            lambda: watches.failed(kinds.EVICTIONS, "HTTP 403", optional=True),
        ]
        found = []
        for step in steps:
            step()
            found.append(asked.answers_evictions(NAMESPACE, name_of_policy(replica)))
        assert found == [False, False, False, True, False]
