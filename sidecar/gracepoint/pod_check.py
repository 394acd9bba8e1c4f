"""``python -m gracepoint check``: whether this pod reaches the operator, and may write where checkpoints go.

It reads the variables that the operator's webhook gives to training containers. ``kubectl gracepoint doctor`` runs it
in a pod that is like those of a job. No threads; each request has a timeout.
"""

from __future__ import annotations

import errno
import http.client
import os
import secrets
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping

from gracepoint.version import __version__
from gracepoint.wire.names import PATH_SUBSCRIBE, Env

_TIMEOUT_S = 10.0
_DAY_S = 86400.0
_RIGHTS = "Give the pod's user, or its service account, the right to write there"
#: Errors that are not about rights: no such bucket, no space, no quota, no answer, or storage that does not do what
#: checkpoints need. Their own messages say what to do.
_NOT_OF_RIGHTS = {errno.ENODEV, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT, errno.ENOTSUP}


class PodCheckFailed(Exception):
    """A check failed. The message says what was found, and what to do."""


def check_pod(
    environment: Mapping[str, str], report: Callable[[list[dict[str, str]]], object] = len
) -> list[dict[str, str]]:
    """Runs all checks.

    Args:
        environment: The variables of the training container.
        report: Called after each check with the result so far: the pod may be ended before the next check is done.

    Returns:
        An entry for each check with ``name``, ``state`` ("ok" or "FAILED") and ``message``.
    """
    checks: dict[str, Callable[[Mapping[str, str]], str]] = {
        "library": lambda _: f"version {__version__}",
        "channel": _channel,
        "storage": _storage,
    }
    results = []
    for name, check in checks.items():
        try:
            results.append({"name": name, "state": "ok", "message": check(environment)})
        except Exception as error:  # noqa: BLE001  a check that breaks has failed; the others still run
            message = str(error) if isinstance(error, PodCheckFailed) else f"{type(error).__name__}: {error}"
            results.append({"name": name, "state": "FAILED", "message": message})
        report(results)
    return results


def _channel(environment: Mapping[str, str]) -> str:
    """Connects as the library does, and sends a message that the operator refuses."""
    url = environment.get(Env.OPERATOR_URL)
    if not url:
        raise PodCheckFailed(
            f"found no {Env.OPERATOR_URL}: the pod was not prepared. Create the job again while the operator runs"
        )
    parts = urllib.parse.urlsplit(url)
    context = ssl.create_default_context(cadata=environment.get(Env.CA_CERTIFICATE))
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port or 443, timeout=_TIMEOUT_S, context=context
    )
    try:
        connection.connect()
        certificate = connection.sock.getpeercert() or {}
        connection.request("POST", PATH_SUBSCRIBE, body=b"{}", headers={"Content-Type": "application/json"})
        status = connection.getresponse().status
    except ssl.SSLCertVerificationError as error:
        raise PodCheckFailed(f"{url}: the certificate is not trusted: {error}. Create the job again") from error
    except (OSError, http.client.HTTPException) as error:
        raise PodCheckFailed(
            f"{url}: {error!r}. Check the operator's pods, the cluster's DNS and NetworkPolicies"
        ) from error
    finally:
        connection.close()
    if status not in (400, 401, 403):
        raise PodCheckFailed(f"{url}: found HTTP {status}, expected a refusal. Is this the operator's Service?")
    left_days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / _DAY_S
    return f"{url} answers; its certificate is trusted, and valid for {left_days:.0f} days"


def _storage(environment: Mapping[str, str]) -> str:
    """Writes, reads and deletes a small file in the directory of the checkpoints."""
    directory = environment.get(Env.DIRECTORY)
    if not directory:
        raise PodCheckFailed(f"found no {Env.DIRECTORY}: the pod was not prepared")
    try:
        from gracepoint.checkpoint.storage.locations import storage_path
    except ModuleNotFoundError as error:
        raise PodCheckFailed(f"{error}: the image needs what the extra gracepoint[jax] installs") from error
    folder = storage_path(directory)
    try:
        folder.make_folder()
        folder.check_usable()
        probe, data = folder / f".gracepoint-check-{secrets.token_hex(8)}", os.urandom(32)
        probe.put(data)
        try:
            data_read = probe.read_bytes()
        finally:
            probe.delete()
    except OSError as error:
        rights = "" if error.errno in _NOT_OF_RIGHTS else f". {_RIGHTS}"
        raise PodCheckFailed(f"{directory}: {error}{rights}") from error
    if data_read != data:
        raise PodCheckFailed(f"{directory}: found other bytes than were written")
    return f"{directory}: written, read and deleted"
