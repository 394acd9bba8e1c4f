"""Pods with the library's own subscribers, through a change of the authority that signs the operator's certificate."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import trustme

from gracepoint.receivers.channel import OperatorSubscriber
from gracepoint.receivers.mailbox import Disruption, Mailbox
from gracepoint.wire.frames import trust_digest
from gracepoint.wire.messages import Acknowledgement
from gracepoint_operator.kube import objects as kinds
from tests.contract.fakes.replicas import WAIT_S, Replica
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE
from tests.unit.operator.fakes.replica import subscription
from tests.waiting import until

#: Both ends of its stream are in this process, and of the one before for a moment; the rest is a reserve.
_FILES_OF_A_POD = 8
_CLOSED_AT_ONCE = 32


class _Told(Mailbox):
    """The library's mailbox, which tells no other process. It keeps the names of preemptions."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.names: list[str] = []

    def post(self, disruption: Disruption) -> None:
        self.names.append(disruption.preemption)


class Pod:
    """One pod: the library's subscriber, and what it was told."""

    def __init__(self, replica: Replica, index: int, ca: str, *, old_library: bool = False) -> None:
        self.connection = replica.channel(f"token-{index}")
        self.connection.trust(ca)
        self._mailbox = _Told()
        self.told = self._mailbox.names
        self.authorities = ca
        who = subscription(index)
        if not old_library:
            who = type(who)(**{**vars(who), "trust": trust_digest(ca)})
        self.subscriber = OperatorSubscriber(
            self.connection, who, self._mailbox, self._acknowledge, None, None if old_library else self._trust
        )

    def _acknowledge(self, acknowledgement: Acknowledgement) -> None:
        pass

    def _trust(self, authorities: str) -> None:
        self.connection.trust(authorities)
        self.authorities = authorities


def can_connect(replica: Replica, authorities: str) -> bool:
    """Whether a client that trusts these authorities accepts the certificate that the replica serves now."""
    context = ssl.create_default_context(cadata=authorities)
    with socket.create_connection(("127.0.0.1", replica.server.https_port), WAIT_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost"):
                return True
        except ssl.SSLCertVerificationError:
            return False


def add_pods(api: MemoryApi, number: int) -> None:
    """Puts pods of one gang, and their tokens, into the cluster."""
    for index in range(number):
        api.add(kinds.PODS, objects.pod(index))
        api.bind_token(f"token-{index}", NAMESPACE, f"uid-pod-{index}-0")


@contextlib.contextmanager
def pods(replica: Replica, number: int) -> Iterator[list[Pod]]:
    """Pods that are connected to the replica."""
    _allow_files(_FILES_OF_A_POD * number)
    made: list[Pod] = []
    try:
        made += [Pod(replica, index, replica.ca) for index in range(number)]
        for pod in made:
            assert pod.subscriber.wait_until_connected(4 * WAIT_S), "a pod has no stream"
        until(lambda: len(replica.core.subscribers) == number, "all streams")
        yield made
    finally:
        # Many at once, as each waits for its thread. None connects again: that would take longer than all before.
        with ThreadPoolExecutor(_CLOSED_AT_ONCE) as closers:
            list(closers.map(lambda pod: pod.subscriber.close(), made))


def distrusting(replica: Replica, connected: Iterable[Pod]) -> list[Pod]:
    """The pods that do not accept the certificate that the replica serves now."""
    served = served_certificate(replica)
    trusts = {authorities: can_connect(replica, authorities) for authorities in {pod.authorities for pod in connected}}
    assert served_certificate(replica) == served, "the certificate changed meanwhile"
    return [pod for pod in connected if not trusts[pod.authorities]]


def _allow_files(number: int) -> None:
    """Lets this process have so many files open, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard) if hard >= 0 else number, hard))


def change_authority(folder: Path, authority: trustme.CA | None = None) -> str:
    """Puts a certificate of another authority into the files, and that authority alone. Returns the authority.

    Args:
        folder: Of the replica.
        authority: The authority. None: a new one.
    """
    authority = trustme.CA() if authority is None else authority
    renew_certificate(folder, authority)
    authority.cert_pem.write_to_path(str(folder / "tls" / "ca.crt"))
    return str(authority.cert_pem.bytes().decode())


def renew_certificate(folder: Path, authority: trustme.CA) -> str:
    """Puts another certificate of the authority into the files. Returns the certificate."""
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    tls = folder / "tls"
    certificate.private_key_pem.write_to_path(str(tls / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(tls / "tls.crt"))
    return str(certificate.cert_chain_pems[0].bytes().decode())


def served_certificate(replica: Replica) -> str:
    """The certificate that the replica serves to new connections now."""
    return ssl.get_server_certificate(("127.0.0.1", replica.server.https_port), timeout=WAIT_S)
