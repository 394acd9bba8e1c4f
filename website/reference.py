"""Generates the reference's pages from the code: resources, settings, metrics, Events, the command line, Python."""

from __future__ import annotations

import dataclasses
import functools
import html
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gracepoint.settings import VARIABLES, Settings
from gracepoint.wire.names import ENV_JOB_COMPLETION_INDEX
from gracepoint_operator.decisions.preemption_status import STORY
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.resources.crds import definitions

_TIMEOUT_S = 60.0
#: Packages whose public names are the library's interface.
_PYTHON = ("gracepoint", "gracepoint.checkpoint", "gracepoint.multihost", "gracepoint.async_calls")
#: What a training loop calls comes before the errors, which the alphabet would put first.
_FIRST = ("attach", "Session")


def pages() -> dict[str, str]:
    """Returns the Markdown of each page, by its name."""
    made: dict[str, Callable[[], str]] = {
        "command-line": command_line,
        "events": events,
        "metrics": metrics,
        "python": python,
        "resources": resources,
        "settings": settings,
    }
    return {name: make() for name, make in made.items()}


def command_line() -> str:
    """Returns the page of all commands with their arguments."""
    # As typer prints it for any program.
    argv = [sys.executable, "-m", "typer", "gracepoint_cli.app", "utils", "docs", "--name", "kubectl gracepoint"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    body = re.sub(r"^\* `(\w+)`: .*\.\.\.$", functools.partial(_whole, done.stdout), done.stdout, flags=re.M)
    body = body.partition("\n")[2]
    return f"# Commands\n\nWhat each is for, with examples: [The command line](../command-line.md).\n{body}"


def _whole(page: str, listed: re.Match[str]) -> str:
    """Returns a line of a list of commands with what the command's own section says: typer cuts it in the list."""
    section = re.search(rf"^##+ `[\w ]+ {listed[1]}`\n\n(.+)$", page, re.M)
    return f"* `{listed[1]}`: {section[1]}" if section else listed[0]


def events() -> str:
    """Returns the page of the Events' reasons."""
    lines = "\n".join(f"- `{reason}`" for reason in STORY)
    return (
        "# Events\n\nReasons of the Events on a JobSet and its Preemption, in the order in which they usually come. "
        f"[Observability](../observability.md#events) says when each is posted.\n\n{lines}\n"
    )


def metrics() -> str:
    """Returns the page of the operator's metrics."""
    lines = [
        "# Metrics",
        "",
        "Metrics of one replica of the operator. [Observability](../observability.md#metrics) explains",
        "",
    ]
    lines[2] += " them, with questions in PromQL."
    for family in sorted(Metrics().families(), key=lambda item: item.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines += [f"`{name}` ({family.type})", f":   {family.documentation}", ""]
    return "\n".join(lines)


def python() -> str:
    """Returns the page of the library's public names, which mkdocstrings fills in."""
    parts = ["# Python", "", "The public names of the library. Everything else may change.", ""]
    rest = ", ".join(f'"!^{name}$"' for name in _FIRST)
    for name in (*(f"{_PYTHON[0]}.{name}" for name in _FIRST), *_PYTHON):
        parts += [f"::: {name}", "    options:", "      show_submodules: false", "      heading_level: 2"]
        parts += ["      inherited_members: true", "      show_if_no_docstring: false"]
        parts += [f'      filters: ["!^_", {rest}]', ""] if name == _PYTHON[0] else [""]
    return "\n".join(parts)


def settings() -> str:
    """Returns the page of the library's settings."""
    lines = [
        "# Settings",
        "",
        "Variables that the library reads, once, in `attach`. In a cluster, the operator's webhook writes them,",
        f"except for `{ENV_JOB_COMPLETION_INDEX}`, which the Job controller sets.",
        "[The training loop](../training-loop.md) says what they mean and which field of a policy sets them.",
        "",
        "| variable | type | default | what it is |",
        "|---|---|---|---|",
    ]
    for field in dataclasses.fields(Settings):
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
        doc = html.escape(field.metadata["doc"], quote=False)
        lines.append(f"| `{VARIABLES[field.name]}` | `{kind.replace(' | None', '')}` | {default} | {doc} |")
    return "\n".join(lines) + "\n"


def resources() -> str:
    """Returns the page of all fields of the resources."""
    lines = ["# Resources", "", "All fields of the definitions in `crds/`."]
    for crd in definitions().values():
        version = crd["spec"]["versions"][0]
        schema = version["schema"]["openAPIV3Schema"]
        names = crd["spec"]["names"]
        lines += [
            "",
            f"## {names['kind']}",
            "",
            f"`{crd['spec']['group']}/{version['name']}`, `{names['plural']}`.",
            "",
        ]
        lines += [str(schema.get("description", "")), ""]
        for part in ("spec", "status"):
            lines += [f"### {names['kind']} {part}", ""]
            lines += _fields(schema["properties"][part], part)
    return "\n".join(lines) + "\n"


def _fields(node: Mapping[str, Any], path: str) -> Iterator[str]:
    required = node.get("required") or ()
    for name, child in (node.get("properties") or {}).items():
        kind = child.get("type", "any")
        items = child.get("items") or {}
        if kind == "array":
            kind = f"list of {items.get('type', 'any')}"
        words = [kind, *(["required"] if name in required else [])]
        if "default" in child and child["default"] not in ({}, []):
            words.append(f"default `{json.dumps(child['default'])}`")
        if "enum" in child:
            words.append(", ".join(map(str, child["enum"])))
        text = " ".join(str(child.get("description", "")).split())
        yield f"`{path}.{name}` ({'; '.join(words)})"
        yield f":   {text or '–'}"
        yield ""
        yield from _fields(child, f"{path}.{name}")
        yield from _fields(items, f"{path}.{name}[]")
