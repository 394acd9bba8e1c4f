"""Lets kopf find a kind whose CRD was installed meanwhile, although the API server's discovery is late.

At each event of a CRD, kopf reads the discovery documents of the CRD's group and watches the kinds that they show. The
API server renews these documents some time after the last event. If kopf reads an older document, it does not look
again. So a document that lacks a watched kind counts as a failed request if the CRD of that kind is established: kopf
makes the request again. After a minute the document is taken as it is.

Runs on the event loop of one thread that watches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import aiohttp

from gracepoint_operator.kube.kinds import CRDS, Kind
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

#: How long a document may be late, in seconds. One or two are usual.
_LATE_AT_MOST_S = 60.0
_CRD_TIMEOUT_S = 5.0


class _DiscoveryIsLate(aiohttp.ClientConnectionError):
    """kopf makes the request again, after the pauses of its settings."""


class FreshDiscovery:
    """A middleware of kopf's session.

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
            log.error(
                "discovery lacks a kind, which is not watched until its CRD changes",
                extra=about(kind=kind.title, path=path, late_s=round(late_s, 1)),
            )
        return response

    async def _is_served(self, kind: Kind, request: aiohttp.ClientRequest) -> bool:
        """True if there is an established CRD that serves the version that ``request`` is about. False if not known."""
        url = request.url.with_path(CRDS.path()).with_query(fieldSelector=f"metadata.name={kind.plural}.{kind.group}")
        timeout = aiohttp.ClientTimeout(total=_CRD_TIMEOUT_S)
        async with request.session.get(url, middlewares=(), timeout=timeout) as response:
            found = (await response.json())["items"] if response.status == 200 else []
        version = _version(request.url.path) or kind.version
        return any(_serves(definition, version) for definition in found)


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
    served = {each["name"] for each in definition["spec"]["versions"] if each["served"]}
    return bool(served if version is None else version in served) and any(
        condition["type"] == "Established" and condition["status"] == "True" for condition in conditions
    )
