"""The reference of the fields that users write, from the models. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gracepoint_operator.resources.policy import CheckpointPolicySpec
from gracepoint_operator.resources.schema import structural

START, END = "<!-- fields: generated from the models -->\n", "<!-- end of fields -->\n"


def policy_fields() -> str:
    """A Markdown list of all fields of CheckpointPolicy's spec."""
    lines = []
    for path, node in _leaves(structural(CheckpointPolicySpec), "spec"):
        default = "required" if node["required"] else f"default: {_default(node)}"
        lines += [f"- **`{path}`** ({_type(node)}; {default})", f"  {_words(node)}"]
    return "\n".join(lines) + "\n"


def put_into(page: str) -> str:
    """``page`` with the list renewed between its two marks."""
    return put_between(page, START, END, policy_fields())


def put_between(page: str, start: str, end: str, text: str) -> str:
    """``page`` with ``text`` between the lines ``start`` and ``end``, in place of what is there.

    Raises:
        ValueError: It does not have these lines.
    """
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has nothing to renew: expected the lines {start!r} and {end!r}")
    return f"{before}{start}{text}{end}{after}"


def _leaves(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    required = node.get("required", [])
    for name, field in node["properties"].items():
        if field["type"] == "object":
            yield from _leaves(field, f"{path}.{name}")
        else:
            yield f"{path}.{name}", field | {"required": name in required}


def _type(node: dict[str, Any]) -> str:
    if "enum" in node:
        return ", ".join(node["enum"])
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    bounds = [str(node[key]) for key in ("minimum", "maximum") if key in node]
    return f"{node['type']}, {' to '.join(bounds)}" if bounds else str(node["type"])


def _default(node: dict[str, Any]) -> str:
    if "default" not in node:
        return "absent"
    default = node["default"]
    if isinstance(default, list):
        return ", ".join(default) or "empty"
    return str(default) or "empty"


def _words(node: dict[str, Any]) -> str:
    return str(node["description"]).replace("\n\n", " ")
