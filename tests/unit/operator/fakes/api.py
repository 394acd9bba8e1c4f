"""An API server in memory, behind the real façade: only the HTTP call of ``Kube`` is replaced.

Does what the operator relies on: resource versions and conflicts, 404 and 409, merge patches, the status
subresource, server-side apply of a list map, deletion of one version, TokenReviews.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from gracepoint.wire.names import TOKEN_AUDIENCE
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import APPLY_PATCH, JsonObject
from tests.unit.operator.fakes.objects import Clock, stamp


class MemoryApi(client.KubeClient):
    """Objects by path.

    Attributes:
        objects: What is there, by the path of the object.
        tokens: Token -> status of its review.
        calls: Method and path of every call.
        failing: Errors that the next calls raise, first first.
        failing_only: Method of the calls that raise them. Empty: all methods.

    Subclasses say in ``arrives`` and ``store`` what is special of theirs.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._version = 100
        self.objects: dict[str, JsonObject] = {}
        self.tokens: dict[str, JsonObject] = {}
        self.calls: list[str] = []
        self.failing: list[client.KubeError] = []
        self.failing_only = ""
        self._urgent = client.Urgent()

    def apart(self) -> client.KubeClient:
        return self

    def close(self) -> None:
        pass

    def add(self, kind: objects.Kind, body: JsonObject) -> JsonObject:
        """Puts an object there, as its own controller would; returns it as stored."""
        meta = body["metadata"]
        stored = self._new_version(copy.deepcopy(body))
        self.objects[kind.path(meta.get("namespace"), meta["name"])] = stored
        return copy.deepcopy(stored)

    def restore(self, *, version: int) -> None:
        """Counts versions from this one on again, as after a restore from a backup."""
        self._version = version

    def remove(self, kind: objects.Kind, body: JsonObject) -> None:
        meta = body["metadata"]
        del self.objects[kind.path(meta.get("namespace"), meta["name"])]

    def of(self, kind: objects.Kind) -> list[JsonObject]:
        """All objects of a kind, by name."""
        return [
            body
            for path, body in sorted(self.objects.items())
            if path.startswith(kind.prefix + "/") and path.split("/")[-2] == kind.plural
        ]

    def bind_token(self, token: str, namespace: str, pod_uid: str, audience: str = TOKEN_AUDIENCE) -> None:
        """A projected token of a pod, as kubelet mounts it."""
        self.tokens[token] = {
            "authenticated": True,
            "audiences": [audience],
            "user": {
                "username": f"system:serviceaccount:{namespace}:default",
                "extra": {"authentication.kubernetes.io/pod-uid": [pod_uid]},
            },
        }

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        """A call has arrived, and is not answered yet. An error that this raises is the answer."""

    def store(self, body: JsonObject) -> None:
        """A version of an object is stored. An error that this raises is the answer to the call that wrote it."""

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        return await self.answer(method, path, **options)

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
        """Answers a call, as ``KubeClient`` makes it."""
        self.calls.append(f"{method} {path}")
        await self.arrives(method, path, query or {})
        if self.failing and self.failing_only in ("", method):
            raise self.failing.pop(0)
        if path == objects.TOKEN_REVIEWS.path():
            return self._review(body or {})
        return read(copy.deepcopy(self._answer(method, path, body or {}, content_type, dict(query or {}))), 0)

    def _answer(self, method: str, path: str, body: JsonObject, content_type: str, query: dict[str, str]) -> JsonObject:
        if method == "POST":
            return self._create(path, copy.deepcopy(body))
        if method == "GET" and "limit" in query:
            plural = path.split("/")[-1]
            prefix = path.removesuffix(f"/{plural}")
            selector = query.get("labelSelector", "")
            items = [body for body in self.of(objects.Kind(prefix, plural)) if _selects(selector, body)]
            if wanted := query.get("fieldSelector", "").removeprefix("regarding.uid="):
                items = [body for body in items if body.get("regarding", {}).get("uid") == wanted]
            if query["limit"] == "1":
                return {"items": items[:1], "metadata": {"remainingItemCount": max(len(items) - 1, 0)}}
            return {"items": items, "metadata": {}}
        target = path.removesuffix("/status")
        if target not in self.objects:
            raise client.NotFound(f"{method} {path}: not there")
        if method == "GET":
            return self.objects[target]
        stored = copy.deepcopy(self.objects[target])
        if method == "DELETE":
            return self._delete(target, body["preconditions"])
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, stored["metadata"]["resourceVersion"]):
            raise client.Conflict(f"{method} {path}: version {wanted} is not the newest")
        whole = [part for part in body if part not in ("metadata", "status")]
        parts = ["status"] if path.endswith("/status") else whole
        if (uid := body.get("metadata", {}).get("uid")) not in (None, stored["metadata"].get("uid")):
            raise client.Conflict(
                f"{method} {path}: another object, with the UID {stored['metadata']['uid']}, not {uid}"
            )
        for part in {"annotations", "labels"} & body.get("metadata", {}).keys():
            stored["metadata"][part] = _merged(stored["metadata"].get(part, {}), body["metadata"][part])
        if content_type == APPLY_PATCH:
            _apply(stored.setdefault("status", {}), body["status"])
        else:
            before = stored.get("spec")
            stored |= {part: _merged(stored.get(part, {}), body.get(part, {})) for part in parts}
            if stored.get("spec") != before and "generation" in stored["metadata"]:
                stored["metadata"]["generation"] += 1
        self.objects[target] = self._new_version(stored)
        return self.objects[target]

    def _create(self, path: str, body: JsonObject) -> JsonObject:
        target = f"{path}/{body['metadata']['name']}"
        if target in self.objects:
            raise client.Conflict(f"POST {path}: {body['metadata']['name']} exists")
        body.pop("status", None)
        body["metadata"]["uid"] = f"uid-{body['metadata']['name']}"
        body["metadata"]["creationTimestamp"] = stamp(self._clock())
        body["metadata"]["generation"] = 1
        self.objects[target] = self._new_version(body)
        return self.objects[target]

    def _delete(self, target: str, preconditions: JsonObject) -> JsonObject:
        meta = self.objects[target]["metadata"]
        if any(meta[field] != wanted for field, wanted in preconditions.items()):
            raise client.Conflict(f"DELETE {target}: found {meta}, expected {preconditions}")
        return self.objects.pop(target)

    def _new_version(self, body: JsonObject) -> JsonObject:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self.store(body)
        return body

    def _review(self, body: JsonObject) -> JsonObject:
        known = self.tokens.get(body["spec"]["token"])
        if known is None:
            return {"status": {"error": "[invalid bearer token]", "user": {}}}
        wanted = body["spec"].get("audiences")
        if wanted is not None and not set(wanted) & set(known["audiences"]):
            return {"status": {"error": "token audiences are not acceptable", "user": {}}}
        return {"status": known}


def _selects(selector: str, body: JsonObject) -> bool:
    """Whether the labels of an object are those of a selector, of which each part is a label or ``!`` and a label."""
    labels = body["metadata"].get("labels") or {}
    return all((part.lstrip("!") in labels) is not part.startswith("!") for part in selector.split(",") if part)


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def _apply(status: JsonObject, applied: JsonObject) -> None:
    """Entries of list maps that are keyed by name or type. The fields that the writer does not name stay others'."""
    for field, wanted in applied.items():
        key = "type" if field == "conditions" else "name"
        entries = {entry[key]: entry for entry in status.get(field, [])}
        for entry in wanted:
            entries[entry[key]] = entry
        status[field] = list(entries.values())
