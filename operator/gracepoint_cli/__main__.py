"""``python -m gracepoint_cli``, and the console scripts ``gracepoint`` and ``kubectl-gracepoint``."""

from __future__ import annotations

import sys
from pathlib import Path

from gracepoint_cli.errors import ExitCode

_PLUGIN = "kubectl-"


def main() -> None:
    """Runs the command line, named as the user called it."""
    try:
        from gracepoint_cli.app import run
    except ModuleNotFoundError as error:
        # The console scripts are installed even without the extra "cli".
        sys.stderr.write(f"{error}: the command line needs what the extra gracepoint[cli] installs\n")
        sys.exit(ExitCode.UNKNOWN)
    called = Path(sys.argv[0]).name
    run("kubectl gracepoint" if called.startswith(_PLUGIN) else "gracepoint", sys.argv[1:])


if __name__ == "__main__":
    main()
