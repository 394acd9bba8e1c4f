"""The handlers and settings that kopf runs with: each object of a watched kind goes to the controller.

The handlers are of ``on.event`` only. kopf then puts no finalizer on any object, stores nothing in annotations and
patches nothing, so the operator never delays the deletion of a pod. kopf retries none of them, because nothing in them
can fail. Peering is off, because both replicas are active. kopf begins to watch a kind that the cluster does not have
yet as soon as its CRD is installed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import aiohttp
import kopf

from gracepoint.wire.names import GROUP
from gracepoint_operator.cache.relister import SELECTORS
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import RetryPauses
from gracepoint_operator.kube.objects import CRDS, Kind
from gracepoint_operator.logs import about

_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 10.0
#: The API server ends a watch after this time, and sends a bookmark shortly before. kopf continues from there.
_WATCH_S = 25  # whole seconds: the API server refuses 25.0
#: A watch that has received nothing for this time counts as lost: a connection can break without a sign.
_INACTIVE_S = 30.0
#: kopf keeps a task and a queue for each object for this time after its last event.
_OBJECT_IDLE_S = 0.1
#: The pauses in seconds between the attempts of one request.
REQUEST_BACKOFFS = RetryPauses(0.2, 5.0)


def watch_all(
    registry: kopf.OperatorRegistry, controller: Controller, watched: Collection[objects.Kind] = SELECTORS.keys()
) -> None:
    """Hands every object of these kinds to the controller."""
    for kind in SELECTORS:
        if kind in watched:
            _watch(registry, kind, controller)


def kind_at(path: str, watched: Collection[objects.Kind] = SELECTORS.keys()) -> objects.Kind | None:
    """The kind that a request lists or watches, by the path of its URL. None for other requests.

    Args:
        path: The path.
        watched: The kinds that the thread watches.
    """
    match path.strip("/").split("/"):
        case ["api", _, plural] | ["api", _, "namespaces", _, plural]:
            place = ("", plural)
        case ["apis", group, _, plural] | ["apis", group, _, "namespaces", _, plural]:
            place = (group, plural)
        case _:
            return None
    return next((kind for kind in watched if (kind.group, kind.plural) == place), None)


def namespace_at(path: str) -> str:
    """The namespace in which a request lists or watches, by the path of its URL. "": all of them, or it has none."""
    match path.strip("/").split("/"):
        case ["api", _, "namespaces", namespace, _] | ["apis", _, _, "namespaces", namespace, _]:
            return namespace
    return ""


def settings(
    backoffs: Iterable[float] = REQUEST_BACKOFFS, watched: Collection[objects.Kind] = SELECTORS.keys()
) -> kopf.OperatorSettings:
    """kopf's settings for an operator that only watches.

    Args:
        backoffs: The pauses in seconds between the attempts of one request.
        watched: The kinds that this run watches, at most one at each place in the API.
    """
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.posting.enabled = False
    kopf_settings.posting.level = logging.CRITICAL
    kopf_settings.peering.standalone = True
    kopf_settings.persistence.finalizer = f"{GROUP}/never-set"
    kopf_settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    kopf_settings.persistence.diffbase_storage = _NoComparison()
    kopf_settings.networking.connect_timeout = _CONNECT_TIMEOUT_S
    kopf_settings.networking.request_timeout = _REQUEST_TIMEOUT_S
    kopf_settings.networking.error_backoffs = backoffs
    kopf_settings.watching.connect_timeout = _CONNECT_TIMEOUT_S
    kopf_settings.watching.server_timeout = _WATCH_S
    kopf_settings.watching.client_timeout = _WATCH_S + 30
    kopf_settings.watching.inactivity_timeout = _INACTIVE_S
    kopf_settings.queueing.error_delays = (0.1, 0.5, 1, 2, 5)
    kopf_settings.queueing.idle_timeout = _OBJECT_IDLE_S
    kopf_settings.execution.default_backoff = 1.0
    kopf_settings.process.ultimate_exiting_timeout = (
        None  # otherwise kopf kills the process when one of its runs ends slowly
    )
    for kind, selector in SELECTORS.items():
        if selector is not None and kind in watched:
            kopf_settings.watching.label_selectors[kind.group, kind.plural] = selector
    return kopf_settings


class _NoComparison(kopf.DiffBaseStorage):
    """Keeps nothing. Otherwise kopf would copy each object at each event, to compare it with the one before."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _watch(registry: kopf.OperatorRegistry, kind: objects.Kind, controller: Controller) -> None:
    # If the kind has no version, kopf watches the one that the cluster prefers.
    @kopf.on.event(
        group=kind.group, version=kind.version, plural=kind.plural, id=f"see-{kind.title}", registry=registry
    )
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        controller.watches.seen(kind, event["object"]["metadata"].get("namespace") or "")
        controller.feed(kind, event["type"], dict(event["object"]))


logger = logging.getLogger(__name__)

#: How long a document may be late, in seconds. One or two are usual.
_LATE_AT_MOST_S = 60.0
_CRD_TIMEOUT_S = 5.0


class _DiscoveryIsLate(aiohttp.ClientConnectionError):
    """kopf makes the request again, after the pauses of its settings."""


class FreshDiscovery:
    """Lets kopf find a kind whose CRD was installed meanwhile, although the API server's discovery is late.

    At each event of a CRD, kopf reads the discovery documents of the CRD's group and watches the kinds that they show.
    The API server renews these documents some time after the last event. If kopf reads an older document, it does not
    look again. So a document that lacks a watched kind counts as a failed request if the CRD of that kind is
    established: kopf makes the request again. After a minute the document is taken as it is.

    A middleware of kopf's session. It runs on the event loop of one thread that watches.

    Args:
        watched: The kinds that are watched with the session.
        clock: Seconds, of a clock that never goes back.
    """

    def __init__(self, watched: Collection[Kind], clock: Callable[[], float] = time.monotonic) -> None:
        self._custom = [kind for kind in watched if "." in kind.group]  # the others have no CRD
        self._clock = clock
        self._late_since: dict[tuple[Kind, str], float] = {}  # by kind and path of the document

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await handler(request)
        path = request.url.path
        about_kinds = [kind for kind in self._custom if _is_about(kind, path)]
        if not about_kinds or response.status not in (200, 404):
            return response
        document = await response.json() if response.status == 200 else {}  # kopf can read it again
        for kind in about_kinds:
            if _shows(document, kind) or not await self._is_served(kind, request):
                self._late_since.pop((kind, path), None)
                continue
            late_s = self._clock() - self._late_since.setdefault((kind, path), self._clock())
            if late_s < _LATE_AT_MOST_S:
                raise _DiscoveryIsLate(f"{path} lacks {kind.plural}, although its CRD is established")
            logger.error(
                "discovery lacks a kind, which is not watched until its CRD changes",
                extra=about(kind=kind.title, path=path, late_s=round(late_s, 1)),
            )
        return response

    async def _is_served(self, kind: Kind, request: aiohttp.ClientRequest) -> bool:
        """True if there is an established CRD that serves the version that ``request`` is about. False if not known."""
        url = request.url.with_path(CRDS.path()).with_query(fieldSelector=f"metadata.name={kind.plural}.{kind.group}")
        timeout = aiohttp.ClientTimeout(total=_CRD_TIMEOUT_S)
        async with request.session.get(url, middlewares=(), timeout=timeout) as response:
            definitions = (await response.json())["items"] if response.status == 200 else []
        version = _version(request.url.path) or kind.version
        return any(_serves(definition, version) for definition in definitions)


def _version(path: str) -> str | None:
    """The version that a discovery document is about. None: it is the document of all groups."""
    parts = path.strip("/").split("/")
    return parts[2] if len(parts) == 3 else None


def _is_about(kind: Kind, path: str) -> bool:
    """True if it is the path of a discovery document that shows the kind once that is served."""
    match path.strip("/").split("/"):
        case ["apis"]:
            return True
        case ["apis", group, version]:
            return group == kind.group and kind.version in (None, version)
    return False


def _shows(document: dict[str, Any], kind: Kind) -> bool:
    """True if the document has the kind, or its group if it is the document of all groups."""
    for group in document.get("groups") or ():
        if group["name"] == kind.group and (
            kind.version is None or kind.version in [version["version"] for version in group["versions"]]
        ):
            return True
    return kind.plural in [resource["name"] for resource in document.get("resources") or ()]


def _serves(definition: dict[str, Any], version: str | None) -> bool:
    """True if the CRD is established and serves the version, or any if that is None."""
    if "deletionTimestamp" in definition["metadata"]:
        return False
    conditions = (definition.get("status") or {}).get("conditions") or ()
    versions = {entry["name"] for entry in definition["spec"]["versions"] if entry["served"]}
    return bool(versions if version is None else version in versions) and any(
        condition["type"] == "Established" and condition["status"] == "True" for condition in conditions
    )


#: No name of an object begins with a dash.
_NOTHING = "metadata.name=-"


class EmptyLists:
    """Lets kopf begin its watches without a list of all objects. A middleware of kopf's session.

    kopf lists a kind only to learn the resourceVersion after which its watch begins, and keeps some kilobytes for each
    object that it was shown. The controller lists the objects itself (``cache.relister``): page by page, after the
    watch has its version. So the lists of kopf ask for a name that no object has. They are empty, and still have a
    version.

    If only some namespaces are watched, kopf itself learns from the list of namespaces which of them exist. So that
    list is left as it is.

    Args:
        watched: The kinds that are watched with the session.
        namespaces: The namespaces that are watched. Empty: all.
    """

    def __init__(self, watched: Collection[objects.Kind], namespaces: Collection[str]) -> None:
        self._emptied = [kind for kind in watched if not (namespaces and kind is objects.NAMESPACES)]

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        url = request.url
        if request.method == "GET" and "watch" not in url.query and kind_at(url.path, self._emptied) is not None:
            request.url = url.update_query(fieldSelector=_NOTHING)
        return await handler(request)
