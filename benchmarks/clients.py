"""Processes that play many clients: each reads its settings from a file, and is told by lines what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def start_client(module: str, settings: Any, file: Path, log: Path) -> subprocess.Popen[str]:
    """Starts a process of clients with pipes for its input and output.

    Args:
        module: The module that it runs.
        settings: JSON values that it reads.
        file: Where they are written for it.
        log: Where its errors are appended.
    """
    file.write_text(json.dumps(settings))
    with log.open("a") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            cwd=_ROOT,
        )
