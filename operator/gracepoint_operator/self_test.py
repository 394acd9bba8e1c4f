"""``python -m gracepoint_operator.self_test``: whether an installation answers as pods and the API server need it.

``helm test`` runs it in a separate pod. It connects to the Service, checks the certificate against the trusted
authorities that the operator keeps in its ConfigMap, and asks the channel and the webhooks something that they refuse.
It prints a line for each check, and ends with 1 if one failed. No threads; each request has a timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import ssl
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from gracepoint.wire.names import PATH_SUBSCRIBE

_TIMEOUT_S = 10.0
_DAYS_LEFT = 2.0


class CheckFailed(Exception):
    """A check failed. The message says what was found, and what to do."""


def check_certificate(url: str, authorities: str) -> str:
    """Checks that pods can verify the certificate, and that it does not end soon."""
    with _connected(url, authorities) as connection:
        certificate = connection.sock.getpeercert()
        assert certificate is not None
        left_days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / 86400
    if left_days < _DAYS_LEFT:
        raise CheckFailed(f"the certificate ends in {left_days:.1f} days; see the alert GracepointCertificateExpires")
    return f"the certificate is trusted, and valid for {left_days:.0f} days"


def check_refusal(url: str, authorities: str, path: str, expected: int, port: str) -> str:
    """Checks that a request which nobody may make is refused as expected."""
    with _connected(url, authorities) as connection:
        connection.request("POST", path, body=b"{}", headers={"Content-Type": "application/json"})
        status = connection.getresponse().status
    if status != expected:
        raise CheckFailed(f"{port}: found HTTP {status}, expected {expected}; is {url} the operator's Service?")
    return f"{port} answers"


def main(arguments: list[str] | None = None) -> int:
    """Runs all checks; returns the exit status."""
    parser = argparse.ArgumentParser("gracepoint-self-test", description=__doc__)
    parser.add_argument("--service-url", required=True, help="where pods reach the channel")
    parser.add_argument(
        "--webhook-url", help="where the API server reaches the webhooks; without it, they are not asked"
    )
    parser.add_argument("--snapshots-url", help="where pods reach a snapshot server; without it, none is asked")
    parser.add_argument("--authorities", type=Path, required=True, help="a file with the trusted authorities as PEM")
    options = parser.parse_args(arguments)
    try:
        authorities = options.authorities.read_text()
    except OSError as error:
        message = f"the trusted authorities: {error}; has the operator started?"
        return _run_checks([lambda: _fail(message)])
    checks = [
        lambda: check_certificate(options.service_url, authorities),
        # An empty message. A caller that is no pod is refused after it was read.
        lambda: check_refusal(options.service_url, authorities, PATH_SUBSCRIBE, 400, "the channel"),
    ]
    if options.webhook_url:
        checks.append(lambda: check_refusal(options.webhook_url, authorities, "/", 404, "the webhooks' port"))
    if options.snapshots_url:
        checks.append(lambda: f"snapshot server: {check_certificate(options.snapshots_url, authorities)}")
    return _run_checks(checks)


@contextlib.contextmanager
def _connected(url: str, authorities: str) -> Iterator[http.client.HTTPSConnection]:
    """A connection whose certificate was checked."""
    parts = urllib.parse.urlsplit(url)
    context = ssl.create_default_context(cadata=authorities)
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port or 443, timeout=_TIMEOUT_S, context=context
    )
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise CheckFailed(f"{url}: pods do not trust the certificate: {error}") from error
    except OSError as error:
        raise CheckFailed(f"{url}: {error!r}; check the pods of the operator, and NetworkPolicies") from error
    with contextlib.closing(connection):
        yield connection


def _fail(message: str) -> str:
    raise CheckFailed(message)


def _run_checks(checks: list[Callable[[], str]]) -> int:
    failed = False
    for check in checks:
        try:
            print(f"ok      {check()}")
        except (CheckFailed, OSError, http.client.HTTPException) as error:
            failed = True
            print(f"FAILED  {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
