"""The snapshot server as a process: ``python -m gracepoint.snapshots``. SIGTERM and SIGINT end it, after a drain."""

from __future__ import annotations

import argparse
import logging
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until a signal comes, and returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    left_bytes = min(left_by_pool().values(), default=None)
    if left_bytes is not None and options.capacity_bytes > left_bytes:
        print(
            f"--capacity-bytes: expected at most the {left_bytes} bytes that this container can still have, found "
            f"{options.capacity_bytes}: give it more memory, or less capacity",
            file=sys.stderr,
        )
        return 2
    threading.stack_size(_STACK_BYTES)
    try:
        server = SnapshotServer(
            SnapshotFiles(certificate=options.certificate, key=options.key, capability_keys=options.capability_keys),
            SnapshotLimits(
                capacity_bytes=options.capacity_bytes,
                workload_bytes=options.workload_bytes or options.capacity_bytes,
                age_s=options.age_s,
                connections=options.connections,
                connections_of_address=options.connections_of_address,
            ),
            options.host,
            options.port,
        )
    except (OSError, ValueError) as error:
        print(f"cannot serve snapshots: {error}", file=sys.stderr)
        return 1
    logger.info("serving snapshots port=%d capacity_bytes=%d", server.port, options.capacity_bytes)
    while not ending.wait(_LOOK_EVERY_S):
        pass
    server.close(options.drain_s)
    logger.info("ended")
    return 0


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--host", default="", help="address to listen on (all)")
    parser.add_argument("--port", type=int, default=9470, help="(%(default)s)")
    parser.add_argument(
        "--age-s", type=float, default=6 * 3600.0, metavar="S", help="after so long without a write, drop (%(default)s)"
    )
    parser.add_argument("--drain-s", type=float, default=10.0, metavar="S", help="for open requests (%(default)s)")
    parser.add_argument("--connections", type=_positive, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument("--connections-of-address", type=_positive, default=64, metavar="N", help="(%(default)s)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
