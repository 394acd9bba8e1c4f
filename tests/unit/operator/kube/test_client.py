"""Errors of the Kubernetes client become the operator's own."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from unittest import mock

import pytest
from kubernetes.client.exceptions import ApiException

from gracepoint_operator.kube import client, objects


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (404, client.NotFound),
        (409, client.Conflict),
        (403, client.Refused),
        (422, client.Refused),
        (429, client.Unavailable),
        (500, client.Unavailable),
        (0, client.Unavailable),
    ],
)
def test_client_errors_are_translated_with_the_servers_message(status: int, expected: type[client.KubeError]) -> None:
    error = ApiException(status=status, reason="Because")
    error.body = '{"kind": "Status", "message": "pods are not there"}'
    translated = client.of_status("GET /api/v1/pods", error)
    assert type(translated) is expected
    assert "GET /api/v1/pods" in str(translated)
    assert "pods are not there" in str(translated)


LISTED: dict[str, Any] = {
    "kind": "PartialObjectMetadataList",
    "metadata": {"resourceVersion": "12", "continue": "abc", "remainingItemCount": 7},
    "items": [
        {"metadata": {"uid": "u-1", "resourceVersion": "5", "name": "one", "labels": {"a": "b"}, "generation": 3}},
        {"metadata": {"uid": "u-2"}},
    ],
}


def test_of_a_list_of_metadata_only_uids_and_versions_are_kept() -> None:
    assert client.decoded_versions(json.dumps(LISTED).encode()) == {
        "metadata": {"resourceVersion": "12", "continue": "abc"},
        "items": [{"metadata": {"uid": "u-1", "resourceVersion": "5"}}, {"metadata": {"uid": "u-2"}}],
    }


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param({"metadata": {}, "items": None}, id="no items"),
        pytest.param({"items": []}, id="no metadata"),
        pytest.param({**LISTED, "items": [{"metadata": {"uid": 7}}]}, id="a UID that is no text"),
        pytest.param({**LISTED, "metadata": {"resourceVersion": None}}, id="no version"),
    ],
)
def test_a_list_in_another_form_is_decoded_whole(listed: Any) -> None:
    assert client.decoded_versions(json.dumps(listed).encode()) == listed


def test_an_answer_that_is_no_json_is_an_error() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        client.decoded_versions(b"upstream connect error")


async def test_what_comes_in_thousands_lets_urgent_calls_go_first_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def call_api(path: str, *_: Any, **__: Any) -> Any:
        answered.wait(60)
        return mock.Mock(data=b"{}")

    api = client.KubeClient(mock.Mock(call_api=call_api))
    apart = api.apart()
    try:
        ordinary = asyncio.create_task(api.get(objects.NODES, None, "ordinary"))
        await asyncio.sleep(0)
        monkeypatch.setattr(client, "_URGENT_FIRST_S", 60.0)
        async with asyncio.timeout(30):
            await api.let_urgent_first()  # for the ordinary one nobody waits
        urgent = [asyncio.create_task(apart.get(objects.NODES, None, "urgent")) for _ in range(2)]
        await asyncio.sleep(0)
        waiting = asyncio.create_task(api.let_urgent_first())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        monkeypatch.setattr(client, "_URGENT_FIRST_S", 0.01)
        async with asyncio.timeout(30):
            await api.let_urgent_first()  # it does not wait for ever
        assert not any(task.done() for task in urgent)
        answered.set()
        async with asyncio.timeout(30):
            await asyncio.gather(ordinary, waiting, *urgent)
    finally:
        answered.set()
        api.close()


async def test_calls_apart_do_not_wait_for_the_others_and_all_end_together() -> None:
    answered, arrived = threading.Event(), threading.Semaphore(0)

    def call_api(path: str, *_: Any, **__: Any) -> Any:
        if path.endswith("/slow"):
            arrived.release()
            answered.wait(60)
        return mock.Mock(data=json.dumps({"path": path}).encode())

    api = client.KubeClient(mock.Mock(call_api=call_api))
    apart = api.apart()
    slow = [asyncio.create_task(api.get(objects.NODES, None, "slow")) for _ in range(2 * client.THREADS)]
    try:
        for _ in range(client.THREADS):
            assert await asyncio.to_thread(arrived.acquire, timeout=60)
        assert (await apart.get(objects.NODES, None, "quick"))["path"].endswith("/quick")
        assert not any(task.done() for task in slow)
    finally:
        answered.set()
        await asyncio.gather(*slow)
        api.close()
    for each in (api, apart):
        with pytest.raises(RuntimeError, match="shutdown"):
            await each.get(objects.NODES, None, "late")
