"""Keeps certificate and trust up to date in the API: the operator's Secret, its ConfigMap and its webhooks.

One task on the controller's event loop. It runs once a minute, and at once when something changed here. Every five
seconds it looks whether somebody else has changed the webhooks: without their authorities, the API server refuses
labelled workloads. Both replicas do so. Each write names the version that was read, so one of two competing writes
fails, and its replica reads again. While the API server fails, what this replica knows stays in force, and the task
tries again.

The chart sets no ``caBundle``: during an overlap the API server must trust the certificates of both authorities, and
what the chart would set is only one of them. Where the chart or cert-manager does set it, ``TrustPlaces`` names no
webhooks, and the operator has no right to change them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import dataclasses
import functools
import logging
import ssl
import time
from collections.abc import Awaitable, Callable

from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.retry_pauses import RetryPauses
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.trust import pem, rotation
from gracepoint_operator.trust.bundle import Bundle
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.trust.pem import NotPem
from gracepoint_operator.trust.rotation import OwnCertificates

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_LOOK_S = 5.0
_FIRST_AGAIN_S = 2.0
#: The steps, as the metric names them.
_SECRET, _CONFIG_MAP, _MUTATING, _VALIDATING = "secret", "config_map", "mutating_webhooks", "validating_webhooks"


@dataclasses.dataclass(frozen=True)
class TrustPlaces:
    """Where certificate and trust are kept in the API.

    Attributes:
        namespace: The operator's namespace.
        secret: The Secret of the certificate that the operator makes. Empty: others make the certificate.
        config_map: The ConfigMap of the trusted authorities. Empty: they are not kept.
        mutating: The name of the MutatingWebhookConfiguration. Empty: others set its ``caBundle``.
        validating: The same of the ValidatingWebhookConfiguration.
        host: The name that the certificate is for.
    """

    namespace: str = ""
    secret: str = ""
    config_map: str = ""
    mutating: str = ""
    validating: str = ""
    host: str = "localhost"


class TrustKeeper:
    """See the module.

    Args:
        api: The API server.
        certificates: What this replica serves and trusts.
        places: Where they are kept.
        metrics: Counts failures.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        api: KubeClient,
        certificates: Certificates,
        places: TrustPlaces,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._certificates = certificates
        self._places = places
        self._metrics = metrics
        self._clock = clock
        for what in (_SECRET, _CONFIG_MAP, _MUTATING, _VALIDATING):
            metrics.trust_failures.labels(what=what)  # from 0 on, so that increase() sees the first failures
        self._webhook_steps = tuple(
            (what, functools.partial(self._webhooks, kind, name), name)
            for what, kind, name in (
                (_MUTATING, kinds.MUTATING_WEBHOOKS, places.mutating),
                (_VALIDATING, kinds.VALIDATING_WEBHOOKS, places.validating),
            )
        )
        self._wake = asyncio.Event()
        self._said = ""

    def touch(self) -> None:
        """Runs soon, because something changed here."""
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        retry_pauses = RetryPauses(_FIRST_AGAIN_S, _EVERY_S)
        pauses = iter(retry_pauses)
        while True:
            self._wake.clear()  # before the run, so that a change during it causes another one
            if await self.once():
                pauses = iter(retry_pauses)
                await self._stay_told()
            else:
                await self._woken(next(pauses))

    async def once(self) -> bool:
        """Brings everything up to date. Returns False if something could not be."""
        places = self._places
        return await self._do(
            (_SECRET, self._own_certificate, places.secret),
            (_CONFIG_MAP, self._bundle, places.config_map),
            *self._webhook_steps,
        )

    async def _stay_told(self) -> None:
        """Waits until everything is due again, and puts back meanwhile what others take away from the webhooks."""
        for _ in range(round(_EVERY_S / _LOOK_S)):
            if await self._woken(_LOOK_S) or not await self._do(*self._webhook_steps):
                return

    async def _woken(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._wake.wait()
        return False

    async def _do(self, *steps: tuple[str, Callable[[], Awaitable[None]], str]) -> bool:
        """Takes steps: what each is about, and the name of its object. Returns False if one of them failed."""
        done, said = True, ""
        for what, step, name in steps:
            if not name:
                continue
            try:
                await step()
            except client.Conflict:  # the other replica was first
                done = False
            except (client.KubeError, NotPem, ssl.SSLError) as error:
                done, said = False, f"{what}: {error}"
                self._metrics.trust_failures.labels(what=what).inc()
                if said != self._said:
                    log.error("certificate or trust not kept, trying again", extra=about(what=what, error=str(error)))
        self._said = said
        return done

    async def _own_certificate(self) -> None:
        places, certificates = self._places, self._certificates
        body = await self._api.get(kinds.SECRETS, places.namespace, places.secret)
        found = OwnCertificates.of(body.get("data") or {})
        state = found
        if state.leaf is None and certificates.served is not None:
            # The certificate is from a release whose chart made it.
            state = rotation.adopted(certificates.served, certificates.ca)
        state = rotation.renewed(
            state,
            places.secret,
            [places.host, f"{places.host}.cluster.local"],
            self._clock(),
            certificates.overlap_s,
        )
        if state != found:
            await self._api.merge(kinds.SECRETS, places.namespace, places.secret, _changed(body, data=state.data()))
            log.info("certificate made", extra=about(secret=places.secret, authorities=len(state.authorities)))
        assert state.leaf is not None
        certificates.offer(state.leaf, pem.read(state.bundle))

    async def _bundle(self) -> None:
        places = self._places
        body = await self._api.get(kinds.CONFIG_MAPS, places.namespace, places.config_map)
        found: Bundle
        try:
            found = Bundle.of(body.get("data") or {})
        except NotPem as error:
            log.error("trusted authorities cannot be read, and are written anew", extra=about(error=str(error)))
            found = Bundle()
        self._certificates.trust(found)
        self._certificates.advance()
        bundle = self._certificates.bundle
        if bundle.items and bundle != found:
            await self._api.merge(
                kinds.CONFIG_MAPS, places.namespace, places.config_map, _changed(body, data=bundle.data())
            )

    async def _webhooks(self, kind: kinds.Kind, name: str) -> None:
        if not self._certificates.ca:
            return
        body = await self._api.get(kind, None, name)
        wanted = base64.b64encode(self._certificates.ca.encode()).decode()
        webhooks = copy.deepcopy(body.get("webhooks") or [])
        for webhook in webhooks:
            webhook["clientConfig"]["caBundle"] = wanted
        if webhooks != body.get("webhooks"):
            await self._api.merge(kind, None, name, _changed(body, webhooks=webhooks))
            log.info("webhooks told which authorities to trust", extra=about(configuration=name))


def _changed(body: client.JsonObject, **parts: object) -> client.JsonObject:
    """A patch of the version that was read."""
    return {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"]}, **parts}
