"""What is generated from the chart: ``python -m tests.chart values`` and ``python -m tests.chart manifests``.

``values`` writes the table of values into the chart's README, from ``values.schema.json`` and the comments of
``values.yaml``. ``manifests`` writes plain manifests for ``kubectl apply``, as ``helm template`` makes them.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.chart.helm import CHART, OLDEST_KUBERNETES, helm_program

Json = dict[str, Any]

ROOT = CHART.parents[1]
BEGIN, END = "<!-- values: written by make generate -->", "<!-- end of the values -->"
NAME, NAMESPACE = "gracepoint", "gracepoint-system"
_TIMEOUT_S = 60
_LONGEST_LINE = 200


def main(arguments: list[str]) -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser("python -m tests.chart", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("values")
    plain = commands.add_parser("manifests")
    plain.add_argument("--folder", type=Path, default=ROOT / "build" / "manifests")
    given, helms = parser.parse_known_args(arguments)
    if given.command == "manifests":
        print(write_manifests(given.folder, helms))
    elif helms:
        parser.error(f"found {' '.join(helms)}, expected nothing after values")
    else:
        readme = CHART / "README.md"
        readme.write_text(with_table(readme.read_text()))


def write_manifests(folder: Path, helms: list[str]) -> Path:
    """Writes the namespace and all objects of the chart. Returns the file.

    Args:
        folder: Gets the file, and the secret token of the webhooks, which stays the same from then on.
        helms: Further arguments of ``helm template``, such as ``--values``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "admission-token"
    if not kept.exists():
        kept.touch(0o600)
        kept.write_text(secrets.token_urlsafe(32))
    own = ("--namespace", NAMESPACE, "--kube-version", OLDEST_KUBERNETES, "--no-hooks")
    token = ("--set-string", f"admission.token={kept.read_text()}")
    argv = [helm_program(), "template", NAME, str(CHART), *own, *token, *helms]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    namespace = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n"
    path = folder / "gracepoint.yaml"
    path.write_text(namespace + done.stdout)
    return path


def with_table(readme: str) -> str:
    """Returns the text of the README with the newest table."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def table() -> str:
    """The table of all values."""
    lines = ["| value | what may be set | default | what it is |", "|---|---|---|---|"]
    return "\n".join([*lines, *(_line(*row) for row in rows())])


def _line(name: str, allowed: str, default: str, about: str) -> str:
    """With as many sentences as fit into a terminal's line; ``values.yaml`` has the others."""
    sentences = re.split(r"(?<=[.]) (?=[A-Z`])", about)
    for count in range(len(sentences), 0, -1):
        line = f"| `{name}` | {allowed} | {default} | {' '.join(sentences[:count])} |"
        if len(line) <= _LONGEST_LINE:
            return line
    raise ValueError(
        f"{name}: found a row of {len(line)} characters, expected at most {_LONGEST_LINE}: shorten the first sentence"
    )


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Name, what is allowed, default and description of each value, in the order of ``values.yaml``."""
    schema: Json = json.loads((CHART / "values.schema.json").read_text())
    text = (CHART / "values.yaml").read_text()
    comments = _comments(text)

    def walk(values: Json, level: Json, before: str) -> Iterator[tuple[str, str, str, str]]:
        for key, value in values.items():
            name, found = before + key, _resolved(schema, level["properties"][key])
            about = comments[name].replace("|", "\\|").replace("<", "&lt;")
            if isinstance(value, dict) and any(f"{name}.{inner}" in comments for inner in value):
                yield name, "", "", about
                yield from walk(value, found, f"{name}.")
            else:
                yield name, _allowed(schema, found), f"`{json.dumps(value, ensure_ascii=False)}`", about

    return walk(yaml.safe_load(text), schema, "")


def _comments(text: str) -> dict[str, str]:
    """The comment above each key, by the path of the key."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    above: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.removeprefix("#").strip())
            continue
        if match := re.match(r"( *)(\w+):", line):
            indent = len(match[1])
            path = [entry for entry in path if entry[0] < indent] + [(indent, match[2])]
            found[".".join(key for _, key in path)] = " ".join(above)
        above = []
    return found


def _resolved(schema: Json, node: Json) -> Json:
    named = node.get("$ref", "").rpartition("/")[2]
    return schema["definitions"][named] if named else node


def _allowed(schema: Json, node: Json) -> str:
    node = _resolved(schema, node)
    if "anyOf" in node:
        return " or ".join(_allowed(schema, each) for each in node["anyOf"])
    if "enum" in node:
        return ", ".join(f"`{each if each and isinstance(each, str) else json.dumps(each)}`" for each in node["enum"])
    kind = node["type"]
    if kind == "array":
        return f"list of {_allowed(schema, node['items'])}"
    words = " or ".join([kind] if isinstance(kind, str) else kind)
    bounds = [f"{word} {node[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in node]
    return " ".join([words, *bounds])


if __name__ == "__main__":
    main(sys.argv[1:])
