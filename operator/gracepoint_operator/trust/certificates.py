"""What this replica serves, and which authorities it tells others to trust.

``Certificates`` belongs to the controller's event loop. The channel's thread reads ``served``, which is replaced as a
whole. It has a TLS context of its own (``follow``), because OpenSSL allows no change of a context that another thread
uses. A renewed certificate is for new connections; open ones go on.

A server keeps the context that it began with, and OpenSSL keeps one certificate for each type of key in a context. So
each certificate gets a context of its own, to which the server's context hands every handshake (``load_pair``).

A certificate that nobody trusts yet is not served at once: pods and the API server are first told of its authority.
The replica keeps the old certificate in memory for that time, even if the files have only the new one. If others tell
the API server (the chart, cert-manager), they tell it of the new authority alone, and the webhooks' port serves what
the files have.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.trust import pem
from gracepoint_operator.trust.bundle import Bundle
from gracepoint_operator.trust.pem import Certificate, NotPem, Pair
from gracepoint_operator.trust.rotation import OVERLAP_S

log = logging.getLogger(__name__)

POLL_S = 5.0
#: A certificate that expires this soon is replaced at once.
_LAST_MOMENT_S = 3600.0
#: Beside ``ca.crt``: the authority that will sign the next certificate.
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
    fresh = new_context()

    def hand_over(connection: ssl.SSLObject, server_name: str | None, before: ssl.SSLContext) -> None:
        connection.context = fresh

    # The ssl module reads only files, and the container has no file system to write to. This one is in memory.
    file = os.memfd_create("certificate")
    try:
        os.write(file, f"{pair.chain}\n{pair.key}".encode())
        fresh.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    context.sni_callback = hand_over


class Certificates:
    """See the module.

    Args:
        directory: Has ``tls.crt``, ``tls.key``, ``ca.crt`` and perhaps ``next-ca.crt``.
        required: False if the operator makes its certificate, so that the files may be missing.
        overlap_s: How long an authority is known before a certificate of it alone is served, in seconds.
        webhooks_follow: True if the webhooks' port serves what a source has at once, as others tell the API server.
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
        self._found: list[Certificate] = []
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
        following = self.directory / _NEXT_AUTHORITY
        stats = [path.stat() for path in (*paths, following) if path != following or path.exists()]
        state = tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)
        if state == self._state:
            return False
        authorities = [
            *pem.read(paths[2].read_text()),
            *(pem.read(following.read_text()) if following.exists() else []),
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
        self._found = list(authorities)
        self._next = None if pair == self.served else pair
        self.advance()

    def trust(self, known: Bundle) -> None:
        """Adds what the replicas have trusted before."""
        # In one step, so that an authority which is due to be dropped is not told again.
        self._set_bundle(self.bundle.joined(known).updated(self._found, self._clock(), self.overlap_s))

    def advance(self) -> None:
        """Does what is due by the time alone: serves a certificate that had to wait, drops an authority."""
        now = self._clock()
        self._set_bundle(self.bundle.updated(self._found, now, self.overlap_s))
        if self._next is not None and (self.served is None or self._may_serve(self.served, self._next, now)):
            if not self._webhooks_follow:
                load_pair(self.context, self._next)
            self.served, self._next = self._next, None
            log.info("certificate served", extra=about(expires_in_s=round(self.served.certificate.ends_at - now)))
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
                log.error("certificate not loaded, keeping the old one", extra=about(error=str(error)))

    def _may_serve(self, old: Pair, new: Pair, now: float) -> bool:
        trusted = [item.certificate for item in self.bundle.items]
        signers = pem.issuers(new.chain, trusted)
        if {item.fingerprint for item in signers} & {item.fingerprint for item in pem.issuers(old.chain, trusted)}:
            return True
        since = self.bundle.since(signers)
        known = since is not None and now - since >= self.overlap_s
        return known or old.certificate.ends_at - now < _LAST_MOMENT_S

    def _set_bundle(self, bundle: Bundle) -> None:
        if bundle != self.bundle:
            before, self.bundle = self.bundle, bundle
            if bundle.pem != before.pem:
                log.info("trusted authorities", extra=about(number=len(bundle.items), digest=bundle.digest))
            self._changed()

    def _changed(self) -> None:
        self._show()
        self.on_change()

    def _show(self) -> None:
        if self._metrics is None or self.served is None:
            return
        expiry = self._metrics.certificate_expiry
        expiry.labels(certificate="server").set(self.served.certificate.ends_at)
        signers = pem.issuers(self.served.chain, (item.certificate for item in self.bundle.items))
        # Clients accept any of the authorities, so the last one counts.
        expiry.labels(certificate="authority").set(max((item.ends_at for item in signers), default=0.0))


async def follow(certificates: Certificates, context: ssl.SSLContext) -> None:
    """Keeps the context of another thread up to date until cancelled. Runs on that thread's event loop."""
    loaded: Pair | None = None
    while True:
        served = certificates.served
        if served is not None and served is not loaded:
            load_pair(context, served)
            loaded = served
        await asyncio.sleep(POLL_S if loaded is not None else 0.05)
