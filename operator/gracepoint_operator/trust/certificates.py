"""What this replica serves, and which authorities it publishes to pods and webhooks.

``Certificates`` belongs to the controller's event loop. The channel's thread reads ``served``, which is replaced as a
whole. It has a separate TLS context (``follow``), because OpenSSL allows no change of a context that another thread
uses. A renewed certificate is for new connections; open ones continue.

A server keeps the context that it began with, and OpenSSL keeps one certificate for each type of key in a context. So
each certificate gets a new context, to which the server's context hands every handshake (``load_pair``).

A certificate that nobody trusts yet is not served at once: pods and the API server first learn to trust its authority.
The replica keeps the old certificate in memory for that time, even if the files have only the new one. If others set
the ``caBundle`` of the webhooks (the chart, cert-manager), they set the new authority alone, and the webhooks' port
serves what the files have.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import dataclasses
import functools
import logging
import os
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from gracepoint.wire.snapshot_requests import Capability, write_capability
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient, RetryPauses
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust.bundle import (
    OVERLAP_S,
    Bundle,
    CapabilityKey,
    Certificate,
    NotPem,
    OwnCertificates,
    Pair,
    adopted,
    capability_keys_text,
    continued,
    issuers,
    read_capability_keys,
    read_certificates,
    renewed,
    renewed_capability_keys,
    renewed_leaf,
    signing_key,
)

logger = logging.getLogger(__name__)

POLL_S = 5.0
#: A certificate that expires this soon is replaced at once.
_LAST_MOMENT_S = 3600.0
#: In the folder of ``ca.crt``: the authority that will sign the next certificate.
_NEXT_AUTHORITY = "next-ca.crt"


def new_context() -> ssl.SSLContext:
    """Returns a TLS context for a server, without a certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def load_pair(context: ssl.SSLContext, pair: Pair) -> None:
    """Makes a server's context serve a certificate, instead of the one before.

    Raises:
        ssl.SSLError: The certificate and its key are damaged, or do not fit. The one before is still served.
    """
    new_server_context = new_context()

    def hand_over(connection: ssl.SSLObject, server_name: str | None, before: ssl.SSLContext) -> None:
        connection.context = new_server_context

    # The ssl module reads only files, and the container has no file system to write to. This one is in memory.
    if sys.platform != "linux":
        raise NotImplementedError("the operator runs on Linux alone")
    file = os.memfd_create("certificate")
    try:
        os.write(file, f"{pair.chain}\n{pair.key}".encode())
        new_server_context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    context.sni_callback = hand_over


class Certificates:
    """What this replica serves, and which authorities it publishes to pods and webhooks.

    Args:
        directory: Has ``tls.crt``, ``tls.key``, ``ca.crt`` and perhaps ``next-ca.crt``.
        required: False if the operator makes its certificate, so that the files may be missing.
        overlap_s: How long an authority is known before a certificate of it alone is served, in seconds.
        webhooks_follow: True if the webhooks' port serves what a source has at once, as others set their ``caBundle``.
        clock: Seconds since the epoch.

    Attributes:
        context: The TLS context of the webhooks. The channel has another one.
        served: The certificate for new connections. None: there is none yet.
        bundle: The trusted authorities.
        on_change: Called when ``served`` or ``bundle`` has changed.

    Raises:
        OSError: A file is missing.
        ssl.SSLError: The files do not hold a certificate with its key.
        NotPem: ``ca.crt`` holds no certificate.
    """

    def __init__(
        self,
        directory: Path,
        *,
        required: bool = True,
        overlap_s: float = OVERLAP_S,
        webhooks_follow: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self.context = new_context()
        self.served: Pair | None = None
        self.bundle = Bundle()
        self.on_change: Callable[[], None] = lambda: None
        self.overlap_s = overlap_s
        self._webhooks_follow = webhooks_follow
        self._clock = clock
        self._state: tuple[tuple[int, int], ...] = ()
        self._source_authorities: list[Certificate] = []
        self._next: Pair | None = None
        self._metrics: Metrics | None = None
        self._reads_files = required
        if required or self.has_files:
            self.load()

    @property
    def has_files(self) -> bool:
        """True if the directory has a certificate."""
        return (self.directory / "tls.crt").exists() and (self.directory / "ca.crt").exists()

    @property
    def ca(self) -> str:
        """The trusted authorities as PEM."""
        return self.bundle.pem

    def show_in(self, metrics: Metrics) -> None:
        """Shows when the certificates expire from now on."""
        self._metrics = metrics
        self._show()

    def load(self) -> bool:
        """Reads the files if they changed. Returns True if they did.

        Raises:
            OSError: A file is missing.
            ssl.SSLError: They do not hold a certificate with its key. The one that is served stays.
            NotPem: ``ca.crt`` holds no certificate.
        """
        paths = [self.directory / name for name in ("tls.crt", "tls.key", "ca.crt")]
        next_authority = self.directory / _NEXT_AUTHORITY
        stats = [path.stat() for path in (*paths, next_authority) if path != next_authority or path.exists()]
        state = tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)
        if state == self._state:
            return False
        authorities = [
            *read_certificates(paths[2].read_text()),
            *(read_certificates(next_authority.read_text()) if next_authority.exists() else []),
        ]
        self.offer(Pair(paths[0].read_text(), paths[1].read_text()), authorities)
        self._state = state
        return True

    def offer(self, pair: Pair, authorities: Iterable[Certificate]) -> None:
        """Takes what a source has: it is trusted from now on, and served as soon as others can know that.

        Args:
            pair: The certificate.
            authorities: The authorities to trust.

        Raises:
            ssl.SSLError: The certificate and its key do not fit. Nothing changes.
        """
        load_pair(self.context if self._webhooks_follow else new_context(), pair)  # raises if they do not fit
        self._source_authorities = list(authorities)
        self._next = None if pair == self.served else pair
        self.advance()

    def trust(self, earlier: Bundle) -> None:
        """Adds what the replicas have trusted before."""
        # In one step, so that an authority that is due to be dropped is not sent again.
        self._set_bundle(self.bundle.joined(earlier).updated(self._source_authorities, self._clock(), self.overlap_s))

    def advance(self) -> None:
        """Does what is due by the time alone: serves a certificate that had to wait, drops an authority."""
        now = self._clock()
        self._set_bundle(self.bundle.updated(self._source_authorities, now, self.overlap_s))
        if self._next is not None and (self.served is None or self._may_serve(self.served, self._next, now)):
            if not self._webhooks_follow:
                load_pair(self.context, self._next)
            self.served, self._next = self._next, None
            logger.info("certificate served", extra=about(expires_in_s=round(self.served.certificate.ends_at - now)))
            self._changed()

    async def watch(self) -> None:
        """Reads the files again whenever they change, until cancelled. A pair that does not fit is tried again.

        If the operator makes its own certificate, the files are read only at its start, because the kubelet updates
        them late.
        """
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if self._reads_files:
                    self.load()
                self.advance()
            except (OSError, ssl.SSLError, NotPem) as error:
                logger.error("certificate not loaded, keeping the old one", extra=about(error=str(error)))

    def _may_serve(self, old: Pair, new: Pair, now: float) -> bool:
        trusted = [item.certificate for item in self.bundle.items]
        signers = issuers(new.chain, trusted)
        if {item.fingerprint for item in signers} & {item.fingerprint for item in issuers(old.chain, trusted)}:
            return True
        since = self.bundle.since(signers)
        overlap_is_over = since is not None and now - since >= self.overlap_s
        return overlap_is_over or old.certificate.ends_at - now < _LAST_MOMENT_S

    def _set_bundle(self, bundle: Bundle) -> None:
        if bundle != self.bundle:
            before, self.bundle = self.bundle, bundle
            if bundle.pem != before.pem:
                logger.info("trusted authorities", extra=about(number=len(bundle.items), digest=bundle.digest))
            self._changed()

    def _changed(self) -> None:
        self._show()
        self.on_change()

    def _show(self) -> None:
        if self._metrics is None or self.served is None:
            return
        expiry = self._metrics.certificate_expiry
        expiry.labels(certificate="server").set(self.served.certificate.ends_at)
        signers = issuers(self.served.chain, (item.certificate for item in self.bundle.items))
        # Clients accept any of the authorities, so the last one counts.
        expiry.labels(certificate="authority").set(max((item.ends_at for item in signers), default=0.0))


async def follow(certificates: Certificates, context: ssl.SSLContext) -> None:
    """Keeps the context of another thread up to date until cancelled. Runs on that thread's event loop."""
    loaded_pair: Pair | None = None
    while True:
        pair = certificates.served
        if pair is not None and pair is not loaded_pair:
            load_pair(context, pair)
            loaded_pair = pair
        await asyncio.sleep(POLL_S if loaded_pair is not None else 0.05)


_EVERY_S = 60.0
LOOK_S = 5.0
_FIRST_AGAIN_S = 2.0
#: The steps, as the metric names them.
_SECRET, _CONFIG_MAP, _MUTATING, _VALIDATING = "secret", "config_map", "mutating_webhooks", "validating_webhooks"
_SNAPSHOTS = "snapshots"


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
        snapshots: The Secret of the snapshot servers. Empty: there are none.
        snapshots_host: The name that their certificate is for.
        snapshots_certificate: Whether the operator makes their certificate. It needs ``secret`` for that.
    """

    namespace: str = ""
    secret: str = ""
    config_map: str = ""
    mutating: str = ""
    validating: str = ""
    host: str = "localhost"
    snapshots: str = ""
    snapshots_host: str = ""
    snapshots_certificate: bool = False


class CapabilityKeys:
    """The keys by which snapshot servers know that a capability is the operator's. On the controller's loop.

    Attributes:
        keys: The keys that the servers' Secret holds, newest first. Empty: it was not read yet.
    """

    def __init__(self) -> None:
        self.keys: tuple[CapabilityKey, ...] = ()

    def write(self, capability: Capability, now: float) -> str | None:
        """Returns the text of a capability. None: there is no key yet."""
        key = signing_key(self.keys, now)
        return None if key is None else write_capability(capability, key.id, key.key)


class TrustKeeper:
    """Keeps certificate and trust up to date in the API: the operator's Secret, its ConfigMap and its webhooks.

    Where there are snapshot servers, it also keeps their Secret: the keys of capabilities and, unless others make it,
    their certificate.

    One task on the controller's event loop. It runs once a minute, and at once when something changed here. Every five
    seconds it looks whether somebody else has changed the webhooks: without their authorities, the API server refuses
    labelled workloads. Both replicas do so. Each write names the version that was read, so one of two competing writes
    fails, and its replica reads again. While the API server fails, what this replica knows stays in force, and the task
    tries again. If the operator's Secret has lost what was in it, this replica puts back what it knows (``continued``).

    The chart sets no ``caBundle``: during an overlap the API server must trust the certificates of both authorities,
    and what the chart would set is only one of them. Where the chart or cert-manager does set it, ``TrustPlaces`` names
    no webhooks, and the operator has no right to change them.

    Args:
        api: The API server.
        certificates: What this replica serves and trusts.
        places: Where they are kept.
        metrics: Counts failures.
        clock: Seconds since the epoch.
        look_s: Pause in seconds between two looks at the webhooks.
        capability_keys: Gets the keys of capabilities.
    """

    def __init__(
        self,
        api: KubeClient,
        certificates: Certificates,
        places: TrustPlaces,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        look_s: float = LOOK_S,
        capability_keys: CapabilityKeys | None = None,
    ) -> None:
        self._capability_keys = CapabilityKeys() if capability_keys is None else capability_keys
        self._own_state = OwnCertificates()
        self._look_s = look_s
        self._api = api
        self._certificates = certificates
        self._places = places
        self._metrics = metrics
        self._clock = clock
        for label in (_SECRET, _CONFIG_MAP, _MUTATING, _VALIDATING, *([_SNAPSHOTS] if places.snapshots else [])):
            metrics.trust_failures.labels(what=label)  # from 0 on, so that increase() sees the first failures
        self._webhook_steps = tuple(
            (label, functools.partial(self._webhooks, kind, name), name)
            for label, kind, name in (
                (_MUTATING, objects.MUTATING_WEBHOOKS, places.mutating),
                (_VALIDATING, objects.VALIDATING_WEBHOOKS, places.validating),
            )
        )
        self._wake = asyncio.Event()
        self._last_failure = ""

    def touch(self) -> None:
        """Runs soon, because something changed here."""
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        backoff = RetryPauses(_FIRST_AGAIN_S, _EVERY_S)
        while True:
            self._wake.clear()  # before the run, so that a change during it causes another one
            if await self.once():
                backoff.reset()
                await self._watch_webhooks()
            else:
                await self._woken(backoff.next_s())

    async def once(self) -> bool:
        """Brings everything up to date. Returns False if something could not be."""
        places = self._places
        return await self._do(
            (_SECRET, self._own_certificate, places.secret),
            (_CONFIG_MAP, self._bundle, places.config_map),
            (_SNAPSHOTS, self._snapshots, places.snapshots),
            *self._webhook_steps,
        )

    async def _watch_webhooks(self) -> None:
        """Waits until everything is due again, and puts back meanwhile what others take away from the webhooks."""
        for _ in range(round(_EVERY_S / self._look_s)):
            if await self._woken(self._look_s) or not await self._do(*self._webhook_steps):
                return

    async def _woken(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._wake.wait()
        return False

    async def _do(self, *steps: tuple[str, Callable[[], Awaitable[None]], str]) -> bool:
        """Takes steps: what each is about, and the name of its object. Returns False if one of them failed."""
        succeeded, failure = True, ""
        for label, step, name in steps:
            if not name:
                continue
            try:
                await step()
            except client.Conflict:  # the other replica was first
                succeeded = False
            except (client.KubeError, NotPem, ssl.SSLError) as error:
                succeeded, failure = False, f"{label}: {error}"
                self._metrics.trust_failures.labels(what=label).inc()
                if failure != self._last_failure:
                    logger.error(
                        "certificate or trust not kept, trying again", extra=about(what=label, error=str(error))
                    )
        self._last_failure = failure
        return succeeded

    async def _own_certificate(self) -> None:
        places, certificates = self._places, self._certificates
        body = await self._api.get(objects.SECRETS, places.namespace, places.secret)
        try:
            stored_state = OwnCertificates.of(body.get("data") or {})
        except NotPem as error:
            if self._own_state.leaf is None:
                raise
            logger.error("own certificate cannot be read, and is written again", extra=about(error=str(error)))
            stored_state = OwnCertificates()
        state = continued(self._own_state, stored_state)
        if state.leaf is None and certificates.served is not None:
            # The certificate is from a release whose chart made it.
            state = adopted(certificates.served, certificates.ca)
        state = renewed(
            state,
            places.secret,
            [places.host, f"{places.host}.cluster.local"],
            self._clock(),
            certificates.overlap_s,
        )
        if state != stored_state:
            await self._api.merge(objects.SECRETS, places.namespace, places.secret, _changed(body, data=state.data()))
            logger.info("certificate made", extra=about(secret=places.secret, authorities=len(state.authorities)))
        assert state.leaf is not None
        self._own_state = state
        certificates.offer(state.leaf, read_certificates(state.bundle))

    async def _snapshots(self) -> None:
        places, now = self._places, self._clock()
        body = await self._api.get(objects.SECRETS, places.namespace, places.snapshots)
        stored_text = _decoded(body.get("data") or {})
        keys = renewed_capability_keys(read_capability_keys(stored_text.get("keys", "")), now)
        text = {"keys": capability_keys_text(keys)}
        if places.snapshots_certificate and self._own_state.leaf is not None:
            leaf = renewed_leaf(self._own_state, _pair_of(stored_text), [places.snapshots_host], now)
            text |= {"tls.crt": leaf.chain, "tls.key": leaf.key}
        if not text.items() <= stored_text.items():
            data = {name: base64.b64encode(value.encode()).decode() for name, value in text.items()}
            await self._api.merge(objects.SECRETS, places.namespace, places.snapshots, _changed(body, data=data))
            logger.info("keys or certificate of the snapshot servers made", extra=about(secret=places.snapshots))
        self._capability_keys.keys = keys

    async def _bundle(self) -> None:
        places = self._places
        body = await self._api.get(objects.CONFIG_MAPS, places.namespace, places.config_map)
        stored_bundle: Bundle
        try:
            stored_bundle = Bundle.of(body.get("data") or {})
        except NotPem as error:
            logger.error("trusted authorities cannot be read, and are written again", extra=about(error=str(error)))
            stored_bundle = Bundle()
        self._certificates.trust(stored_bundle)
        self._certificates.advance()
        bundle = self._certificates.bundle
        if bundle.items and bundle != stored_bundle:
            await self._api.merge(
                objects.CONFIG_MAPS, places.namespace, places.config_map, _changed(body, data=bundle.data())
            )

    async def _webhooks(self, kind: objects.Kind, name: str) -> None:
        if not self._certificates.ca:
            return
        body = await self._api.get(kind, None, name)
        ca_bundle = base64.b64encode(self._certificates.ca.encode()).decode()
        webhooks = copy.deepcopy(body.get("webhooks") or [])
        for webhook in webhooks:
            webhook["clientConfig"]["caBundle"] = ca_bundle
        if webhooks != body.get("webhooks"):
            await self._api.merge(kind, None, name, _changed(body, webhooks=webhooks))
            logger.info("caBundle of the webhooks updated", extra=about(configuration=name))


def _decoded(data: client.JsonObject) -> dict[str, str]:
    """The data of a Secret as texts. What is no text is as if it were not there."""
    decoded = {}
    for name, value in data.items():
        with contextlib.suppress(ValueError):
            decoded[name] = base64.b64decode(value, validate=True).decode()
    return decoded


def _pair_of(text: dict[str, str]) -> Pair | None:
    """The certificate and key of a Secret. None: there are none, or they do not fit."""
    pair = Pair(text.get("tls.crt", ""), text.get("tls.key", ""))
    try:
        load_pair(new_context(), pair)
        return pair if pair.certificate else None
    except (NotPem, ssl.SSLError):
        return None


def _changed(body: client.JsonObject, **parts: object) -> client.JsonObject:
    """A patch of the version that was read."""
    return {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"]}, **parts}
