"""Which releases of the chart are installed, by their webhook configurations, and whether two answer for the same jobs.

The chart refuses a second release, but it does not see the cluster where it is rendered without one, as GitOps tools
do. So each operator looks, too: ``tell_of_others`` is one task on the controller's event loop, which ends when it is
cancelled. The rest is pure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.client import JsonObject, KubeClient, KubeError
from gracepoint_operator.kube.objects import LABEL_NAMESPACE_NAME
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)

#: The first look comes later, as Helm removes the configuration of a former name last.
_FIRST_S = 20.0
_EVERY_S = 300.0
_WEBHOOK = "jobsets.gracepoint.dev"


@dataclasses.dataclass(frozen=True)
class InstalledRelease:
    """A release.

    Attributes:
        configuration: The name of its MutatingWebhookConfiguration.
        host: The host name of its operator: ``<service>.<namespace>.svc``.
        namespaces: The namespaces that it answers for. Empty: all.
    """

    configuration: str
    host: str
    namespaces: frozenset[str]

    def shares(self, other: Collection[str]) -> str:
        """What it answers for as well as a release with these namespaces does, in words. Empty: nothing."""
        if self.namespaces and other:
            return ", ".join(sorted(self.namespaces.intersection(other)))
        return ", ".join(sorted(self.namespaces or other)) or "all namespaces"


def installed_releases(configurations: Iterable[JsonObject]) -> list[InstalledRelease]:
    """Reads MutatingWebhookConfigurations. Those of others are left out."""
    found = []
    for body in configurations:
        for webhook in body.get("webhooks") or ():
            if webhook.get("name") == _WEBHOOK:
                service = (webhook.get("clientConfig") or {}).get("service") or {}
                host = f"{service.get('name', '')}.{service.get('namespace', '')}.svc"
                found.append(InstalledRelease(str(body["metadata"]["name"]), host, _namespaces(webhook)))
    return found


def _namespaces(webhook: JsonObject) -> frozenset[str]:
    expressions = (webhook.get("namespaceSelector") or {}).get("matchExpressions") or ()
    return frozenset(
        name
        for expression in expressions
        if (expression.get("key"), expression.get("operator")) == (LABEL_NAMESPACE_NAME, "In")
        for name in expression.get("values") or ()
    )


async def tell_of_others(
    api: KubeClient,
    host: str,
    namespaces: Collection[str],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Says in the log that another release answers for the same jobs, once for each change. Runs until cancelled.

    Args:
        api: The API server.
        host: The host name of this operator.
        namespaces: The namespaces that this operator answers for. Empty: all.
        sleep: Waits.
    """
    said: dict[str, str] = {}
    pause_s = _FIRST_S
    while True:
        await sleep(pause_s)
        pause_s = _EVERY_S
        try:
            found = installed_releases((await api.list(kinds.MUTATING_WEBHOOKS)).items)
        except KubeError as error:
            if not said:
                log.warning("cannot see whether another release is installed", extra=about(error=str(error)))
            said = said or {"": ""}
            continue
        shared = {item.host: shares for item in found if item.host != host and (shares := item.shares(namespaces))}
        if shared and shared != said:
            for other, what in shared.items():
                log.error(
                    "another release of Gracepoint answers for the same namespaces, and a pod listens to only one of "
                    "the two: remove one, or give each watchNamespaces of its own",
                    extra=about(other=other, namespaces=what),
                )
        said = shared
