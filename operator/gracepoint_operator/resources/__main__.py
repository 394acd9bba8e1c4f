"""``python -m gracepoint_operator.resources``: prints the CRDs, or writes them and the reference."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from gracepoint_operator.resources.crds import definitions, put_into

_HEADER = "# Generated from the models by `python -m gracepoint_operator.resources --write .`. Edit those.\n"

#: Folders of the project, from its root, that hold a copy of each CRD.
FOLDERS = (Path("crds"), Path("charts/gracepoint/files/crds"))
#: The page that holds the reference of the policy's fields.
PAGE = Path("docs/policy.md")


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice: anchors are hard to read in a CRD."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def documents() -> dict[str, str]:
    """The YAML text of each CRD, by file name."""
    return {
        name: _HEADER + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=110)
        for name, crd in definitions().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gracepoint_operator.resources", description=__doc__)
    parser.add_argument("--write", metavar="ROOT", type=Path, help="root of the project, to write its copies")
    arguments = parser.parse_args()
    crd_texts = documents()
    if arguments.write is None:
        print("---\n".join(crd_texts.values()), end="")
        return
    for folder in FOLDERS:
        (arguments.write / folder).mkdir(parents=True, exist_ok=True)
        for name, text in crd_texts.items():
            (arguments.write / folder / name).write_text(text, encoding="utf-8")
            print(arguments.write / folder / name)
    page = arguments.write / PAGE
    page.write_text(put_into(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
