"""kopf's part: it watches, and hands every object to the core. The only module that imports kopf.

Handlers are ``on.event`` only. Those put no finalizer on anything, store nothing in annotations and patch
nothing, so a pod's life is never held up by the operator; and kopf retries none of them, as there is nothing in
them that can fail. Peering is off: both replicas are active. Kinds that the cluster does not have yet are
watched as soon as their CRDs come.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import kopf

from gracepoint.wire.names import API_VERSION, GROUP
from gracepoint_operator.cache.resync import SELECTORS
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.client import USER_AGENT, KubeClient

#: By group, version and plural; without a version kopf watches the one that the cluster prefers.
_KINDS: dict[tuple[str, str | None, str], kinds.Kind] = {
    ("", "v1", "nodes"): kinds.NODES,
    ("", "v1", "pods"): kinds.PODS,
    ("batch", "v1", "jobs"): kinds.JOBS,
    ("jobset.x-k8s.io", "v1alpha2", "jobsets"): kinds.JOBSETS,
    ("karpenter.sh", "v1", "nodeclaims"): kinds.NODE_CLAIMS,
    ("kueue.x-k8s.io", None, "workloads"): kinds.KUEUE_WORKLOADS,
    (GROUP, API_VERSION, "checkpointpolicies"): kinds.POLICIES,
    (GROUP, API_VERSION, "preemptions"): kinds.PREEMPTIONS,
}

_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 10.0
#: The API server ends a watch after this; kopf then goes on from where it was.
_WATCH_S = 240  # whole seconds: the API server refuses 240.0


class _Connection(kopf.ConnectionInfo):
    """Says who we are: kopf's own requests would be of ``kopf``."""

    def as_http_headers(self) -> dict[str, str]:
        return {**super().as_http_headers(), "User-Agent": USER_AGENT}


def run(core: Controller, api: KubeClient, stop: threading.Event, *, replica: str) -> None:
    """Watches until ``stop`` is set or the process gets SIGTERM or SIGINT. Call it on the main thread.

    Args:
        core: Gets every object.
        api: Its credentials are used.
        stop: Ends it from any thread.
        replica: This replica's name. kopf's own guess asks for the user's name, which a container's may lack.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        credentials = api.credentials()
        return _Connection(
            server=credentials.server,
            ca_path=credentials.ca_path,
            insecure=credentials.insecure,
            scheme=credentials.scheme,
            token=credentials.token,
            certificate_path=credentials.certificate_path,
            private_key_path=credentials.private_key_path,
        )

    @kopf.on.cleanup(registry=registry)
    async def release(**_: Any) -> None:
        stop.set()  # kopf waits for the flag in a thread, for which the loop waits in the end

    watch_all(registry, core)
    kopf.run(
        registry=registry,
        settings=settings(),
        clusterwide=True,
        standalone=True,
        identity=cast(Any, replica),  # a NewType of str that kopf does not export
        stop_flag=stop,
    )


def watch_all(registry: kopf.OperatorRegistry, core: Controller) -> None:
    """Has every object of every kind handed to the core."""
    for (group, version, plural), kind in _KINDS.items():
        _watch(registry, group, version, plural, kind, core)


def settings() -> kopf.OperatorSettings:
    """kopf's settings for an operator that only watches."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.posting.level = logging.CRITICAL
    made.peering.standalone = True
    made.persistence.finalizer = f"{GROUP}/never-set"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    made.networking.connect_timeout = _CONNECT_TIMEOUT_S
    made.networking.request_timeout = _REQUEST_TIMEOUT_S
    made.networking.error_backoffs = (0.2, 0.5, 1, 2, 3, 5, 5, 5, 5, 5, 5, 5)
    made.watching.connect_timeout = _CONNECT_TIMEOUT_S
    made.watching.server_timeout = _WATCH_S
    made.watching.client_timeout = _WATCH_S + 30
    made.queueing.error_delays = (0.1, 0.5, 1, 2, 5)
    made.execution.default_backoff = 1.0
    made.process.ultimate_exiting_timeout = 5.0  # the servers' last writes come after it, in 15 s for all
    for (group, _, plural), kind in _KINDS.items():
        selector = SELECTORS[kind]
        if selector is not None:
            made.watching.label_selectors[group, plural] = selector
    return made


def _watch(
    registry: kopf.OperatorRegistry, group: str, version: str | None, plural: str, kind: kinds.Kind, core: Controller
) -> None:
    @kopf.on.event(group=group, version=version, plural=plural, id=f"see-{plural}", registry=registry)
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        core.feed(kind, event["type"], dict(event["object"]))
