"""Writes the answers to requests into their statuses.

Runs as tasks of a write queue on the controller's event loop. Both replicas decide the same answer and write it. The
second write changes nothing. A replica whose view is older may find that nothing comes of a request which the other
one has adopted. So Superseded is written only over the phase from which it was decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gracepoint_operator.decisions import request_answers
from gracepoint_operator.decisions.request_answers import Answer
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.resources import RequestPhase

#: A request may arrive before its workload, because both may be in one file. It is not refused before this time.
_WORKLOAD_COMES_S = 5.0


class RequestWriter:
    """Keeps the statuses of requests up to date.

    Args:
        api: The API server.
        metrics: Counts failures.
        interval_s: Seconds between two writes of one request.
    """

    def __init__(self, api: KubeClient, metrics: Metrics, interval_s: float) -> None:
        self._api = api
        self._answers: dict[Key, Answer] = {}  # the newest one for each request
        self._write_queue = WriteQueue("request", self._write, metrics, interval_s)

    def answer(self, answer: Answer) -> None:
        """Writes an answer soon. The same answer is decided again until the watch brings it, and is written once."""
        key = _key(answer.request.kind, answer.request.namespace, answer.request.name)
        known = self._answers.get(key)
        if known is None or (known.request.uid, known.status) != (answer.request.uid, answer.status):
            self._answers[key] = answer
            self._write_queue.touch(key, urgent=True)

    def answer_homeless(self, requests: Iterable[tuple[RequestRecord, Sequence[PreemptionRecord]]], now: float) -> None:
        """Answers requests whose workloads do not exist, some time after they were made.

        Args:
            requests: Each with the Preemption that its status names, if that is known.
            now: Seconds since the epoch.
        """
        for request, epochs in requests:
            if now - request.created_at <= _WORKLOAD_COMES_S:
                continue
            if (answer := request_answers.without_workload(request, epochs)) is not None:
                self.answer(answer)

    def forget(self, kind: kinds.Kind, namespace: str, name: str) -> None:
        """Forgets a request that was deleted, or is over for good."""
        self._answers.pop(_key(kind, namespace, name), None)

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

    async def _write(self, key: Key) -> None:
        answer = self._answers.get(key)
        if answer is None:
            return
        kind, namespace, name = answer.request.kind, answer.request.namespace, answer.request.name
        try:
            found = await self._api.get(kind, namespace, name)
            if found["metadata"]["uid"] != answer.request.uid:
                return  # another request of this name; the watch will bring it
            if answer.status.phase is RequestPhase.SUPERSEDED and _phase(found) != answer.request.status.phase:
                # The watch will bring what the other replica wrote. Then it is decided again.
                if self._answers.get(key) is answer:
                    del self._answers[key]
                return
            patch = {
                "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
                "status": answer.status.to_json(),
            }
            await self._api.merge_status(kind, namespace, name, patch)
        except client.NotFound:
            return


def _key(kind: kinds.Kind, namespace: str, name: str) -> Key:
    """Requests of both kinds may have one name."""
    return (namespace, f"{kind.plural}/{name}")


def _phase(body: client.JsonObject) -> str | None:
    phase: str | None = (body.get("status") or {}).get("phase")
    return phase
