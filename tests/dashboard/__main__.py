"""Draws the dashboard: ``python -m tests.dashboard [FILE]``. The default is build/dashboard.png."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.dashboard.picture import draw
from tests.dashboard.prometheus import prometheus


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("build/dashboard.png"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, prometheus(Path(folder)) as url:
        draw(url, given.file)
    print(given.file)


if __name__ == "__main__":
    main()
