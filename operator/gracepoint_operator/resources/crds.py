"""The CustomResourceDefinitions, and the reference of the fields that users write, made from the models. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from gracepoint.wire.names import API_VERSION, GROUP, OLD_API_VERSION
from gracepoint_operator.resources.base import Resource, cel, either, reflow, rules, structural
from gracepoint_operator.resources.policy import CheckpointPolicy, CheckpointPolicySpec, ClusterCheckpointPolicy
from gracepoint_operator.resources.preemption import EITHER, Preemption, PreemptionRequest


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": 1} if wide else column


def _condition(kind: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].status'


_AGE = _column("Age", ".metadata.creationTimestamp", "date")

_POLICY_COLUMNS = [
    _column("Mode", ".spec.mode"),
    _column("Ready", _condition("Ready")),
    _column("FitsGrace", _condition("FitsGrace")),
    _column("JobSets", ".status.jobSets.count", "integer"),
    _column("LastStep", ".status.lastSave.step", "integer"),
    _column("LastSave", ".status.lastSave.time", "date"),
    _AGE,
    _column("Directory", ".spec.checkpoint.directory", wide=True),
    _column("Every", ".spec.checkpoint.everySteps", "integer", wide=True),
]

_PREEMPTION_COLUMNS = [
    _column("JobSet", ".spec.jobSet.name"),
    _column("Phase", ".status.phase"),
    _column("Cause", ".spec.cause"),
    _column("Step", ".status.step", "integer"),
    _column("StepsLost", ".status.stepsLost", "integer"),
    _column("Spare(s)", ".status.secondsToSpare", "number"),
    _column("Resumed", ".status.restoredStep", "integer"),
    _AGE,
    _column("Acks", ".status.acknowledgements.received", "integer", wide=True),
    _column("Pods", ".status.acknowledgements.expected", "integer", wide=True),
    _column("Mode", ".spec.mode", wide=True),
    _column("Deadline", ".spec.deadline", wide=True),
    _column("Signal", ".spec.signal", wide=True),
    _column("Message", ".status.message", wide=True),
]

_REQUEST_COLUMNS = [
    _column("JobSet", ".spec.jobSet.name"),
    _column("Mode", ".spec.mode"),
    _column("Phase", ".status.phase"),
    _column("Preemption", ".status.preemption"),
    _AGE,
    _column("Cause", ".spec.cause", wide=True),
    _column("Deadline", ".spec.deadline", wide=True),
    _column("Message", ".status.message", wide=True),
]

_CLUSTER_POLICY_COLUMNS = [
    _column("Mode", ".spec.default.mode"),
    _column("LongestHold", ".spec.limits.longestHoldSeconds", "integer"),
    _AGE,
    _column("Directory", ".spec.default.checkpoint.directory", wide=True),
]

_POLICY_RULES = rules(
    cel("self.metadata.name.size() <= 63", "metadata.name is used as a label's value: at most 63 characters")
)


def _definition(
    model: type[Resource],
    short_names: list[str],
    columns: list[dict[str, Any]],
    parts: dict[str, Any],
    extra: dict[str, Any],
    *,
    is_new: bool = False,
) -> dict[str, Any]:
    """``is_new``: version 0.2 did not have the kind, so that there is nothing of v1alpha1."""
    schema = {
        "type": "object",
        "description": reflow(model.__doc__ or ""),
        "required": ["spec"],
        "properties": {
            # The API server knows these three by itself; more than their type is an error.
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **parts,
        },
    }
    version = {
        "served": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": {**schema, **extra}},
    }
    # It is still the one that is stored: after a rollback, the CRDs of the release before have no other.
    old = {
        "name": OLD_API_VERSION,
        "storage": True,
        "deprecated": True,
        "deprecationWarning": f"{GROUP}/{OLD_API_VERSION} {model.kind_name} is deprecated; write "
        f"apiVersion: {GROUP}/{API_VERSION}",
        **version,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{model.plural}.{GROUP}",
            # Helm removes no CRD that it installed, and so none of the objects.
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {"app.kubernetes.io/part-of": "gracepoint"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Cluster" if model.cluster_scoped else "Namespaced",
            "names": {
                "kind": model.kind_name,
                "listKind": f"{model.kind_name}List",
                "plural": model.plural,
                "singular": model.kind_name.lower(),
                "shortNames": short_names,
                "categories": ["gracepoint"],
            },
            "conversion": {"strategy": "None"},
            "versions": [
                {"name": API_VERSION, "storage": is_new, **version},
                *([] if is_new else [old]),
            ],
        },
    }


def _parts(model: type[Resource]) -> dict[str, Any]:
    return {name: structural(model.part(name)) for name in ("spec", "status")}


def _preemption() -> dict[str, Any]:
    """A record of the operator, or a request of version 0.2, of which some may be stored."""
    record, request = _parts(Preemption), _parts(PreemptionRequest)
    spec = either(record["spec"], request["spec"])
    for name in request["spec"]["properties"].keys() - record["spec"]["properties"].keys():
        field = spec["properties"][name]
        field["description"] = f"Only of a request that was made under version 0.2. {field['description']}"
    del spec["properties"]["cause"]["x-kubernetes-validations"]  # a request's is immutable, a record's is corrected
    return {"spec": either(EITHER, spec), "status": either(record["status"], request["status"])}


def definitions() -> dict[str, dict[str, Any]]:
    """All CRDs, by the name of the file that each is kept in."""
    crds = (
        _definition(CheckpointPolicy, ["ckpol"], _POLICY_COLUMNS, _parts(CheckpointPolicy), _POLICY_RULES),
        _definition(Preemption, ["pre"], _PREEMPTION_COLUMNS, _preemption(), {}),
        _definition(PreemptionRequest, ["prereq"], _REQUEST_COLUMNS, _parts(PreemptionRequest), {}, is_new=True),
        _definition(
            ClusterCheckpointPolicy,
            ["cckpol"],
            _CLUSTER_POLICY_COLUMNS,
            _parts(ClusterCheckpointPolicy),
            _POLICY_RULES,
            is_new=True,
        ),
    )
    return {f"{crd['metadata']['name']}.yaml": crd for crd in crds}


#: Of the lines of pages.
_WIDTH = 120
START, END = "<!-- fields: generated from the models -->\n", "<!-- end of fields -->\n"


def policy_fields() -> str:
    """A Markdown list of all fields of CheckpointPolicy's spec."""
    lines = []
    for path, node in _leaves(structural(CheckpointPolicySpec), "spec"):
        default = "required" if node["required"] else _default(node)
        lines += [f"- **`{path}`** ({_type(node)}{default and f'; {default}'})", f"  {_description(node)}"]
    return "\n".join(lines) + "\n"


def put_into(page: str) -> str:
    """``page`` with the list renewed between its two marks."""
    return put_between(page, START, END, policy_fields())


def put_between(page: str, start: str, end: str, text: str) -> str:
    """``page`` with ``text`` between the lines ``start`` and ``end``, in place of what is there. Its lines are wrapped.

    Raises:
        ValueError: It does not have these lines.
    """
    before, _, rest = page.partition(start)
    _, end_mark, after = rest.partition(end)
    if not end_mark:
        raise ValueError(f"the page has nothing to renew: expected the lines {start!r} and {end!r}")
    lines = (
        textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        if len(line) > _WIDTH
        else line
        for line in text.splitlines()
    )
    wrapped = "\n".join(lines)
    return f"{before}{start}{wrapped}\n{end}{after}"


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
    return f"{node['type']}, {'-'.join(bounds)}" if bounds else str(node["type"])


def _default(node: dict[str, Any]) -> str:
    """The default, unless it is nothing at all."""
    default = node.get("default")
    if isinstance(default, list):
        default = ", ".join(default)
    return "" if default in (None, "") else f"default: {default}"


def _description(node: dict[str, Any]) -> str:
    """Without when an edit counts, which the page says of all fields."""
    return re.sub(r" An edit [^.]*\.", "", str(node["description"]).replace("\n\n", " "))
