"""The handlers and settings that kopf runs with: each object of a watched kind goes to the controller.

The handlers are of ``on.event`` only. kopf then puts no finalizer on any object, stores nothing in annotations and
patches nothing, so the operator never delays the deletion of a pod. kopf retries none of them, because nothing in them
can fail. Peering is off, because both replicas are active. kopf begins to watch a kind that the cluster does not have
yet as soon as its CRD is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import kopf

from gracepoint.wire.names import GROUP
from gracepoint_operator.cache.listing.resync import SELECTORS
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.retry_pauses import RetryPauses

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
    registry: kopf.OperatorRegistry, controller: Controller, watched: Collection[kinds.Kind] = SELECTORS.keys()
) -> None:
    """Hands every object of these kinds to the controller."""
    for kind in SELECTORS:
        if kind in watched:
            _watch(registry, kind, controller)


def kind_at(path: str, watched: Collection[kinds.Kind] = SELECTORS.keys()) -> kinds.Kind | None:
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
    backoffs: Iterable[float] = REQUEST_BACKOFFS, watched: Collection[kinds.Kind] = SELECTORS.keys()
) -> kopf.OperatorSettings:
    """kopf's settings for an operator that only watches.

    Args:
        backoffs: The pauses in seconds between the attempts of one request.
        watched: The kinds that this run watches, at most one at each place in the API.
    """
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.posting.level = logging.CRITICAL
    made.peering.standalone = True
    made.persistence.finalizer = f"{GROUP}/never-set"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    made.persistence.diffbase_storage = _NoComparison()
    made.networking.connect_timeout = _CONNECT_TIMEOUT_S
    made.networking.request_timeout = _REQUEST_TIMEOUT_S
    made.networking.error_backoffs = backoffs
    made.watching.connect_timeout = _CONNECT_TIMEOUT_S
    made.watching.server_timeout = _WATCH_S
    made.watching.client_timeout = _WATCH_S + 30
    made.watching.inactivity_timeout = _INACTIVE_S
    made.queueing.error_delays = (0.1, 0.5, 1, 2, 5)
    made.queueing.idle_timeout = _OBJECT_IDLE_S
    made.execution.default_backoff = 1.0
    made.process.ultimate_exiting_timeout = None  # otherwise kopf kills the process when one of its runs ends slowly
    for kind, selector in SELECTORS.items():
        if selector is not None and kind in watched:
            made.watching.label_selectors[kind.group, kind.plural] = selector
    return made


class _NoComparison(kopf.DiffBaseStorage):
    """Keeps nothing. Otherwise kopf would copy each object at each event, to compare it with the one before."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _watch(registry: kopf.OperatorRegistry, kind: kinds.Kind, controller: Controller) -> None:
    # If the kind has no version, kopf watches the one that the cluster prefers.
    @kopf.on.event(
        group=kind.group, version=kind.version, plural=kind.plural, id=f"see-{kind.title}", registry=registry
    )
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        controller.watches.seen(kind, event["object"]["metadata"].get("namespace") or "")
        controller.feed(kind, event["type"], dict(event["object"]))
