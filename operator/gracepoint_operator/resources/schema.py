"""From pydantic's JSON schema to the structural OpenAPI v3 schema of a CRD. Pure.

What the API server does not take is translated: ``$ref`` is put in place, "or null" means "may be absent",
and ``additionalProperties: false`` goes, as the API server prunes or refuses unknown fields by itself.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of ``model``.

    Raises:
        ValueError: The model uses what a structural schema cannot say; names where.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _translate(schema, schema.get("$defs", {}), model.__name__)


def either(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the structural schema of an object that is of one of two kinds.

    A field may be absent unless both kinds require it. A default is kept only if both kinds have it. The description of
    a field that both kinds have is that of ``first``; the rules of both apply.
    """
    merged = {**second, **first}
    if first.get("default") != second.get("default"):
        merged.pop("default")
    if "properties" in first and "properties" in second:
        ours, theirs = first["properties"], second["properties"]
        shared = {name: either(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
        of_one = {name: _without_default(field) for name, field in {**ours, **theirs}.items()}
        merged["properties"] = {**of_one, **shared}
        merged["required"] = [name for name in first.get("required", []) if name in second.get("required", [])]
    if "enum" in first and "enum" in second:
        merged["enum"] = [*first["enum"], *(value for value in second["enum"] if value not in first["enum"])]
    rules = "x-kubernetes-validations"
    if rules in first and rules in second:
        merged[rules] = first[rules] + [rule for rule in second[rules] if rule not in first[rules]]
    return merged


def _without_default(field: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in field.items() if key != "default"}


#: Keywords that are taken over as they are.
_PLAIN = frozenset(
    {
        "type",
        "format",
        "description",
        "default",
        "enum",
        "required",
        "pattern",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "maxItems",
        "maxProperties",
        "x-kubernetes-validations",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
    }
)


def _translate(node: dict[str, Any], definitions: dict[str, Any], path: str) -> dict[str, Any]:
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        return _translate(_overlay(target, node, "$ref"), definitions, path)
    if "anyOf" in node:
        arms = [arm for arm in node["anyOf"] if arm != {"type": "null"}]
        if len(arms) != 1:
            raise ValueError(f"{path}: expected 'one type or null', found a union of {len(arms)} types")
        return _translate(_overlay(arms[0], node, "anyOf"), definitions, path)
    translated: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            translated[key] = {name: _translate(field, definitions, f"{path}.{name}") for name, field in value.items()}
        elif key == "additionalProperties" and isinstance(value, dict) and "maxProperties" in node:
            translated[key] = _translate(value, definitions, f"{path}{{}}")
        elif key == "items":
            translated[key] = _translate(value, definitions, f"{path}[]")
        elif key == "const":
            translated["enum"] = [value]
        elif key in _PLAIN:
            translated[key] = value
        elif key not in {"title", "$defs"} and (key, value) != ("additionalProperties", False):
            raise ValueError(f"{path}: {key!r} has no place in a structural schema")
    if translated.get("default", 0) is None:
        del translated["default"]
    if isinstance(default := translated.get("default"), dict):
        translated["default"] = {name: value for name, value in default.items() if value is not None}
    if "description" in translated:
        translated["description"] = _reflow(translated["description"])
    return translated


def _overlay(target: dict[str, Any], node: dict[str, Any], reference: str) -> dict[str, Any]:
    """Returns ``target`` with the keys beside the reference to it. The field's keys win; the rules of both apply."""
    beside = {key: value for key, value in node.items() if key != reference}
    rules = "x-kubernetes-validations"
    if rules in target and rules in beside:
        beside[rules] = target[rules] + beside[rules]
    return {**target, **beside}


def _reflow(text: str) -> str:
    """Docstring to description: paragraphs stay, line breaks within them and code quotes go."""
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(paragraphs).replace("``", "")
