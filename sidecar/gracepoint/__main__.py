"""The command line of training images: ``python -m gracepoint verify PATH...`` says whether checkpoints are as they
were saved, and ``check`` whether this pod reaches the operator and its storage."""

from __future__ import annotations

import argparse
import json
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
    check = commands.add_parser(
        "check",
        help="tell whether this pod reaches the operator, and may write where checkpoints go",
        description=f"Checks the pod that it runs in. Exit code: {_GOOD} all is well, {_DAMAGED} a check failed.",
    )
    check.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    check.set_defaults(run=_check)
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _check(options: argparse.Namespace) -> int:
    from gracepoint.pod_check import check_pod

    def report(results: list[dict[str, str]]) -> None:
        print(f"{results[-1]['state']:7} {results[-1]['name']}: {results[-1]['message']}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results), encoding="utf-8")

    checks = check_pod(os.environ, report)
    return _DAMAGED if any(check["state"] != "ok" for check in checks) else _GOOD


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
