"""The snapshot server as a process: ``python -m gracepoint.snapshots``.

After a SIGTERM or a SIGINT it takes no new values, and goes on to give those that it has, until they are dropped or the
time of ``--drain-s`` is over. A second signal ends it at once.
"""

from __future__ import annotations

import argparse
import logging
import math
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from gracepoint.machine import left_by_pool
from gracepoint.snapshots.snapshot_server import SnapshotFiles, SnapshotLimits, SnapshotServer

logger = logging.getLogger(__name__)

#: Each connection has a thread, and none calls deeply.
_STACK_BYTES = 512 * 1024
_LOOK_EVERY_S = 3600.0
_OPEN_REQUESTS_S = 5.0
_OTHER_FILES = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until a signal comes, and returns the exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
    ending, at_once = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        (at_once if ending.is_set() else ending).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    limits = SnapshotLimits(
        capacity_bytes=options.capacity_bytes,
        workload_bytes=options.workload_bytes or options.capacity_bytes,
        namespace_bytes=options.namespace_bytes,
        age_s=options.age_s,
        connections=options.connections,
        connections_of_address=options.connections_of_address,
    )
    if refused := _what_is_missing(limits):
        print(refused, file=sys.stderr)
        return 2
    threading.stack_size(_STACK_BYTES)
    try:
        server = SnapshotServer(
            SnapshotFiles(certificate=options.certificate, key=options.key, capability_keys=options.capability_keys),
            limits,
            options.host,
            options.port,
        )
    except (OSError, ValueError) as error:
        print(f"cannot serve snapshots: {error}", file=sys.stderr)
        return 1
    logger.info("serving snapshots port=%d capacity_bytes=%d", server.port, options.capacity_bytes)
    while not ending.wait(_LOOK_EVERY_S):
        pass
    logger.info("ending within drain_s=%g", options.drain_s)
    server.drain(options.drain_s, at_once)
    server.close(_OPEN_REQUESTS_S)
    logger.info("ended")
    return 0


def _what_is_missing(limits: SnapshotLimits) -> str:
    """Says what this process cannot have of what it needs. Empty: it has all. Allows itself as many open files."""
    left_bytes = min(left_by_pool().values(), default=None)
    if left_bytes is not None and limits.capacity_bytes > left_bytes:
        return (
            f"--capacity-bytes: expected at most the {left_bytes} bytes that this container can still have, found "
            f"{limits.capacity_bytes}: give it more memory, or less capacity"
        )
    needed = limits.connections + 2 * limits.pending + _OTHER_FILES
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        return (
            f"--connections: expected at most {max(0, most - needed + limits.connections)}, as this process may open "
            f"{most} files, found {limits.connections}: allow it more files, or fewer connections"
        )
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
    return ""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gracepoint.snapshots", description="Keeps snapshots of training jobs in this node's memory."
    )
    parser.add_argument("--certificate", type=Path, required=True, metavar="FILE", help="PEM; read again if it changes")
    parser.add_argument("--key", type=Path, required=True, metavar="FILE", help="its private key, PEM")
    parser.add_argument(
        "--capability-keys", type=Path, required=True, metavar="FILE", help="a line 'ID BASE64' for each key"
    )
    parser.add_argument("--capacity-bytes", type=_positive, required=True, metavar="N", help="for all values")
    parser.add_argument("--workload-bytes", type=_positive, metavar="N", help="for those of one workload (all)")
    parser.add_argument("--namespace-bytes", type=_positive, metavar="N", help="for those of one namespace (all)")
    parser.add_argument("--host", default="", help="address to listen on (all)")
    parser.add_argument("--port", type=int, default=9470, help="(%(default)s)")
    parser.add_argument(
        "--age-s",
        type=_seconds,
        default=6 * 3600.0,
        metavar="S",
        help="after so long without a write, drop (%(default)s)",
    )
    parser.add_argument(
        "--drain-s", type=_seconds, default=10.0, metavar="S", help="as long as it has values (%(default)s)"
    )
    parser.add_argument("--connections", type=_positive, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument("--connections-of-address", type=_positive, default=64, metavar="N", help="(%(default)s)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
