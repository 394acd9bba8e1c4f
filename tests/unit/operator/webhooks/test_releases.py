"""What an operator says of another release that answers for the same jobs."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.webhooks.installation import installed_releases, log_overlapping_releases
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock


def configuration(service: str, *namespaces: str) -> JsonObject:
    key, operator = "kubernetes.io/metadata.name", "In" if namespaces else "NotIn"
    expression = {"key": key, "operator": operator, "values": list(namespaces) or ["kube-system"]}
    return {
        "metadata": {"name": f"00-{service}"},
        "webhooks": [
            {"name": "jobs.gracepoint.dev"},
            {
                "name": "jobsets.gracepoint.dev",
                "clientConfig": {"service": {"name": service, "namespace": "system"}},
                "namespaceSelector": {"matchExpressions": [expression]},
            },
        ],
    }


@pytest.mark.parametrize(
    ("theirs", "ours", "shared"),
    [
        ((), (), "all namespaces"),
        (("b", "a"), (), "a, b"),
        ((), ("b", "a"), "a, b"),
        (("a", "b"), ("b", "c"), "b"),
        (("a",), ("b",), ""),
    ],
)
def test_releases_share_the_namespaces_that_both_answer_for(
    theirs: tuple[str, ...], ours: tuple[str, ...], shared: str
) -> None:
    (found,) = installed_releases([{"metadata": {"name": "jobset"}}, configuration("gp", *theirs)])
    assert (found.host, found.configuration) == ("gp.system.svc", "00-gp")
    assert found.shares(ours) == shared


async def looks(api: MemoryApi, number: int, caplog: pytest.LogCaptureFixture, *namespaces: str) -> list[str]:
    """What the operator of ``gp`` has said after so many looks."""
    pauses = 0

    async def sleep(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses > number:
            raise asyncio.CancelledError

    caplog.clear()
    with pytest.raises(asyncio.CancelledError):
        await log_overlapping_releases(api, "gp.system.svc", namespaces, sleep=sleep)
    return [record.levelname for record in caplog.records]


async def test_operator_says_once_that_another_release_answers_for_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    api = MemoryApi(Clock())
    api.add(objects.MUTATING_WEBHOOKS, configuration("gp"))
    assert await looks(api, 3, caplog) == []
    other = api.add(objects.MUTATING_WEBHOOKS, configuration("other"))
    assert await looks(api, 3, caplog) == ["ERROR"]
    assert "remove one, or set other watchNamespaces for each" in caplog.text
    api.remove(objects.MUTATING_WEBHOOKS, other)
    api.add(objects.MUTATING_WEBHOOKS, configuration("other", "b"))
    assert await looks(api, 3, caplog, "a") == []
    assert await looks(api, 3, caplog, "a", "b") == ["ERROR"]


async def test_operator_that_may_not_look_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    api = MemoryApi(Clock())
    api.failing = [client.Refused("forbidden")] * 3
    assert await looks(api, 3, caplog) == ["WARNING"]
