"""The objects of a file of manifests. Pure."""

from __future__ import annotations

from typing import Any

import yaml

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli.errors import CommandError, ExitCode
from gracepoint_operator.workloads import ANY_NAME_OR_MAKER, BY_NAME, MAKERS

Json = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Leaves times as texts, as JSON has them."""


def _as_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _as_text)


def objects(text: str, name: str) -> list[Json]:
    """Returns the objects of a YAML or JSON text, those of Lists one by one.

    Args:
        text: The text.
        name: Name of the file, for errors.

    Raises:
        CommandError: It is no YAML, or not made of Kubernetes objects.
    """
    try:
        documents = [item for item in yaml.load_all(text, _Loader) if item is not None]
    except yaml.YAMLError as error:
        hint = "A Helm template is no manifest: render it first (helm template)" if "{{" in text else ""
        raise CommandError(f"{name}: expected YAML: {error}", hint, ExitCode.BAD) from error
    found: list[Json] = []
    for item in documents:
        if not isinstance(item, dict) or "kind" not in item:
            raise CommandError(f"{name}: expected Kubernetes objects, found {str(item)[:60]!r}", code=ExitCode.BAD)
        found += item.get("items") or [] if str(item["kind"]).endswith("List") else [item]
    return found


def of_kind(items: list[Json], kind: str) -> list[Json]:
    """Returns the objects of a kind."""
    return [item for item in items if item.get("kind") == kind]


def named(items: list[Json], kind: str, name: str) -> Json | None:
    """Returns the object of a kind and name. None if there is none."""
    return next((item for item in of_kind(items, kind) if (item.get("metadata") or {}).get("name") == name), None)


def to_check(files: dict[str, list[Json]]) -> dict[str, list[Json]]:
    """Returns the workloads of each file, and the objects of which workloads are made.

    Jobs do many other things. So a Job without the policy's label is left out, if its file has anything else to check.

    Args:
        files: The objects of each file, by its name.

    Raises:
        CommandError: No file has any.
    """
    found = {name: _to_check(items) for name, items in files.items()}
    if files and not any(found.values()):
        items = [item for several in files.values() for item in several]
        others = ", ".join(sorted({str(item.get("kind")) for item in items})) or "nothing"
        hint = (
            "A runtime is checked with a TrainJob that uses it: give both, in one file or in several"
            if "Runtime" in others
            else ""
        )
        raise CommandError(f"{', '.join(files)}: found {others}, expected a {ANY_NAME_OR_MAKER}", hint, ExitCode.BAD)
    return found


def _to_check(items: list[Json]) -> list[Json]:
    kinds = [*BY_NAME, *(maker.name for maker in MAKERS)]
    found = [item for item in items if item.get("kind") in kinds]
    return [item for item in found if item["kind"] != "Job" or _has_label(item)] or found


def _has_label(item: Json) -> bool:
    return LABEL_POLICY in ((item.get("metadata") or {}).get("labels") or {})
