"""Certificates and keys, the authorities that pods and the API server trust, and when all are renewed. Pure.

Only this module uses the ``cryptography`` package. All replicas keep the bundle of trusted authorities in one
ConfigMap. An authority is trusted from the moment at which any replica first finds it. It stays for a while after no
source has it any more, because a replica may still serve a certificate of it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gracepoint.wire.frames import trust_digest
from gracepoint.wire.messages import WireError
from gracepoint.wire.snapshot_requests import check_key

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
        return read_certificates(self.chain)[0]


def read_certificates(text: str) -> list[Certificate]:
    """Returns the certificates of a PEM text in their order.

    Raises:
        NotPem: There is none, or one cannot be read.
    """
    return [_described(certificate) for certificate in _parsed(text)]


def joined(certificates: Iterable[Certificate]) -> str:
    """Returns the PEM text with these certificates."""
    return "".join(item.pem for item in certificates)


def read_keys(text: str) -> list[str]:
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
    # The time distinguishes it from an authority of the same installation that it follows.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {_date(now):%Y-%m-%d %H:%M:%S}"[:64])])
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
    certificate = (
        _begun(subject, subject, key.public_key(), now, life_s)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(_pem(certificate), _key_pem(key))


def issue(authority: Pair, host_names: Sequence[str], now: float, life_s: float) -> Pair:
    """Makes a server's certificate with a new key.

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
    certificate = (
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
    return Pair(_pem(certificate), _key_pem(key))


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, life_s: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_date(now - SKEW_S))
        .not_valid_after(_date(now + life_s))
    )


def _parsed(text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        # The text may be a private key, so the error must not quote it.
        labels = ", ".join(sorted(set(_LABEL.findall(text)))) or f"{len(text)} characters without PEM"
        raise NotPem(f"expected one PEM certificate or more, found {labels} ({error})") from error


def _described(certificate: x509.Certificate) -> Certificate:
    pem = _pem(certificate)
    digest = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()[:16]
    return Certificate(
        pem, digest, certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    )


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


def _date(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)


#: The key of the ConfigMap for programs that need the certificates alone.
PEM_KEY = "ca-bundle.crt"
_STATE_KEY = "authorities.json"


@dataclasses.dataclass(frozen=True)
class Trusted:
    """A trusted authority.

    Attributes:
        certificate: Its certificate.
        since: When a replica first found it, in seconds since the epoch.
        gone_at: When it was first found in no source any more, in seconds since the epoch. None: a source has it.
    """

    certificate: Certificate
    since: float
    gone_at: float | None = None


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The trusted authorities, those known longest first."""

    items: tuple[Trusted, ...] = ()

    @property
    def pem(self) -> str:
        """All certificates as PEM, in an order that is the same in all replicas."""
        return joined(sorted((item.certificate for item in self.items), key=lambda item: item.fingerprint))

    @property
    def digest(self) -> str:
        """Identifies the certificates."""
        return trust_digest(self.pem)

    def since(self, certificates: Iterable[Certificate]) -> float | None:
        """When the first of these authorities was found, in seconds since the epoch. None: none is trusted."""
        fingerprints = {item.fingerprint for item in certificates}
        return min((item.since for item in self.items if item.certificate.fingerprint in fingerprints), default=None)

    def updated(self, authorities: Iterable[Certificate], now: float, overlap_s: float) -> Bundle:
        """Returns the bundle after the sources were read.

        Args:
            authorities: The authorities that the sources have now.
            now: Seconds since the epoch.
            overlap_s: How long the certificate of an older authority may be served. An authority stays for twice this
                time after no source has it any more.
        """
        sources = {item.fingerprint: item for item in authorities if item.ends_at > now}
        fingerprints = {item.certificate.fingerprint for item in self.items}
        items = []
        for item in self.items:
            if item.certificate.fingerprint in sources:
                items.append(dataclasses.replace(item, gone_at=None))
                continue
            gone_at = now if item.gone_at is None else item.gone_at
            if item.certificate.ends_at > now and now - gone_at < 2 * overlap_s:
                items.append(dataclasses.replace(item, gone_at=gone_at))
        items += [Trusted(item, now) for fingerprint, item in sources.items() if fingerprint not in fingerprints]
        return Bundle(tuple(sorted(items, key=lambda item: (item.since, item.certificate.fingerprint))))

    def joined(self, other: Bundle) -> Bundle:
        """Returns the authorities of both, each from its earlier time on."""
        items = {item.certificate.fingerprint: item for item in other.items}
        for item in self.items:
            there = items.get(item.certificate.fingerprint)
            if there is not None:
                gone = None if None in (item.gone_at, there.gone_at) else there.gone_at
                item = Trusted(item.certificate, min(item.since, there.since), gone)
            items[item.certificate.fingerprint] = item
        return Bundle(tuple(sorted(items.values(), key=lambda item: (item.since, item.certificate.fingerprint))))

    def data(self) -> dict[str, str]:
        """The data of the ConfigMap."""
        state = [{"pem": item.certificate.pem, "since": item.since, "goneAt": item.gone_at} for item in self.items]
        return {PEM_KEY: self.pem, _STATE_KEY: json.dumps(state, indent=1)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Bundle:
        """Reads the data of the ConfigMap. Empty data: an empty bundle.

        Raises:
            NotPem: The data cannot be read.
        """
        try:
            return cls(
                tuple(
                    Trusted(read_certificates(item["pem"])[0], float(item["since"]), _time(item.get("goneAt")))
                    for item in json.loads(data.get(_STATE_KEY) or "[]")
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise NotPem(f"{_STATE_KEY}: {error}") from error


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


_DAY_S = 86400.0
AUTHORITY_LIFE_S = 3 * 365 * _DAY_S
#: A new authority is added this long before the old one expires.
AUTHORITY_LEFT_S = 365 * _DAY_S
LEAF_LIFE_S = 90 * _DAY_S
LEAF_LEFT_S = 30 * _DAY_S
#: How long an authority is known before a certificate is signed by it.
OVERLAP_S = _DAY_S
#: The same if the certificate that is served was made in another way.
OVERLAP_AFTER_OTHERS_S = 30 * _DAY_S


@dataclasses.dataclass(frozen=True)
class Authority:
    """An authority.

    Attributes:
        certificate: Its certificate.
        key: Its private key as PEM. None: the operator did not make it.
    """

    certificate: Certificate
    key: str | None = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class OwnCertificates:
    """What the Secret holds.

    Attributes:
        authorities: The trusted authorities, oldest first.
        leaf: The certificate that is served. None: there is none yet.
    """

    authorities: tuple[Authority, ...] = ()
    leaf: Pair | None = None

    @property
    def bundle(self) -> str:
        """The certificates of the authorities as PEM."""
        return joined(item.certificate for item in self.authorities)

    def data(self) -> dict[str, str]:
        """The data of the Secret."""
        assert self.leaf is not None
        # The certificate that others made has the first place, and no key.
        keys = "".join(item.key for item in self.authorities if item.key is not None)
        plain = {"ca.crt": self.bundle, "ca.key": keys, "tls.crt": self.leaf.chain, "tls.key": self.leaf.key}
        return {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}

    @classmethod
    def of(cls, data: Mapping[str, str]) -> OwnCertificates:
        """Reads the data of the Secret. Empty data: nothing was made yet.

        Raises:
            NotPem: The data cannot be read.
        """
        if not data:
            return cls()
        try:
            text = {name: base64.b64decode(value, validate=True).decode() for name, value in data.items()}
        except (binascii.Error, UnicodeDecodeError) as error:
            raise NotPem(f"the Secret's data: expected PEM in base64 ({error})") from error
        missing_keys = {"ca.crt", "ca.key", "tls.crt", "tls.key"} - text.keys()
        if missing_keys:
            raise NotPem(f"the Secret's data: expected {', '.join(sorted(missing_keys))} beside {sorted(text)}")
        certificates, keys = read_certificates(text["ca.crt"]), read_keys(text["ca.key"])
        if len(keys) > len(certificates):
            raise NotPem(
                f"ca.key: found {len(keys)} keys, expected at most {len(certificates)}, one for each of ca.crt"
            )
        unknown: list[str | None] = [None] * (len(certificates) - len(keys))
        pairs = zip(certificates, [*unknown, *keys], strict=True)
        return cls(tuple(Authority(*pair) for pair in pairs), Pair(text["tls.crt"], text["tls.key"]))


def adopted(leaf: Pair, bundle: str) -> OwnCertificates:
    """The state of an installation whose certificate was made in another way.

    Args:
        leaf: The certificate that is served now.
        bundle: The authorities that pods trust now, as PEM.
    """
    return OwnCertificates(tuple(Authority(item, None) for item in read_certificates(bundle)), leaf)


def continued(known: OwnCertificates, stored: OwnCertificates) -> OwnCertificates:
    """Returns what the Secret holds. If it has lost what was known: all of that, and what it holds besides.

    A step of ``renewed`` leaves at least one authority, so a Secret that has none of them was deleted or emptied. Pods
    trust these authorities, and some of them would never learn of another one.

    Args:
        known: What the Secret held when this replica last read it.
        stored: What it holds.
    """
    stored_fingerprints = {item.certificate.fingerprint for item in stored.authorities}
    if known.leaf is None or any(item.certificate.fingerprint in stored_fingerprints for item in known.authorities):
        return stored
    return OwnCertificates((*known.authorities, *stored.authorities), known.leaf)


def renewed(
    state: OwnCertificates, name: str, host_names: Sequence[str], now: float, overlap_s: float = OVERLAP_S
) -> OwnCertificates:
    """Returns the next state. It equals ``state`` if nothing is due.

    Both replicas compute the next state from what the operator's Secret holds, and only one of two writes of the same
    version succeeds. A renewal takes three steps, each at least ``overlap_s`` after the one before:

    1. A new authority is added. Everybody trusts it and the old one from then on. The certificate stays.
    2. The certificate is signed by the new authority, once the old one would end before a certificate that it signs.
       Until then it goes on: pods that are created while no replica answers know only what their workload began with.
    3. The old authority is removed.

    A certificate that was made in another way has an authority whose key is not known. It is followed in the same
    steps, after a longer overlap, because the pods that trust it may have a library that cannot be notified of a new
    authority.

    Args:
        state: What the Secret holds.
        name: The common name of authorities.
        host_names: The names that the certificate is for.
        now: Seconds since the epoch.
        overlap_s: How long an authority is known before a certificate is signed by it.
    """
    authorities = [item for item in state.authorities if item.certificate.ends_at > now]
    newest = authorities[-1] if authorities else None
    if newest is None or newest.key is None or newest.certificate.ends_at - now < AUTHORITY_LEFT_S:
        pair = make_authority(name, now, AUTHORITY_LIFE_S)
        newest = Authority(pair.certificate, pair.key)
        authorities.append(newest)
    leaf = state.leaf
    signers = [] if leaf is None else issuers(leaf.chain, (item.certificate for item in authorities))
    # Without a valid certificate nobody is connected, and nothing can wait.
    if leaf is None or leaf.certificate.ends_at <= now or not signers:
        leaf = _issued(newest, host_names, now)
    else:
        signer = next(item for item in authorities if item.certificate == signers[-1])
        wait_s = OVERLAP_AFTER_OTHERS_S if signer.key is None else overlap_s
        is_over = signer.key is None or signer.certificate.ends_at - now < LEAF_LIFE_S
        may_sign = is_over and now - newest.certificate.made_at >= wait_s
        expires_soon = leaf.certificate.ends_at - now < LEAF_LEFT_S
        if signer is not newest and (may_sign or (expires_soon and signer.key is None)):
            leaf = _issued(newest, host_names, now)
        elif expires_soon:
            leaf = _issued(signer, host_names, now)
        elif signer is newest and now - leaf.certificate.made_at >= overlap_s:
            authorities = [newest]
    return OwnCertificates(tuple(authorities), leaf)


def _issued(authority: Authority, host_names: Sequence[str], now: float) -> Pair:
    assert authority.key is not None
    return issue(Pair(authority.certificate.pem, authority.key), host_names, now, LEAF_LIFE_S)


def renewed_leaf(state: OwnCertificates, leaf: Pair | None, host_names: Sequence[str], now: float) -> Pair:
    """Returns the certificate of another server of the installation. It is ``leaf`` if nothing is due.

    It is signed by the authority that signed the operator's own one, which everybody trusts.

    Args:
        state: What the operator's Secret holds.
        leaf: The certificate of that server. None: there is none yet, or it cannot be read.
        host_names: The names that it is for.
        now: Seconds since the epoch.
    """
    assert state.leaf is not None
    with_keys = [item for item in state.authorities if item.key is not None]
    signers = issuers(state.leaf.chain, (item.certificate for item in with_keys))
    signer = next((item for item in with_keys if item.certificate in signers), with_keys[-1])
    if (
        leaf is not None
        and leaf.certificate.ends_at - now >= LEAF_LEFT_S
        and issuers(leaf.chain, [signer.certificate])
        and _host_names(leaf.chain) == list(host_names)
    ):
        return leaf
    return _issued(signer, host_names, now)


def _host_names(chain: str) -> list[str]:
    try:
        names = _parsed(chain)[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)


#: A key of capabilities is followed by a new one after this time.
KEY_LIFE_S = 30 * _DAY_S
#: For so long a new key is known to the servers before capabilities are made with it. A kubelet brings it in a minute.
KEY_KNOWN_S = 600.0
#: For how long a capability is valid.
CAPABILITY_S = 12 * 3600.0


@dataclasses.dataclass(frozen=True)
class CapabilityKey:
    """A key of capabilities.

    Attributes:
        id: Its name, which begins with the time at which it was made.
        key: The key.
    """

    id: str
    key: bytes = dataclasses.field(repr=False)

    @property
    def made_at(self) -> float:
        """When it was made, in seconds since the epoch. 0 if its name does not say."""
        number = self.id.partition("-")[0]
        return float(number) if number.isdecimal() else 0.0


def read_capability_keys(text: str) -> tuple[CapabilityKey, ...]:
    """Returns the keys of a text with a line ``ID BASE64`` for each, newest first. Errors do not quote it.

    Raises:
        NotPem: The text cannot be read.
    """
    keys = []
    for line in filter(None, map(str.strip, text.splitlines())):
        key_id, _, coded = line.partition(" ")
        try:
            keys.append(CapabilityKey(key_id, base64.b64decode(coded, validate=True)))
            check_key(key_id, keys[-1].key)
        except (binascii.Error, WireError) as error:
            raise NotPem(
                "keys: expected lines ID BASE64, each with a key of 32 bytes or more, found another one: remove the "
                "entry from the Secret, and it is made again"
            ) from error
    return tuple(keys)


def capability_keys_text(keys: Iterable[CapabilityKey]) -> str:
    """Returns what ``read_capability_keys`` reads."""
    return "".join(f"{key.id} {base64.b64encode(key.key).decode()}\n" for key in keys)


def renewed_capability_keys(
    keys: Sequence[CapabilityKey], now: float, random: Callable[[int], bytes] = secrets.token_bytes
) -> tuple[CapabilityKey, ...]:
    """Returns the keys from now on, newest first. They equal ``keys`` if nothing is due.

    A key is followed by a new one. The one before stays until no capability is valid any more that was made with it.

    Args:
        keys: The keys until now.
        now: Seconds since the epoch.
        random: Returns random bytes.
    """
    if not keys or now - keys[0].made_at >= KEY_LIFE_S:
        return (CapabilityKey(f"{now:.0f}-{random(4).hex()}", random(32)), *keys[:1])
    if len(keys) > 1 and now - keys[0].made_at >= KEY_KNOWN_S + CAPABILITY_S:
        return (keys[0],)
    return tuple(keys)


def signing_key(keys: Sequence[CapabilityKey], now: float) -> CapabilityKey | None:
    """Returns the newest key that all servers know, or the only one. None: there is none yet."""
    return next((key for key in keys if now - key.made_at >= KEY_KNOWN_S), keys[-1] if keys else None)
