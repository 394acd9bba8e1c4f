"""An API server in memory with the objects of a large cluster.

Each object is kept as its JSON, and decoded for each answer, in a thread of its own: the event loop that asks is not
charged for it, as it is not charged for the real client's work.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.operator_scale_objects import Size, stored
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes.api import MemoryApi

#: How the keys in etcd name the kinds.
_KINDS = {
    "minions": objects.NODES,
    "checkpointpolicies": objects.POLICIES,
    "jobsets": JOBSETS,
    "jobs": objects.JOBS,
    "pods": objects.PODS,
    "preemptions": objects.PREEMPTIONS,
}
_WATCHED = (objects.PREEMPTIONS, objects.POLICIES)


class StoredApi(MemoryApi):
    """See the module.

    Args:
        size: How many objects there are.

    Attributes:
        on_change: Called with kind, event and object after each write of a Preemption or a policy, in the API's thread.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(time.time)  # type: ignore[arg-type]  # it calls it alone
        self.on_change: Callable[[objects.Kind, str, JsonObject], None] = lambda kind, event, body: None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="api")
        self._lock = threading.Lock()
        self._stored_json: dict[str, bytes] = {}
        self._paths: dict[str, list[str]] = collections.defaultdict(list)  # by the path of the list
        for key, value in stored(size, time.time()):
            plural = next((part for part in key.split("/") if part in _KINDS), None)
            if plural is not None:
                kind, (*_, namespace, name) = _KINDS[plural], key.split("/")
                path = kind.path(None if kind is objects.NODES else namespace, name)
                self._stored_json[path] = value
                self._paths[kind.path()].append(path)

    def token_of(self, namespace: str, pod_uid: str) -> str:
        """The token of a pod."""
        token = base64.b64encode(f"{namespace}/{pod_uid}".encode()).decode()
        with self._lock:
            self.bind_token(token, namespace, pod_uid)
        return token

    def merged(self, kind: objects.Kind, namespace: str | None, name: str, patch: JsonObject) -> JsonObject:
        """Changes an object as somebody else would. Returns it."""
        with self._lock:
            return self._answer("PATCH", kind.path(namespace, name), patch, client.MERGE_PATCH, {})

    async def answer(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        timeout_s: float = 0.0,
        decode: Callable[[bytes], Any] = lambda data: data,
        read: Callable[[JsonObject, int], Any] = lambda answer, size: answer,
    ) -> Any:
        sent = None if body is None else json.dumps(body)

        def answered() -> Any:
            with self._lock:
                given = {} if sent is None else json.loads(sent)
                if path == objects.TOKEN_REVIEWS.path():
                    return self._review(given)
                if method == "GET" and "limit" in (query or {}):
                    return read(*self._page(path, dict(query or {}), metadata_only=accept == client.METADATA_ONLY))
                target = path.removesuffix("/status")
                answer = json.loads(json.dumps(self._answer(method, path, given, content_type, dict(query or {}))))
            kind = next((kind for kind in _WATCHED if f"/{kind.plural}" in path), None)
            if method != "GET" and kind is not None:
                self.on_change(kind, "DELETED" if method == "DELETE" else "MODIFIED", answer)
            del target
            return read(answer, 0)

        return await asyncio.get_running_loop().run_in_executor(self._thread, answered)

    def _answer(self, method: str, path: str, body: JsonObject, content_type: str, query: dict[str, str]) -> JsonObject:
        target = path.removesuffix("/status")
        if target in self._stored_json and target not in self.objects:
            self.objects[target] = self._new_version(json.loads(self._stored_json[target]))
        return super()._answer(method, path, body, content_type, query)

    def _page(self, path: str, query: dict[str, str], *, metadata_only: bool) -> tuple[JsonObject, int]:
        paths = self._paths.get(path, [])
        begin, limit = int(query.get("continue") or 0), int(query["limit"])
        items, size = [], 0
        for target in paths[begin : begin + limit]:
            text = self._stored_json[target]
            body = self.objects[target] if target in self.objects else json.loads(text)
            body["metadata"].setdefault("resourceVersion", "50")
            items.append({"metadata": body["metadata"]} if metadata_only else body)
            size += len(text)
        more = str(begin + limit) if begin + limit < len(paths) else ""
        return {"items": items, "metadata": {"resourceVersion": str(self._version), "continue": more}}, size
