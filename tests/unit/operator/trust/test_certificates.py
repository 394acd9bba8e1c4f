"""What is served and trusted while the files of a certificate change, on a clock of the test."""

from __future__ import annotations

import contextlib
import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust import bundle as pem
from gracepoint_operator.trust.bundle import Bundle, NotPem, Pair
from gracepoint_operator.trust.certificates import Certificates, load_pair, new_context
from tests.unit.operator.fakes.objects import Clock

HOUR_S = 3600.0
NOW = 1_800_000_000.0
LIFE_S = 1000 * HOUR_S


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


def authority(name: str) -> Pair:
    return pem.make_authority(name, NOW, LIFE_S)


def put(folder: Path, leaf: Pair, *authorities: Pair, following: Pair | None = None) -> None:
    (folder / "tls.crt").write_text(leaf.chain)
    (folder / "tls.key").write_text(leaf.key)
    (folder / "ca.crt").write_text("".join(item.chain for item in authorities))
    if following is not None:
        (folder / "next-ca.crt").write_text(following.chain)


def certificates(folder: Path, clock: Clock) -> Certificates:
    return Certificates(folder, overlap_s=24 * HOUR_S, clock=clock)


def fingerprints(bundle: Bundle) -> list[str]:
    return [item.certificate.fingerprint for item in bundle.items]


@pytest.fixture
def first(tmp_path: Path) -> tuple[Pair, Pair]:
    """An authority and its certificate, in the files."""
    made = authority("first")
    leaf = pem.issue(made, ["localhost"], NOW, LIFE_S)
    put(tmp_path, leaf, made)
    return made, leaf


def test_a_certificate_of_the_same_authority_is_served_at_once(
    tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]
) -> None:
    held = certificates(tmp_path, clock)
    renewed = pem.issue(first[0], ["localhost"], NOW, LIFE_S)
    put(tmp_path, renewed, first[0])
    assert held.load()
    assert held.served == renewed


def test_a_certificate_of_an_unknown_authority_waits_until_the_authority_was_announced(
    tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]
) -> None:
    held = certificates(tmp_path, clock)
    changes: list[str] = []
    held.on_change = lambda: changes.append(held.ca)
    second = authority("second")
    leaf = pem.issue(second, ["localhost"], NOW, LIFE_S)
    put(tmp_path, leaf, second)
    held.load()
    assert held.served == first[1]
    assert changes == [held.ca]
    assert sorted(fingerprints(held.bundle)) == sorted(item.certificate.fingerprint for item in (first[0], second))
    clock.move(23 * HOUR_S)
    held.advance()
    assert held.served == first[1]
    clock.move(2 * HOUR_S)
    held.advance()
    assert held.served == leaf
    clock.move(48 * HOUR_S)
    held.advance()
    assert held.ca == second.certificate.pem, "the old authority is dropped when nobody serves it any more"


def test_an_authority_that_is_known_long_before_is_served_at_once(
    tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]
) -> None:
    """cert-manager renews the authority first; its certificate follows weeks later."""
    second = authority("second")
    put(tmp_path, first[1], first[0], following=second)
    held = certificates(tmp_path, clock)
    assert len(held.bundle.items) == 2
    clock.move(25 * HOUR_S)
    leaf = pem.issue(second, ["localhost"], clock(), LIFE_S)
    put(tmp_path, leaf, second)
    held.load()
    assert held.served == leaf


def test_an_expiring_certificate_is_replaced_without_the_overlap(
    tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]
) -> None:
    held = certificates(tmp_path, clock)
    clock.move(LIFE_S - HOUR_S / 2)
    second = pem.make_authority("second", clock(), LIFE_S)
    leaf = pem.issue(second, ["localhost"], clock(), LIFE_S)
    put(tmp_path, leaf, second)
    held.load()
    assert held.served == leaf


def test_a_later_replica_takes_the_time_that_others_recorded(
    tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]
) -> None:
    other = certificates(tmp_path, clock)
    clock.move(30 * HOUR_S)
    held = certificates(tmp_path, clock)
    second = authority("second")
    held.trust(Bundle.of(other.bundle.data()))
    assert held.bundle.items[0].since == NOW
    assert fingerprints(held.bundle) == fingerprints(other.bundle)
    held.trust(Bundle().updated([second.certificate], NOW, 0.0))
    held.advance()
    assert len(held.bundle.items) == 2, "what the other replica trusts is trusted here as well"


def test_an_authority_that_was_dropped_is_not_announced_again(
    tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]
) -> None:
    held, other = certificates(tmp_path, clock), certificates(tmp_path, clock)
    second = authority("second")
    leaf = pem.issue(second, ["localhost"], NOW, LIFE_S)
    put(tmp_path, leaf, second)
    for each in (held, other):
        each.load()
    assert held.ca == other.ca, "in the same order"
    known = Bundle.of(other.bundle.data())
    clock.move(48 * HOUR_S)
    held.advance()
    assert held.ca == second.certificate.pem
    told: list[str] = []
    held.on_change = lambda: told.append(held.ca)
    held.trust(known)
    assert told == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"authorities.json": "["}, id="no JSON"),
        pytest.param({"authorities.json": "[1]"}, id="no objects"),
        pytest.param({"authorities.json": '[{"pem": "x", "since": 1}]'}, id="no PEM"),
        pytest.param({"authorities.json": '[{"pem": "", "since": 1}]'}, id="empty"),
    ],
)
def test_a_config_map_that_cannot_be_read_says_so(data: dict[str, str]) -> None:
    with pytest.raises(NotPem):
        Bundle.of(data)


def test_the_expiry_of_what_is_served_is_a_metric(tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]) -> None:
    metrics = Metrics()
    held = certificates(tmp_path, clock)
    held.show_in(metrics)

    def expiry(certificate: str) -> float | None:
        name = "gracepoint_certificate_expiry_timestamp_seconds"
        return metrics.registry.get_sample_value(name, {"certificate": certificate})

    assert expiry("server") == expiry("authority") == NOW + LIFE_S
    renewed = pem.issue(first[0], ["localhost"], NOW, LIFE_S / 2)
    put(tmp_path, renewed, first[0])
    held.load()
    assert (expiry("server"), expiry("authority")) == (NOW + LIFE_S / 2, NOW + LIFE_S)


def self_signed(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> Pair:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, type(key).__name__)])
    at = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(at - datetime.timedelta(hours=1))
        .not_valid_after(at + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem_of_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(made.public_bytes(serialization.Encoding.PEM).decode(), pem_of_key.decode())


def shown_by(server_context: ssl.SSLContext, server_name: str | None) -> str:
    """The certificate that a server with this context shows to a client."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=server_name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return ssl.DER_cert_to_PEM_cert(found)


@pytest.mark.parametrize("server_name", ["localhost", None], ids=["with a name", "without a name"])
@pytest.mark.parametrize("rsa_first", [True, False], ids=["RSA, then EC", "EC, then RSA"])
def test_a_certificate_with_another_type_of_key_is_served(rsa_first: bool, server_name: str | None) -> None:
    pairs = [self_signed(rsa.generate_private_key(65537, 2048)), self_signed(ec.generate_private_key(ec.SECP256R1()))]
    context = new_context()
    for pair in pairs if rsa_first else reversed(pairs):
        load_pair(context, pair)
        assert shown_by(context, server_name) == pair.chain


def test_webhooks_show_a_new_certificate_at_once_where_others_configure_the_api_server(
    tmp_path: Path, clock: Clock, first: tuple[Pair, Pair]
) -> None:
    """cert-manager's injector replaces the authority, while pods have to be told of it first."""
    held = Certificates(tmp_path, overlap_s=24 * HOUR_S, webhooks_follow=True, clock=clock)
    assert shown_by(held.context, "localhost") == first[1].chain
    second = authority("second")
    leaf = pem.issue(second, ["localhost"], NOW, LIFE_S)
    put(tmp_path, leaf, second)
    held.load()
    assert (held.served, shown_by(held.context, "localhost")) == (first[1], leaf.chain)
    clock.move(25 * HOUR_S)
    held.advance()
    assert (held.served, shown_by(held.context, "localhost")) == (leaf, leaf.chain)
