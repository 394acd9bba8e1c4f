"""Reads AdmissionReview v1 requests and builds the responses. Pure."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jsonpatch
from aiohttp import web

from gracepoint_operator.read_errors import CAUSES, said, shortened
from gracepoint_operator.webhooks.training_jobs import Json

API_VERSION = "admission.k8s.io/v1"


class NotAnAdmissionReview(ValueError):
    """The request's body is not an AdmissionReview of this version."""


@dataclasses.dataclass(frozen=True)
class AdmissionRequest:
    """A request of the API server.

    Attributes:
        name: Empty if the API server is going to generate one.
        object: The object. Of a deletion, the stored one.
        old: The stored object. None unless an object is updated or deleted.
    """

    uid: str
    namespace: str
    object: Json
    name: str = ""
    dry_run: bool = False
    old: Json | None = None

    @staticmethod
    def read(body: bytes) -> AdmissionRequest:
        """Reads the body of a webhook call.

        Raises:
            NotAnAdmissionReview: It is not an AdmissionReview of ``admission.k8s.io/v1``, or it has no object.
        """
        try:
            review: Any = json.loads(body)
            found = review["apiVersion"], review["kind"]
            request = review["request"]
            read = AdmissionRequest(
                request["uid"],
                request.get("namespace", ""),
                request["object"] if request.get("operation") != "DELETE" else request["oldObject"],
                request.get("name", ""),
                request.get("dryRun") is True,
                request.get("oldObject"),
            )
        except CAUSES as error:
            raise NotAnAdmissionReview(f"expected an AdmissionReview, found {body[:80]!r} ({said(error)})") from error
        if found != (API_VERSION, "AdmissionReview"):
            raise NotAnAdmissionReview(f"expected an AdmissionReview of {API_VERSION}, found {shortened(str(found))}")
        if not all(isinstance(text, str) for text in (read.uid, read.namespace, read.name)):
            raise NotAnAdmissionReview("request: expected texts as uid, namespace and name")
        if not isinstance(read.old, dict | None):
            raise NotAnAdmissionReview(f"request.oldObject: expected an object, found {shortened(repr(read.old))}")
        if not isinstance(read.object, dict):
            raise NotAnAdmissionReview(f"request.object: expected an object, found {shortened(repr(read.object))}")
        return read

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the object. Empty if they cannot be read."""
        metadata = self.object.get("metadata")
        labels = metadata.get("labels") if isinstance(metadata, dict) else None
        return labels if isinstance(labels, dict) else {}


def allowed(request: AdmissionRequest, wanted: Json, warnings: Sequence[str] = ()) -> Json:
    """Returns the response that changes the request's object to ``wanted``. Clients show the warnings."""
    response: Json = {"uid": request.uid, "allowed": True}
    if warnings:
        response["warnings"] = list(warnings)
    patch = jsonpatch.make_patch(request.object, wanted).patch
    if patch:
        text = json.dumps(patch, separators=(",", ":"))
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text.encode()).decode()}
    return _review(response)


def refused(request: AdmissionRequest, message: str) -> Json:
    """Returns the response that refuses the request and shows ``message`` to the user who made it."""
    status = {"code": 422, "reason": "Invalid", "message": message}
    return _review({"uid": request.uid, "allowed": False, "status": status})


def later(request: AdmissionRequest, message: str) -> Json:
    """Returns the response for an eviction that has to wait.

    It is the response that a PodDisruptionBudget causes, after which every client tries again.
    """
    status = {"code": 429, "reason": "TooManyRequests", "message": message}
    return _review({"uid": request.uid, "allowed": False, "status": status})


def unknown(request: AdmissionRequest, message: str) -> Json:
    """Returns the response for a request that cannot be decided now. The same request may succeed later."""
    status = {"code": 503, "reason": "ServiceUnavailable", "message": message}
    return _review({"uid": request.uid, "allowed": False, "status": status})


def _review(response: Json) -> Json:
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


#: JobSets and pods are usually smaller. While a larger body is handled, it may take twenty times its size in memory.
_LARGE_BYTES = 256 * 1024
_LARGE_AT_ONCE = 2


# Reads the bodies of webhook calls with limits on size, time, and the number of large bodies at once.
#
# Runs on the server's event loop. A call that waits for its turn does not delay other calls. Its turn ends with its
# answer, because the object is in memory until then.


class RequestBodies:
    """Reads bodies.

    Args:
        count_refused: Called with the reason for each body that is not taken.
        within_s: How long a body, or its turn, may take: longer than the API server waits for the slowest webhook.
    """

    def __init__(self, count_refused: Callable[[str], None], within_s: float = 10.0) -> None:
        self._within_s = within_s
        self._count_refused = count_refused
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    @contextlib.asynccontextmanager
    async def read(self, http: web.Request, at_most_bytes: int) -> AsyncIterator[bytes]:
        """Reads the body. The turn of a large body lasts until the context ends.

        Raises:
            web.HTTPRequestEntityTooLarge: It has more than ``at_most_bytes``.
            web.HTTPRequestTimeout: The body, or its turn, did not come within ``within_s``.
        """
        length = http.content_length
        if length is not None and length > at_most_bytes:
            self._count_refused("too_large")
            raise web.HTTPRequestEntityTooLarge(at_most_bytes, length)
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self._within_s):
                    if length is None or length > _LARGE_BYTES:
                        await turn.enter_async_context(self._large)
                    body = await http.clone(client_max_size=at_most_bytes).read()
            except web.HTTPRequestEntityTooLarge:
                self._count_refused("too_large")
                raise
            except TimeoutError as error:
                self._count_refused("too_slow")
                message = f"the body: not here, or not looked at, within {self._within_s:.0f} s; send it again"
                raise web.HTTPRequestTimeout(text=message) from error
            yield body
