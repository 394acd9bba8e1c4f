"""Checks one JobSet under its policy. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli.lint import pods, processes
from gracepoint_cli.lint.effects import effects
from gracepoint_cli.lint.findings import Finding, Severity
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.unreadable import CAUSES, said
from gracepoint_operator.webhooks import AdmissionSettings, ContractViolation, inject_workload, release_contract
from gracepoint_operator.webhooks.creation_warnings import warnings
from gracepoint_operator.webhooks.injected_annotation import overruled
from gracepoint_operator.webhooks.training_jobs import Problems, gang

Json = dict[str, Any]

#: Only the form of what the operator injects counts here.
_SETTINGS = AdmissionSettings(operator_url="https://operator", ca_certificate="")
_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found about one JobSet.

    Attributes:
        findings: The findings, the worst first.
        effects: What a preemption would do to it. Empty if it would be refused.
    """

    name: str
    findings: tuple[Finding, ...]
    effects: tuple[str, ...]

    def worst(self) -> Severity | None:
        """Returns the severity of the worst finding. None if there is none."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> Json:
        """Returns the report as JSON."""
        return {
            "jobSet": self.name,
            "findings": [finding.to_json() for finding in self.findings],
            "effects": list(self.effects),
        }


def check(jobset: Json, policy: CheckpointPolicy | None, claims: Mapping[str, Json]) -> Report:
    """Checks a JobSet.

    Args:
        jobset: The JobSet, as its user writes it or as the API server has it.
        policy: Its policy. None: it is not known. Then what follows from the policy is not checked.
        claims: The PersistentVolumeClaims of its namespace that are known, by name.
    """
    meta = jobset.get("metadata") or {}
    name = str(meta.get("name") or f"{meta.get('generateName', '')}...")
    try:
        found, sentences = _check(jobset, policy, claims)
    except CAUSES as error:
        problem = f"found parts that are not of JobSet's schema ({said(error)}). Correct them"
        found, sentences = [Finding(Severity.ERROR, "unreadable", "spec", problem)], []
    return Report(name, tuple(sorted(found, key=lambda item: _ORDER[item.severity])), tuple(sentences))


def _check(
    jobset: Json, policy: CheckpointPolicy | None, claims: Mapping[str, Json]
) -> tuple[list[Finding], list[str]]:
    found = list(_label(jobset, policy))
    under = policy or _stand_in()
    kept = release_contract(jobset, under.spec)
    if isinstance(kept, ContractViolation):
        # The path is in each message, as the operator says it.
        found += [Finding(Severity.ERROR, "release-contract", *_split(problem)) for problem in kept.problems]
        return found, []
    made = inject_workload(kept.object, under.name, under.spec, _SETTINGS)
    if policy is not None:
        found += [Finding(Severity.WARNING, "at-creation", *_split(text)) for text in warnings(made, policy)]
        if "uid" not in (jobset.get("metadata") or {}):  # a stored JobSet has our own variables
            found += [Finding(Severity.WARNING, "overruled", *_split(text)) for text in overruled(jobset, made, policy)]
    found += _restarts(jobset)
    for member in gang(made, under.spec.training, Problems()):
        path = f"{member.path}.template.spec"
        found += processes.findings(member.container, f"{path}.containers[{member.container['name']}]")
        found += [item for item in pods.findings(member, path, claims) if policy or "volume" not in item.rule]
        if member.job.get("activeDeadlineSeconds"):
            text = "found a time limit: the gang saves before it, and the Job then fails. The JobSet starts again"
            found.append(Finding(Severity.INFO, "time-limit", f"{member.path}.activeDeadlineSeconds", text))
    return found, effects(made, policy) if policy is not None else []


def _label(jobset: Json, policy: CheckpointPolicy | None) -> Iterator[Finding]:
    label = ((jobset.get("metadata") or {}).get("labels") or {}).get(LABEL_POLICY)
    path = f"metadata.labels[{LABEL_POLICY}]"
    if label is None:
        text = "found no label, so Gracepoint leaves the JobSet alone. Add the name of a CheckpointPolicy"
        yield Finding(Severity.WARNING, "no-policy", path, text)
    elif policy is None:
        text = f"the CheckpointPolicy {label!r} was not found, so what follows from it is not checked"
        yield Finding(Severity.WARNING, "policy-not-seen", path, text)


def _restarts(jobset: Json) -> Iterator[Finding]:
    failure_policy = jobset["spec"].get("failurePolicy")
    if failure_policy is not None and not failure_policy.get("maxRestarts"):
        yield Finding(
            Severity.WARNING,
            "no-restarts",
            "spec.failurePolicy.maxRestarts",
            "found 0: a node that dies without a notice ends the job for good. Allow a few; exits after a save do "
            "not count",
        )


def _stand_in() -> CheckpointPolicy:
    spec = {"checkpoint": {"directory": "gs://not-known"}}
    body = {
        "apiVersion": "gracepoint.dev/v1alpha1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": "x"},
        "spec": spec,
    }
    return CheckpointPolicy.of(body)


def _split(problem: str) -> tuple[str, str]:
    path, _, text = problem.partition(": ")
    return (path, text) if text and " " not in path else ("", problem)
