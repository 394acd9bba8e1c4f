"""The command line: ``python -m gracepoint verify PATH...`` tells whether checkpoints are as they were saved."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gracepoint.errors import CannotKnow, CheckpointCorrupt, CheckpointError

_GOOD, _DAMAGED, _UNKNOWN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gracepoint", description="Gracepoint's tools.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="read checkpoints and compare every file with its checksum",
        description="Reads checkpoints and compares every file with the size and checksum that were recorded when it "
        f"was saved. Exit code: {_GOOD} all are good, {_DAMAGED} one is damaged, {_UNKNOWN} one cannot be judged.",
    )
    verify.add_argument(
        "paths", nargs="+", metavar="PATH", help="a checkpoint, or a folder with checkpoints of steps: a path or a URI"
    )
    verify.set_defaults(run=_verify)
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _verify(options: argparse.Namespace) -> int:
    try:
        from gracepoint.checkpoint import verification  # loads TensorStore
    except ModuleNotFoundError as error:
        print(f"{error}: reading checkpoints needs what the extra gracepoint[jax] installs", file=sys.stderr)
        return _UNKNOWN
    codes = {_GOOD}
    for path in options.paths:
        for checkpoint in verification.checkpoints_at(path if "://" in path else Path(os.path.abspath(path))):
            try:
                report = verification.verify(checkpoint)
            except (CheckpointError, CannotKnow, OSError) as error:
                print(error, file=sys.stderr)
                codes.add(_DAMAGED if isinstance(error, CheckpointCorrupt) else _UNKNOWN)
            else:
                print(report)
                codes.add(_GOOD if report.ok else _DAMAGED)
    return next(code for code in (_DAMAGED, _UNKNOWN, _GOOD) if code in codes)


if __name__ == "__main__":
    sys.exit(main())
