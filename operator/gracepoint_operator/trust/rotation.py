"""When the operator's own authority and certificate are renewed. Pure.

The state is what the operator's Secret holds. Both replicas compute the next state from it, and only one of two writes
of the same version succeeds. A renewal takes three steps, each at least ``overlap_s`` after the one before:

1. A new authority is added. Everybody is told to trust it and the old one. The certificate stays.
2. The certificate is signed by the new authority.
3. The old authority is removed.

A certificate that was made in another way has an authority whose key is not known. It is followed in the same steps,
after a longer overlap, because the pods that trust it may have a library which cannot be told of a new authority.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping, Sequence

from gracepoint_operator.trust import pem
from gracepoint_operator.trust.pem import Certificate, NotPem, Pair

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
        return pem.joined(item.certificate for item in self.authorities)

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
        missing = {"ca.crt", "ca.key", "tls.crt", "tls.key"} - text.keys()
        if missing:
            raise NotPem(f"the Secret's data: expected {', '.join(sorted(missing))} beside {sorted(text)}")
        certificates, keys = pem.read(text["ca.crt"]), pem.keys(text["ca.key"])
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
    return OwnCertificates(tuple(Authority(item, None) for item in pem.read(bundle)), leaf)


def renewed(
    state: OwnCertificates, name: str, host_names: Sequence[str], now: float, overlap_s: float = OVERLAP_S
) -> OwnCertificates:
    """Returns the next state. It equals ``state`` if nothing is due.

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
        made = pem.make_authority(name, now, AUTHORITY_LIFE_S)
        newest = Authority(made.certificate, made.key)
        authorities.append(newest)
    leaf = state.leaf
    signers = [] if leaf is None else pem.issuers(leaf.chain, (item.certificate for item in authorities))
    # Without a valid certificate nobody is connected, and nothing can wait.
    if leaf is None or leaf.certificate.ends_at <= now or not signers:
        leaf = _issued(newest, host_names, now)
    else:
        signer = next(item for item in authorities if item.certificate == signers[-1])
        wait_s = OVERLAP_AFTER_OTHERS_S if signer.key is None else overlap_s
        known = now - newest.certificate.made_at >= wait_s
        old = leaf.certificate.ends_at - now < LEAF_LEFT_S
        if signer is not newest and (known or (old and signer.key is None)):
            leaf = _issued(newest, host_names, now)
        elif old:
            leaf = _issued(signer, host_names, now)
        elif signer is newest and now - leaf.certificate.made_at >= overlap_s:
            authorities = [newest]
    return OwnCertificates(tuple(authorities), leaf)


def _issued(authority: Authority, host_names: Sequence[str], now: float) -> Pair:
    assert authority.key is not None
    return pem.issue(Pair(authority.certificate.pem, authority.key), host_names, now, LEAF_LIFE_S)
