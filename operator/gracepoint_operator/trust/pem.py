"""Certificates and keys as PEM: reads, makes and compares them. Pure.

Only this module uses the ``cryptography`` package.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: Certificates are valid from this many seconds before they are made, because clocks differ.
SKEW_S = 300.0


_LABEL = re.compile(r"-----BEGIN ([A-Z0-9 ]{1,40})-----")


class NotPem(ValueError):
    """A text that should hold certificates or keys does not."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """One certificate.

    Attributes:
        pem: The certificate as PEM, without anything around it.
        fingerprint: The first 16 hexadecimal digits of its SHA-256.
        begins_at: When it becomes valid, in seconds since the epoch.
        ends_at: When it expires, in seconds since the epoch.
    """

    pem: str
    fingerprint: str
    begins_at: float
    ends_at: float

    @property
    def made_at(self) -> float:
        """When ``make_authority`` or ``issue`` made it, in seconds since the epoch."""
        return self.begins_at + SKEW_S


@dataclasses.dataclass(frozen=True)
class Pair:
    """A certificate with its private key.

    Attributes:
        chain: The certificate as PEM, with the intermediate certificates after it.
        key: The private key as PEM.
    """

    chain: str
    key: str = dataclasses.field(repr=False)

    @property
    def certificate(self) -> Certificate:
        """The certificate itself, which is the first of the chain."""
        return read(self.chain)[0]


def read(text: str) -> list[Certificate]:
    """Returns the certificates of a PEM text in their order.

    Raises:
        NotPem: There is none, or one cannot be read.
    """
    return [_described(found) for found in _parsed(text)]


def joined(certificates: Iterable[Certificate]) -> str:
    """Returns the PEM text with these certificates."""
    return "".join(item.pem for item in certificates)


def keys(text: str) -> list[str]:
    """Returns the private keys of a PEM text, each as PEM, in their order."""
    end = "-----END "
    parts, rest = [], text
    while end in rest:
        body, _, after = rest.partition(end)
        label, _, rest = after.partition("\n")
        parts.append(f"{body.lstrip()}{end}{label}\n")
    return parts


def issuers(chain: str, authorities: Iterable[Certificate]) -> list[Certificate]:
    """Returns the authorities that signed the certificate or one of its intermediates, or are one of them."""
    links = _parsed(chain)
    return [item for item in authorities if any(_vouches(_parsed(item.pem)[0], link) for link in links)]


def make_authority(name: str, now: float, life_s: float) -> Pair:
    """Makes a self-signed authority.

    Args:
        name: Its common name.
        now: Seconds since the epoch.
        life_s: Seconds until it expires.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    # The time tells it from an authority of the same installation that it follows.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {_time(now):%Y-%m-%d %H:%M:%S}"[:64])])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        _begun(subject, subject, key.public_key(), now, life_s)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(_pem(made), _key_pem(key))


def issue(authority: Pair, host_names: Sequence[str], now: float, life_s: float) -> Pair:
    """Makes a server's certificate with a key of its own.

    Args:
        authority: Signs it.
        host_names: The names that it is for.
        now: Seconds since the epoch.
        life_s: Seconds until it expires. It never outlives its authority.
    """
    issuer = _parsed(authority.chain)[0]
    issuer_key = serialization.load_pem_private_key(authority.key.encode(), None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise NotPem(f"the authority's key: expected an elliptic curve, found {type(issuer_key).__name__}")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host_names[0][:64])])
    life_s = min(life_s, issuer.not_valid_after_utc.timestamp() - now)
    names = x509.SubjectAlternativeName([x509.DNSName(name) for name in host_names])
    made = (
        _begun(subject, issuer.subject, key.public_key(), now, life_s)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )
    return Pair(_pem(made), _key_pem(key))


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, life_s: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - SKEW_S))
        .not_valid_after(_time(now + life_s))
    )


def _parsed(text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        # The text may be a private key, so the error must not quote it.
        labels = ", ".join(sorted(set(_LABEL.findall(text)))) or f"{len(text)} characters without PEM"
        raise NotPem(f"expected one PEM certificate or more, found {labels} ({error})") from error


def _described(found: x509.Certificate) -> Certificate:
    pem = _pem(found)
    digest = hashlib.sha256(found.public_bytes(serialization.Encoding.DER)).hexdigest()[:16]
    return Certificate(pem, digest, found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp())


def _vouches(authority: x509.Certificate, link: x509.Certificate) -> bool:
    if authority == link:
        return True
    try:
        link.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)
