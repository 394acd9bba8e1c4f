"""The reference of the fields that users write, from the models. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gracepoint_operator.resources.policy import CheckpointPolicySpec
from gracepoint_operator.resources.schema import structural

START, END = "<!-- fields: generated from the models -->\n", "<!-- end of fields -->\n"


def policy_fields() -> str:
    """A Markdown table of all fields of CheckpointPolicy's spec."""
    rows = [
        f"| `{path}` | {_type(node)} | {_default(node)} | {_words(node)} |"
        for path, node in _leaves(structural(CheckpointPolicySpec), "spec")
    ]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def put_into(page: str) -> str:
    """``page`` with the table renewed between its two marks."""
    before, _, rest = page.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no table to renew: expected the lines {START!r} and {END!r}")
    return f"{before}{START}{policy_fields()}{END}{after}"


def _leaves(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    required = node.get("required", [])
    for name, field in node["properties"].items():
        if field["type"] == "object":
            yield from _leaves(field, f"{path}.{name}")
        else:
            yield f"{path}.{name}", field | {"required": name in required}


def _type(node: dict[str, Any]) -> str:
    if "enum" in node:
        return " or ".join(node["enum"])
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    bounds = [str(node[key]) for key in ("minimum", "maximum") if key in node]
    return f"{node['type']}, {' to '.join(bounds)}" if bounds else str(node["type"])


def _default(node: dict[str, Any]) -> str:
    if node["required"]:
        return "required"
    default = node["default"]
    if isinstance(default, list):
        return ", ".join(default) or "empty"
    return str(default) or "empty"


def _words(node: dict[str, Any]) -> str:
    return str(node["description"]).replace("\n\n", " ").replace("|", "\\|")
