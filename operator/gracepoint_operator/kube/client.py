"""A client of the Kubernetes API: a few verbs on JSON objects.

Only this module uses the ``kubernetes`` package. The client of that package is synchronous. So every call runs in a
thread of a small pool that ``KubeClient`` owns, with a timeout, and the caller's event loop does not block. What an
answer to somebody waits for has another pool (``apart``). Objects are plain dicts. Exceptions of the package and of
urllib3 are turned into ``KubeError``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import json
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import kubernetes.client
import kubernetes.config
import pydantic_core
import urllib3
import urllib3.exceptions
from kubernetes.client.exceptions import ApiException
from pydantic_core import core_schema

from gracepoint_operator.kube.objects import EVENTS, SUBJECT_ACCESS_REVIEWS, TOKEN_REVIEWS, Kind

JsonObject = dict[str, Any]


class KubeError(Exception):
    """A request to the API server failed."""


class NotFound(KubeError):
    """404: the object, or its whole kind, does not exist."""


class Conflict(KubeError):
    """409 on a write: another client wrote the object in between."""


class AlreadyExists(Conflict):
    """409 on a create: an object of that name already exists."""


class Refused(KubeError):
    """Any other 4xx: the API server refuses the request; the same request will be refused again."""


class Unavailable(KubeError):
    """5xx, 429, a timeout or a broken connection: the same request may succeed later."""


def answered(
    request: str, call: functools.partial[Any], decode: Callable[[bytes], Any], read: Callable[[JsonObject, int], Any]
) -> Any:
    """Makes the call, reads the answer and translates errors. Runs in a thread of the pool."""
    try:
        data = call().data
        return read(cast(JsonObject, decode(data)), len(data))
    except ApiException as error:
        raise of_status(request, error) from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError, RecursionError) as error:
        raise Unavailable(f"{request}: {type(error).__name__}: {error}") from error


def decoded(data: bytes) -> Any:
    """Decodes JSON.

    pydantic's parser takes three quarters of the time of Python's. It refuses what Python's accepts, such as half of a
    surrogate pair, which one object of a list may have.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return pydantic_core.from_json(data, cache_strings="keys")
    except ValueError:
        return json.loads(data)


def _texts(*names: str) -> core_schema.CoreSchema:
    fields = {name: core_schema.typed_dict_field(core_schema.str_schema(), required=False) for name in names}
    return core_schema.typed_dict_schema(fields)


def _objects(**fields: core_schema.CoreSchema) -> core_schema.CoreSchema:
    return core_schema.typed_dict_schema({name: core_schema.typed_dict_field(kind) for name, kind in fields.items()})


_VERSIONS = pydantic_core.SchemaValidator(
    _objects(
        metadata=_texts("resourceVersion", "continue"),
        items=core_schema.list_schema(_objects(metadata=_texts("uid", "resourceVersion"))),
    )
)


def decoded_versions(data: bytes) -> Any:
    """Decodes a list. Of each object only UID and version are kept. It takes a fifth of the time of ``decoded``.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return _VERSIONS.validate_json(data)
    except ValueError:
        return decoded(data)


def of_status(request: str, error: ApiException) -> KubeError:
    """Translates an answer of the API server that is an error. ``request``: the request."""
    status = int(error.status or 0)
    message = f"{request}: HTTP {status} {error.reason}: {_message(error.body)}"
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


_T = TypeVar("_T")


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


@dataclasses.dataclass(frozen=True)
class ListPage(Generic[_T]):
    """A part of a list.

    Attributes:
        items: What was read of each object.
        metadata: The metadata of the list, with the resourceVersion at which the whole list was read.
    """

    items: list[_T]
    metadata: JsonObject


__all__ = [
    "AlreadyExists",
    "Conflict",
    "Credentials",
    "JsonObject",
    "KubeClient",
    "KubeError",
    "NotFound",
    "ObjectList",
    "Refused",
    "Unavailable",
]


#: Asks for the metadata of listed objects, without their spec and status.
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 5.0
_LIST_TIMEOUT_S = 30.0
#: The first page of a list has few objects. From their size follows how many the next ones may have: a page is decoded
#: at once, and no other thread runs Python meanwhile.
_FIRST_PAGE = 50
_PAGE_BYTES = 1024 * 1024
_LARGEST_PAGE = 1000
THREADS = 8
#: Evictions without a pause must not hold everything else up for long.
_URGENT_FIRST_S = 0.05
_WRITES = frozenset({"POST", "PATCH"})


#: Names the operator in the audit log of the API server, before a slash and the version. It owns the written fields.
FIELD_MANAGER = "gracepoint-operator"
_VERSION = importlib.metadata.version("gracepoint")
USER_AGENT = f"{FIELD_MANAGER}/{_VERSION}"


class Urgent:
    """The calls in progress that an answer to somebody waits for. One event loop makes them and waits for their end."""

    def __init__(self) -> None:
        self._calls = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One of them is in progress inside of this."""
        self._calls += 1
        self._none.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._none.set()

    async def over(self, most_s: float) -> None:
        """Waits until none is in progress, for at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._none.wait()


class KubeClient:
    """Asynchronous calls to one API server. ``close`` ends the threads.

    Args:
        client: A configured client of the ``kubernetes`` package.
        count: Called in the caller's thread after each call with its method and its outcome: ``ok``, or the name of the
            error.
        name: Name of the program in the audit log, and the owner of the fields that it writes.
        request_timeout_s: Seconds for one request, without the connection. None: a few, and more for lists.
    """

    def __init__(
        self,
        client: kubernetes.client.ApiClient,
        count: Callable[[str, str], None] = lambda method, outcome: None,
        name: str = FIELD_MANAGER,
        request_timeout_s: float | None = None,
    ) -> None:
        client.user_agent = f"{name}/{_VERSION}"
        self._client = client
        self._name = name
        self._count = count
        self._request_timeout_s = request_timeout_s
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="kube")
        self._pools = [self._threads]  # also of the clients that ``apart`` has returned
        self._urgent = Urgent()  # the calls of these clients
        self._is_apart = False

    @staticmethod
    def connect(
        kubeconfig: str | None = None,
        context: str | None = None,
        count: Callable[[str, str], None] = lambda method, outcome: None,
        name: str = FIELD_MANAGER,
        as_user: str | None = None,
        as_groups: Sequence[str] = (),
        request_timeout_s: float | None = None,
    ) -> KubeClient:
        """Connects with a kubeconfig file, or from inside the cluster if neither a file nor a context is given.

        Args:
            kubeconfig: Path of the kubeconfig file. None: the default file, if there is a ``context``.
            context: Name of a context in the file. None: its current context.
            count: See ``KubeClient``.
            name: See ``KubeClient``.
            as_user: The user to act as. None: the one of the configuration.
            as_groups: The groups of that user.
            request_timeout_s: See ``KubeClient``.

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
        configuration.connection_pool_maxsize = 2 * THREADS  # with those of ``apart``
        configuration.retries = False  # the callers decide whether and when to try again
        client = kubernetes.client.ApiClient(configuration)
        if as_user is not None:
            client.set_default_header("Impersonate-User", as_user)
            _add_groups(client, as_groups)
        return KubeClient(client, count, name, request_timeout_s)

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

    def apart(self) -> KubeClient:
        """Returns a client with threads of its own: its calls never wait for those of this one, which closes it."""
        threads = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="kube apart")
        self._pools.append(threads)
        other = copy.copy(self)
        vars(other).update(_threads=threads, _is_apart=True)
        return other

    async def let_urgent_first(self) -> None:
        """Waits while calls of clients that ``apart`` has returned are in progress, for ``_URGENT_FIRST_S`` at most.

        Call it from the event loop of those clients, before what is not urgent and comes in thousands.
        """
        await self._urgent.over(_URGENT_FIRST_S)

    def close(self) -> None:
        """Ends the threads. Calls that have not begun are cancelled."""
        for threads in self._pools:
            threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> JsonObject:
        return cast(JsonObject, await self._call("GET", kind.path(namespace, name)))

    async def list(self, kind: Kind, *, label_selector: str | None = None, namespace: str | None = None) -> ObjectList:
        """Returns every object of the kind in the cluster, or in one namespace. For kinds with few objects."""
        items: list[JsonObject] = []
        metadata: JsonObject = {}
        async for page in self.pages(kind, _itself, label_selector=label_selector, namespace=namespace):
            items += page.items
            metadata = page.metadata
        return ObjectList(items, metadata)

    async def pages(
        self,
        kind: Kind,
        read: Callable[[JsonObject], _T],
        *,
        label_selector: str | None = None,
        namespace: str | None = None,
        metadata_only: bool = False,
    ) -> AsyncIterator[ListPage[_T]]:
        """Lists the objects of the kind in the cluster, or in one namespace, page by page. The pages are consistent.

        Args:
            kind: The kind.
            read: Called with each object in a thread of the pool. Only what it returns is kept.
            label_selector: Only objects with these labels.
            namespace: Only objects in this namespace.
            metadata_only: True: the objects have only a UID and a version.
        """
        kind = await self.preferred(kind)
        query: dict[str, str] = {"limit": str(_FIRST_PAGE)}
        if label_selector:
            query["labelSelector"] = label_selector

        def read_all(answer: JsonObject, size: int) -> tuple[ListPage[_T], int]:
            items = [read(item) for item in answer.get("items") or ()]
            return ListPage(items, answer.get("metadata") or {}), size

        while True:
            page, size = await self._call(
                "GET",
                kind.path(namespace),
                query=query,
                timeout_s=_LIST_TIMEOUT_S,
                accept=METADATA_ONLY if metadata_only else _JSON,
                decode=decoded_versions if metadata_only else decoded,
                read=read_all,
            )
            query["continue"] = page.metadata.get("continue") or ""
            if page.items and size:
                query["limit"] = str(min(max(_PAGE_BYTES * len(page.items) // size, 1), _LARGEST_PAGE))
            yield page
            if not query["continue"]:
                return

    async def events_about(self, namespace: str, uid: str) -> Sequence[JsonObject]:
        """Returns Events on one object, a few dozen at most."""
        query = {"limit": str(_FIRST_PAGE), "fieldSelector": f"regarding.uid={uid}"}
        page = await self._call("GET", EVENTS.path(namespace), query=query)
        return page.get("items") or ()

    async def count(self, kind: Kind, namespace: str) -> int:
        """Returns the number of objects of the kind in one namespace. The API server sends only one of them."""
        page = await self._call("GET", kind.path(namespace), query={"limit": "1"}, accept=METADATA_ONLY)
        remaining = (page.get("metadata") or {}).get("remainingItemCount") or 0
        return len(page.get("items") or ()) + int(remaining)

    async def preferred(self, kind: Kind) -> Kind:
        """Returns the kind in the version that the cluster prefers, if the kind names none."""
        if not kind.any_version:
            return kind
        group = await self._call("GET", kind.prefix)
        return kind.of_version(group["preferredVersion"]["groupVersion"])

    async def create(self, kind: Kind, namespace: str | None, body: JsonObject) -> JsonObject:
        try:
            return cast(JsonObject, await self._call("POST", kind.path(namespace), body=body))
        except Conflict as error:
            raise AlreadyExists(str(error)) from error

    async def delete(self, kind: Kind, body: JsonObject, *, force: bool = False) -> None:
        """Deletes exactly this object, in the version of ``body`` if it names one.

        Args:
            kind: Its kind.
            body: The object, or its metadata alone.
            force: True: nothing waits for the end of a pod's containers.

        Raises:
            NotFound: The object does not exist.
            Conflict: There is another object of that name, or another version.
        """
        meta = body["metadata"]
        version = {name: meta[name] for name in ("uid", "resourceVersion") if name in meta}
        options: JsonObject = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": version}
        if force:
            options["gracePeriodSeconds"] = 0
        await self._call("DELETE", kind.path(meta.get("namespace"), meta["name"]), body=options)

    async def merge(self, kind: Kind, namespace: str | None, name: str, body: JsonObject) -> JsonObject:
        """Merge-patches the object itself, without its status."""
        path = kind.path(namespace, name)
        return cast(JsonObject, await self._call("PATCH", path, body=body, content_type=MERGE_PATCH))

    async def merge_status(self, kind: Kind, namespace: str | None, name: str, body: JsonObject) -> JsonObject:
        """Merge-patches the status. If ``body`` has ``metadata.resourceVersion``, only that version is changed."""
        path = kind.path(namespace, name, "status")
        return cast(JsonObject, await self._call("PATCH", path, body=body, content_type=MERGE_PATCH))

    async def apply_status(
        self, kind: Kind, namespace: str, name: str, body: JsonObject, *, manager: str
    ) -> JsonObject:
        """Server-side applies the status fields that ``manager`` owns."""
        path = kind.path(namespace, name, "status")
        query = {"fieldManager": manager, "force": "true"}
        return cast(JsonObject, await self._call("PATCH", path, query=query, body=body, content_type=APPLY_PATCH))

    async def review_token(self, token: str, audience: str | None = None) -> JsonObject:
        """Returns the status of a TokenReview: whose token it is, or why it is not valid.

        Args:
            token: The token.
            audience: For whom it must be. None: for the API server.
        """
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token} | ({} if audience is None else {"audiences": [audience]}),
        }
        review = await self._call("POST", TOKEN_REVIEWS.path(), body=body)
        return cast(JsonObject, review.get("status") or {})

    async def review_access(self, user: JsonObject, path: str) -> bool:
        """True if the user, as a TokenReview names it, may GET the path of a URL that is no resource's."""
        spec = {key: user[key] for key in ("uid", "groups", "extra") if user.get(key)}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": spec | {"user": user.get("username"), "nonResourceAttributes": {"path": path, "verb": "get"}},
        }
        review = await self._call("POST", SUBJECT_ACCESS_REVIEWS.path(), body=body)
        return bool((review.get("status") or {}).get("allowed"))

    def _most_s(self, usual_s: float) -> float | None:
        """Returns the seconds for a request that usually gets ``usual_s``. None: there is no limit."""
        asked_s = usual_s if self._request_timeout_s is None else self._request_timeout_s
        return asked_s if math.isfinite(asked_s) else None

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        timeout_s: float = _READ_TIMEOUT_S,
        decode: Callable[[bytes], Any] = decoded,
        read: Callable[[JsonObject, int], Any] = lambda answer, size: answer,
    ) -> Any:
        """Sends a request. ``read`` gets the decoded answer and its number of bytes, in a thread of the pool."""
        written_by = {"fieldManager": self._name} if method in _WRITES else {}
        call = functools.partial(
            self._client.call_api,
            path,
            method,
            query_params=list((written_by | dict(query or {})).items()),
            header_params={"Accept": accept, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=(_CONNECT_TIMEOUT_S, self._most_s(timeout_s)),
        )
        request = f"{method} {path}"
        loop = asyncio.get_running_loop()
        outcome = "Cancelled"
        try:
            with self._urgent.call() if self._is_apart else contextlib.nullcontext():
                answer = await loop.run_in_executor(self._threads, answered, request, call, decode, read)
            outcome = "ok"
            return answer
        except KubeError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._count(method, outcome)


def _add_groups(client: Any, groups: Sequence[str]) -> None:
    """Lets all requests have a header for each group. The client's own headers have one value each."""
    request = client.request

    def with_groups(method: str, url: str, *, headers: Mapping[str, str] | None = None, **rest: Any) -> Any:
        several = urllib3.HTTPHeaderDict(headers)
        for group in groups:
            several.add("Impersonate-Group", group)
        return request(method, url, headers=several, **rest)

    if groups:
        client.request = with_groups


def _itself(body: JsonObject) -> JsonObject:
    return body


_chance = random.Random()


class RetryPauses:
    """Pauses between tries that fail: each twice as long as the one before, up to a limit.

    Each pause is shortened at random by up to half, so that replicas which failed together do not try again together.
    ``iter()`` gives the pauses from the shortest on, without end.

    Args:
        first_s: Upper limit of the first pause, in seconds.
        most_s: Upper limit of all pauses, in seconds.
        forgets_after_s: After so many seconds without a failure, the pauses begin with the shortest again.
        clock: Seconds, of a clock that never goes back.
    """

    def __init__(
        self,
        first_s: float,
        most_s: float,
        *,
        forgets_after_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._forgets_after_s = forgets_after_s
        self._clock = clock
        self._failures = 0
        self._over_at = math.inf  # when the newest pause is over

    def next_s(self, *, first_s: float | None = None) -> float:
        """Returns the next pause in seconds.

        Args:
            first_s: The first pause, and that after a time without a failure. It does not count as one. None: the
                shortest one.
        """
        now = self._clock()
        if now - self._over_at > self._forgets_after_s:
            self.reset()
        if first_s is not None and math.isinf(self._over_at):
            pause_s = first_s
        else:
            longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
            pause_s = longest_s * _chance.uniform(0.5, 1.0)
            self._failures += 1
        self._over_at = now + pause_s
        return pause_s

    def reset(self) -> None:
        """Starts over with the shortest pause. Call it after a success."""
        self._failures, self._over_at = 0, math.inf

    def __iter__(self) -> Iterator[float]:
        pauses = RetryPauses(self._first_s, self._most_s)
        while True:
            yield pauses.next_s()

    async def retried(
        self,
        call: Callable[..., Awaitable[_T]],
        *arguments: object,
        on: type[Exception] | tuple[type[Exception], ...],
        within_s: float = math.inf,
    ) -> _T:
        """Calls until that succeeds, with a pause after each failure. Returns the result.

        Args:
            call: What is tried.
            arguments: Its arguments.
            on: The errors after which it is tried again. Any other is raised.
            within_s: After so many seconds the next such error is raised, too.
        """
        loop = asyncio.get_running_loop()
        until_at = loop.time() + within_s
        pauses = iter(self)
        while True:
            try:
                return await call(*arguments)
            except on:
                if loop.time() >= until_at:
                    raise
            await asyncio.sleep(next(pauses))
