"""Writes the answers to requests into their statuses.

Runs as tasks of a scribe on the core's event loop. Both replicas come to the same answer and write it; the second
write changes nothing.
"""

from __future__ import annotations

from gracepoint_operator.decisions.request_answers import Answer
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.observability.metrics import Metrics


class RequestWriter:
    """Keeps requests' statuses up to what was decided.

    Args:
        api: The API server.
        metrics: Counts failures.
        interval_s: Pause between two writes of one request.
    """

    def __init__(self, api: KubeClient, metrics: Metrics, interval_s: float) -> None:
        self._api = api
        self._answers: dict[Key, Answer] = {}  # the newest one for each request
        self._write_queue = WriteQueue("request", self._write, metrics, interval_s)

    def answer(self, answer: Answer) -> None:
        """Has it written, unless that was asked for already: one answer is decided until the watch brings it."""
        key = answer.request.key
        known = self._answers.get(key)
        if known is None or (known.request.uid, known.status) != (answer.request.uid, answer.status):
            self._answers[key] = answer
            self._write_queue.touch(key, urgent=True)

    def forget(self, key: Key) -> None:
        """The request is gone."""
        self._answers.pop(key, None)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, key: Key) -> None:
        answer = self._answers.get(key)
        if answer is None:
            return
        namespace, name = key
        try:
            found = await self._api.get(kinds.PREEMPTIONS, namespace, name)
            if found["metadata"]["uid"] != answer.request.uid:
                return  # another one of that name; the watch is going to bring it
            patch = {
                "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
                "status": answer.status.to_json(),
            }
            await self._api.merge_status(kinds.PREEMPTIONS, namespace, name, patch)
        except client.NotFound:
            return
