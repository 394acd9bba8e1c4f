"""The CustomResourceDefinitions, made from the models."""

from __future__ import annotations

from typing import Any

from gracepoint.wire.names import API_VERSION, GROUP, OLD_API_VERSION
from gracepoint_operator.resources.base import Resource, cel, rules
from gracepoint_operator.resources.policy import CheckpointPolicy
from gracepoint_operator.resources.preemption import EITHER, NAMES, Preemption
from gracepoint_operator.resources.request import PreemptionRequest
from gracepoint_operator.resources.schema import either, structural


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

_POLICY_RULES = rules(
    cel("self.metadata.name.size() <= 63", "metadata.name is used as a label's value: at most 63 characters")
)


def _definition(
    model: type[Resource],
    short_names: list[str],
    columns: list[dict[str, Any]],
    parts: dict[str, Any],
    extra: dict[str, Any],
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "description": model.__doc__,
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
            "scope": "Namespaced",
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
                {"name": API_VERSION, "storage": False, **version},
                # Stored in this one for now: after a rollback, the CRDs of the release before have no other.
                {
                    "name": OLD_API_VERSION,
                    "storage": True,
                    "deprecated": True,
                    "deprecationWarning": f"{GROUP}/{OLD_API_VERSION} {model.kind_name} is deprecated; write "
                    f"apiVersion: {GROUP}/{API_VERSION}",
                    **version,
                },
            ],
        },
    }


def _parts(model: type[Resource]) -> dict[str, Any]:
    return {name: structural(model.part(name)) for name in ("spec", "status")}


def _preemption() -> dict[str, Any]:
    """A record of the operator, or somebody's request."""
    record, request = _parts(Preemption), _parts(PreemptionRequest)
    spec = either(record["spec"], request["spec"])
    return {"spec": either(EITHER, spec), "status": either(record["status"], request["status"])}


def definitions() -> dict[str, dict[str, Any]]:
    """All CRDs, by the name of the file that each is kept in."""
    made = (
        _definition(CheckpointPolicy, ["ckpol"], _POLICY_COLUMNS, _parts(CheckpointPolicy), _POLICY_RULES),
        _definition(Preemption, ["pre"], _PREEMPTION_COLUMNS, _preemption(), NAMES),
    )
    return {f"{crd['metadata']['name']}.yaml": crd for crd in made}
