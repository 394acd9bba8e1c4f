"""A client of the Kubernetes API: a few verbs on JSON objects.

Only this module uses the ``kubernetes`` package. The client of that package is synchronous. So every call runs in a
thread of a small pool that ``KubeClient`` owns, with a timeout, and the caller's event loop does not block. Objects are
plain dicts. Exceptions of the package and of urllib3 are turned into these:

    KubeError
    ├── NotFound        404: the object, or its whole kind, does not exist
    ├── Conflict        409 on a write: somebody else wrote in between
    │   └── AlreadyExists   409 on a create
    ├── Refused         any other 4xx: trying again does not help
    └── Unavailable     5xx, 429, timeouts, broken connections: trying again may help
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import kubernetes.client
import kubernetes.config
import urllib3.exceptions
from kubernetes.client.exceptions import ApiException

from gracepoint_operator.kube.kinds import TOKEN_REVIEWS, Kind

JsonObject = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 5.0
_LIST_TIMEOUT_S = 30.0
_LIST_CHUNK = 500
_THREADS = 8
_WRITES = frozenset({"POST", "PATCH"})


#: Names the operator in the audit log of the API server. The part before the slash owns the written fields.
FIELD_MANAGER = "gracepoint-operator"
USER_AGENT = f"{FIELD_MANAGER}/{importlib.metadata.version('gracepoint')}"


class KubeError(Exception):
    """A request to the API server failed."""


class NotFound(KubeError):
    """The object, or its whole kind, does not exist."""


class Conflict(KubeError):
    """Another client wrote the object in between."""


class AlreadyExists(Conflict):
    """An object of that name already exists."""


class Refused(KubeError):
    """The API server refuses the request; the same request will be refused again."""


class Unavailable(KubeError):
    """The API server could not be reached or was busy; the same request may succeed later."""


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What another client needs to reach the same API server. The files may be temporary."""

    server: str
    ca_path: str | None
    insecure: bool
    scheme: str | None
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


@dataclasses.dataclass(frozen=True)
class ObjectList:
    """Every object of a kind.

    Attributes:
        items: The objects.
        metadata: The metadata of the list, with the resourceVersion at which it was read.
    """

    items: list[JsonObject]
    metadata: JsonObject


class KubeClient:
    """Asynchronous calls to one API server. ``close`` ends the threads.

    Args:
        client: A configured client of the ``kubernetes`` package.
        count: Called in the caller's thread after each call with its method and its outcome: ``ok``, or the name of the
            error.
    """

    def __init__(
        self, client: kubernetes.client.ApiClient, count: Callable[[str, str], None] = lambda method, outcome: None
    ) -> None:
        client.user_agent = USER_AGENT
        self._client = client
        self._count = count
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="kube")

    @staticmethod
    def connect(
        kubeconfig: str | None = None,
        context: str | None = None,
        count: Callable[[str, str], None] = lambda method, outcome: None,
    ) -> KubeClient:
        """Connects with a kubeconfig file, or from inside the cluster if neither a file nor a context is given.

        Args:
            kubeconfig: Path of the kubeconfig file. None: the default file, if there is a ``context``.
            context: Name of a context in the file. None: its current context.
            count: See ``KubeClient``.

        Raises:
            KubeError: There is no configuration.
        """
        configuration = type.__call__(kubernetes.client.Configuration)
        try:
            if kubeconfig is None and context is None:
                kubernetes.config.load_incluster_config(client_configuration=configuration)
            else:
                kubernetes.config.load_kube_config(
                    kubeconfig, context=context, client_configuration=configuration, persist_config=False
                )
        except kubernetes.config.ConfigException as error:
            raise KubeError(
                f"no configuration for the API server (kubeconfig {kubeconfig!r}, context {context!r}): "
                f"{error}; run inside a cluster with a service account, or name a kubeconfig file"
            ) from error
        configuration.connection_pool_maxsize = _THREADS
        configuration.retries = False  # the callers decide whether and when to try again
        return KubeClient(kubernetes.client.ApiClient(configuration), count)

    def credentials(self) -> Credentials:
        """The current credentials. They change: the token of a service account is renewed on disk every hour."""
        configuration = self._client.configuration
        header = configuration.get_api_key_with_prefix("authorization") or ""
        scheme, _, token = header.rpartition(" ")
        return Credentials(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )

    def close(self) -> None:
        """Ends the threads. Calls that have not begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> JsonObject:
        return await self._call("GET", kind.path(namespace, name))

    async def list(self, kind: Kind, *, label_selector: str | None = None, namespace: str | None = None) -> ObjectList:
        """Returns every object of the kind in the cluster, or in one namespace.

        The list is read in chunks, which together are consistent.
        """
        if kind.any_version:
            group = await self._call("GET", kind.prefix)
            kind = kind.of_version(group["preferredVersion"]["groupVersion"])
        items: list[JsonObject] = []
        query: dict[str, str] = {"limit": str(_LIST_CHUNK)}
        if label_selector:
            query["labelSelector"] = label_selector
        while True:
            page = await self._call("GET", kind.path(namespace), query=query, timeout_s=_LIST_TIMEOUT_S)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            query["continue"] = metadata.get("continue") or ""
            if not query["continue"]:
                return ObjectList(items, metadata)

    async def create(self, kind: Kind, namespace: str | None, body: JsonObject) -> JsonObject:
        try:
            return await self._call("POST", kind.path(namespace), body=body)
        except Conflict as error:
            raise AlreadyExists(str(error)) from error

    async def delete(self, kind: Kind, body: JsonObject) -> None:
        """Deletes exactly this object, in the version of ``body``.

        Raises:
            NotFound: The object does not exist.
            Conflict: There is another object of that name, or another version.
        """
        meta = body["metadata"]
        version = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": version}
        await self._call("DELETE", kind.path(meta.get("namespace"), meta["name"]), body=options)

    async def merge(self, kind: Kind, namespace: str | None, name: str, body: JsonObject) -> JsonObject:
        """Merge-patches the object itself, without its status."""
        path = kind.path(namespace, name)
        return await self._call("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def merge_status(self, kind: Kind, namespace: str, name: str, body: JsonObject) -> JsonObject:
        """Merge-patches the status. If ``body`` has ``metadata.resourceVersion``, only that version is changed."""
        path = kind.path(namespace, name, "status")
        return await self._call("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def apply_status(
        self, kind: Kind, namespace: str, name: str, body: JsonObject, *, manager: str
    ) -> JsonObject:
        """Server-side applies the status fields that ``manager`` owns."""
        path = kind.path(namespace, name, "status")
        query = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", path, query=query, body=body, content_type=APPLY_PATCH)

    async def review_token(self, token: str, audience: str) -> JsonObject:
        """Returns the status of a TokenReview: whose token it is, or why it is not valid."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        review = await self._call("POST", TOKEN_REVIEWS.path(), body=body)
        return cast(JsonObject, review.get("status") or {})

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = "application/json",
        timeout_s: float = _READ_TIMEOUT_S,
    ) -> JsonObject:
        written_by = {"fieldManager": FIELD_MANAGER} if method in _WRITES else {}
        call = functools.partial(
            self._client.call_api,
            path,
            method,
            query_params=list((written_by | dict(query or {})).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=(_CONNECT_TIMEOUT_S, timeout_s),
        )
        what = f"{method} {path}"
        loop = asyncio.get_running_loop()
        outcome = "Cancelled"
        try:
            answer = await loop.run_in_executor(self._threads, _translated, what, call)
            outcome = "ok"
            return answer
        except KubeError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._count(method, outcome)


def _translated(what: str, call: functools.partial[Any]) -> JsonObject:
    """Makes the call and translates its errors. Runs in a thread of the pool."""
    try:
        return cast(JsonObject, json.loads(call().data))
    except ApiException as error:
        raise _of_status(what, error) from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError, RecursionError) as error:
        raise Unavailable(f"{what}: {type(error).__name__}: {error}") from error


def _of_status(what: str, error: ApiException) -> KubeError:
    status = int(error.status or 0)
    message = f"{what}: HTTP {status} {error.reason}: {_message(error.body)}"
    if status == 404:
        return NotFound(message)
    if status == 409:
        return Conflict(message)
    if 400 <= status < 500 and status != 429:
        return Refused(message)
    return Unavailable(message)


def _message(body: str | bytes | None) -> str:
    """Returns the API server's own message if the body is a Status object, or else the body itself."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return repr((body or b"")[:200])
