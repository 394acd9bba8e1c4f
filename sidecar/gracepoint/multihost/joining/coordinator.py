"""Waits for process 0, which hosts JAX's coordination service. No threads and no state."""

from __future__ import annotations

import socket
import time

from gracepoint.errors import ClusterError, SettingsError

_KNOCK_S = 1.0
_FIRST_PAUSE_S = 0.01


def wait_for_coordinator(address: str, *, timeout_s: float) -> float:
    """Waits until something listens at ``host:port``. Returns how many seconds that took.

    Raises:
        ClusterError: Nothing listens there within the timeout. The message says why the last attempt failed.
        SettingsError: The address has no port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError(f"coordinator_address: expected host:port, found {address!r}")
    began = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S):
                return time.monotonic() - began
        except OSError as error:  # the name does not exist yet, refused, no route, timeout
            waited_s = time.monotonic() - began
            if waited_s + pause_s > timeout_s:
                raise ClusterError(
                    f"waited {waited_s:.0f} s for process 0 at {address}, which did not answer: {error}. Expected its "
                    f"coordination service there: see whether that process runs, and whether all have its address"
                ) from error
        time.sleep(pause_s)
        pause_s = next_pause_s(pause_s, time.monotonic() - began)


def next_pause_s(pause_s: float, waited_s: float) -> float:
    """Returns how many seconds to pause before the next look for process 0.

    Most processes come just before or after process 0, so pauses begin short and grow to 0.1 s. Each look is up to ten
    requests to the cluster's DNS, so a large gang would send thousands of them in a second. Therefore a pause in a long
    wait is a twentieth of the time waited so far, and at most a second.

    Args:
        pause_s: The pause before, in seconds.
        waited_s: Seconds waited so far.
    """
    return min(pause_s * 1.5, max(0.1, waited_s / 20), 1.0)
