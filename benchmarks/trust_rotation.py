"""The operator's certificate, and then its authority, change while pods are connected.

    python -m benchmarks.trust_rotation [--pods 1000] [--overlap 30] [--json FILE]

One replica with its real channel, and the library's own subscriber for each pod, over TLS on loopback, all in one
process. First the files get another certificate of the same authority, then one of another authority and nothing of the
old one. It measures how long it takes until the certificates are served and until every pod was told, how many streams
ended, how many pods do not trust what is served in the end, and how long it takes until all pods are connected again
after all streams were ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trustme

from tests.contract.fakes.replicas import WAIT_S, bound_cluster, replicas
from tests.contract.fakes.rotation import (
    add_pods,
    can_connect,
    change_authority,
    distrusting,
    pods,
    renew_certificate,
    served_certificate,
)
from tests.waiting import until

_LOOK_S = 0.2


def measure(number: int, overlap_s: float) -> dict[str, float]:
    """Changes the certificate once, and the authority once.

    Args:
        number: How many pods.
        overlap_s: How long the operator waits before it serves a certificate of another authority, in seconds.
    """
    api = bound_cluster()
    add_pods(api, number)
    first = trustme.CA()
    with tempfile.TemporaryDirectory() as folder, replicas(first, Path(folder)) as start:
        replica = start(api, overlap_s=overlap_s)
        began_s = time.monotonic()
        with pods(replica, number) as connected:
            connected_s = time.monotonic() - began_s
            before = set(replica.core.subscribers.all())
            renewed = renew_certificate(Path(folder), first)
            renewed_s = _seconds_until(lambda: served_certificate(replica) == renewed, "the renewed certificate")
            new = change_authority(Path(folder))
            changed_at_s = time.monotonic()
            until(lambda: replica.core_trusts != replica.ca, "the operator to read the files")
            noticed_s = time.monotonic()
            until(lambda: all(pod.authorities != replica.ca for pod in connected), "every pod to be told")
            told_s = time.monotonic() - noticed_s
            _seconds_until(lambda: can_connect(replica, new), "the certificate of the new authority", overlap_s)
            served_s = time.monotonic() - changed_at_s
            ended = len(before - set(replica.core.subscribers.all()))
            distrust = len(distrusting(replica, connected))
            began_s = time.monotonic()
            replica.core_loop.call_soon_threadsafe(replica.core.subscribers.close)
            until(
                lambda: len(after := set(replica.core.subscribers.all())) == number and not after & before,
                "all pods to connect again",
            )
            again_s = time.monotonic() - began_s
            replica.taint()
            until(lambda: all(len(pod.told) == 1 for pod in connected), "the notice")
    return {
        "pods": number,
        "connected_s": round(connected_s, 2),
        "renewed_s": round(renewed_s, 1),
        "told_s": round(told_s, 3),
        "served_s": round(served_s, 1),
        "streams_ended": ended,
        "pods_that_distrust": distrust,
        "connected_again_s": round(again_s, 2),
        "noticed": number,
    }


def _seconds_until(holds: Callable[[], bool], what: str, more_s: float = 0.0) -> float:
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > WAIT_S + more_s:
            raise TimeoutError(f"waited {WAIT_S + more_s:.0f} s for {what}")
        time.sleep(_LOOK_S)
    return time.monotonic() - began_s


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--overlap", type=float, default=30.0, help="seconds")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # the library writes a line for each pod
    figures = measure(given.pods, given.overlap)
    print(" ".join(f"{name}={value}" for name, value in figures.items()))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if figures["streams_ended"] or figures["pods_that_distrust"]:
        raise SystemExit("found pods that were disconnected or distrust the certificate, expected none")


if __name__ == "__main__":
    main()
