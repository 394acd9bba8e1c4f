"""The authorities that pods and the API server trust, with an overlap. Pure.

All replicas keep the bundle in one ConfigMap. An authority is trusted from the moment at which any replica first finds
it. It stays for a while after no source has it any more, because a replica may still serve a certificate of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from gracepoint.wire.frames import trust_digest
from gracepoint_operator.trust import pem
from gracepoint_operator.trust.pem import Certificate, NotPem

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
        return pem.joined(sorted((item.certificate for item in self.items), key=lambda item: item.fingerprint))

    @property
    def digest(self) -> str:
        """Identifies the certificates."""
        return trust_digest(self.pem)

    def since(self, certificates: Iterable[Certificate]) -> float | None:
        """When the first of these authorities was found, in seconds since the epoch. None: none is trusted."""
        wanted = {item.fingerprint for item in certificates}
        return min((item.since for item in self.items if item.certificate.fingerprint in wanted), default=None)

    def updated(self, found: Iterable[Certificate], now: float, overlap_s: float) -> Bundle:
        """Returns the bundle after the sources were read.

        Args:
            found: The authorities that the sources have now.
            now: Seconds since the epoch.
            overlap_s: How long the certificate of an older authority may be served. An authority stays for twice this
                time after no source has it any more.
        """
        sources = {item.fingerprint: item for item in found if item.ends_at > now}
        known = {item.certificate.fingerprint for item in self.items}
        kept = []
        for item in self.items:
            if item.certificate.fingerprint in sources:
                kept.append(dataclasses.replace(item, gone_at=None))
                continue
            gone_at = now if item.gone_at is None else item.gone_at
            if item.certificate.ends_at > now and now - gone_at < 2 * overlap_s:
                kept.append(dataclasses.replace(item, gone_at=gone_at))
        kept += [Trusted(item, now) for fingerprint, item in sources.items() if fingerprint not in known]
        return Bundle(tuple(sorted(kept, key=lambda item: (item.since, item.certificate.fingerprint))))

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
                    Trusted(pem.read(item["pem"])[0], float(item["since"]), _time(item.get("goneAt")))
                    for item in json.loads(data.get(_STATE_KEY) or "[]")
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise NotPem(f"{_STATE_KEY}: {error}") from error


def _time(found: object) -> float | None:
    return float(found) if isinstance(found, int | float) else None
