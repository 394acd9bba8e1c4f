"""Keys, certificates and tokens of a cluster; all are made for it and die with it.

Processes: openssl, to its end. Threads: none.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster.shell import run

_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = "3650"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path


def authority(folder: Path, name: str, alt_names: Sequence[str] = ()) -> Pair:
    """Make a certificate authority of that common name.

    Its key is RSA and in the old PKCS#1 form, the only one that JobSet's certificate rotation reads.
    """
    pair = _pair(folder, name)
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        _DAYS,
        "-subj",
        f"/CN={name}",
    ]
    argv += [*_alt_names(alt_names), "-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
    run([*argv, "-keyout", pair.key, "-out", pair.certificate])
    run(["openssl", "rsa", "-traditional", "-in", pair.key, "-out", pair.key])
    return pair


def issue(
    folder: Path,
    by: Pair,
    name: str,
    alt_names: Sequence[str] = (),
    *,
    group: str = "",
    usage: str = "serverAuth",
) -> Pair:
    """Make a certificate signed by an authority.

    Args:
        folder: Where it goes.
        by: The authority.
        name: The common name, in Kubernetes a client's user name.
        alt_names: What it is good for, as ``DNS:name`` or ``IP:address``.
        group: The organisation, in Kubernetes a client's group.
        usage: ``serverAuth`` or ``clientAuth``.
    """
    pair = _pair(folder, name)
    subject = f"/O={group}/CN={name}" if group else f"/CN={name}"
    argv = ["openssl", "req", "-x509", *_EC_KEY, "-days", _DAYS, "-subj", subject, *_alt_names(alt_names)]
    argv += ["-CA", str(by.certificate), "-CAkey", str(by.key)]
    argv += ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"extendedKeyUsage={usage}"]
    run([*argv, "-keyout", pair.key, "-out", pair.certificate])
    return pair


def signing_key(folder: Path) -> Pair:
    """Make the key that signs service account tokens; the certificate's place holds its public half."""
    pair = Pair(folder / "service-accounts.pub", folder / "service-accounts.key")
    run(["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", pair.key])
    run(["openssl", "pkey", "-in", pair.key, "-pubout", "-out", pair.certificate])
    return pair


def token() -> str:
    """Make a secret that stands for a user."""
    return secrets.token_hex(24)


def _pair(folder: Path, name: str) -> Pair:
    return Pair(folder / f"{name}.crt", folder / f"{name}.key")


def _alt_names(names: Sequence[str]) -> list[str]:
    return ["-addext", f"subjectAltName={','.join(names)}"] if names else []
