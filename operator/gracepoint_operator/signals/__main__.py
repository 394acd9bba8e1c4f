"""``python -m gracepoint_operator.signals``: prints the catalogue's list, or renews it in a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from gracepoint_operator.signals import catalogue


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gracepoint_operator.signals", description=__doc__)
    parser.add_argument("--write", metavar="PAGE", type=Path, help="the page to write the list into")
    path = parser.parse_args().write
    if path is None:
        print(catalogue.listing(), end="")
        return
    path.write_text(catalogue.put_into(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
