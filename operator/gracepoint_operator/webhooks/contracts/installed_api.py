"""Which fields that the release contract needs are missing in the installed JobSet API. Pure.

The API server silently removes fields that a CRD does not define. A rule without one of its fields matches too much, or
nothing. So the contract is compared with the schema of the served CRD.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks.contracts.release_contract import (
    RULE_ACTION,
    RULE_REASON,
    RULES,
    is_own_rule,
    own_pod_rules,
    uncounted_helpers,
)
from gracepoint_operator.webhooks.training_jobs import Json, Problems, gang, helpers

CRD_NAME = "jobsets.jobset.x-k8s.io"
VERSION = "v1alpha2"

_FIX = "Upgrade JobSet to v0.10 or newer"
_PATTERNS = "onJobFailureMessagePatterns"


@dataclasses.dataclass(frozen=True)
class InstalledApi:
    """What is missing.

    Attributes:
        missing: Fields and values without which a JobSet that leaves after its save would fail, or its restart would
            count. Empty if none is missing.
        by_message: False if JobSet cannot tell the contract's own FailJob rules from others.
    """

    missing: tuple[str, ...] = ()
    by_message: bool = True

    def refusal(self, jobset: Json, policy: CheckpointPolicySpec) -> str | None:
        """Returns why the contract does not work here for a JobSet. None if it does.

        Args:
            jobset: The JobSet with the contract applied.
            policy: Its policy.
        """
        if self.missing:
            return (
                f"the JobSet API that is installed: found no {', no '.join(self.missing)}, which bring the JobSet back "
                f"after its save. {_FIX}, or remove the label to run the JobSet without Gracepoint"
            )
        others = [] if self.by_message else list(_other_rules(jobset, policy))
        if others:
            return (
                f"the JobSet API that is installed: found no {RULES}[].{_PATTERNS}, so that {', '.join(others)} would "
                f"restart the JobSet without end. {_FIX}, or remove these rules"
            )
        return None

    @property
    def warning(self) -> str | None:
        """A warning for the user who creates an allowed JobSet. None if there is none."""
        if self.by_message:
            return None
        return (
            f"the JobSet API that is installed: found no {RULES}[].{_PATTERNS}; every failure by a podFailurePolicy "
            f"restarts the JobSet without being counted. {_FIX}"
        )


def read_installed_api(crd: Json) -> InstalledApi:
    """Reads a CustomResourceDefinition of JobSets.

    Raises:
        LookupError: It serves no version that the operator knows.
    """
    versions = {item["name"]: item for item in crd["spec"]["versions"] if item.get("served")}
    if VERSION not in versions:
        raise LookupError(f"{CRD_NAME}: found the versions {sorted(versions)}, expected {VERSION} to be served")
    schema = versions[VERSION].get("schema", {}).get("openAPIV3Schema", {})
    rule = schema
    for name in ("spec", "failurePolicy", "rules"):
        rule = _field(rule, name)
    rule = None if rule is None else rule.get("items", {})
    if rule is None:
        return InstalledApi(missing=(RULES,), by_message=False)
    needs: tuple[tuple[str, str | None], ...] = (
        ("name", None),
        ("action", RULE_ACTION),
        ("onJobFailureReasons", RULE_REASON),
        ("targetReplicatedJobs", None),
    )
    missing = tuple(
        f"{RULES}[].{name}" + ("" if value is None else f" {value}")
        for name, value in needs
        if not _has(_field(rule, name), value)
    )
    return InstalledApi(missing=missing, by_message=_field(rule, _PATTERNS) is not None)


def _field(node: Any, name: str) -> Any:
    """Returns the schema of a field. None if the API server would remove the field."""
    if node is None:
        return None
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return node.get("properties", {}).get(name, {"x-kubernetes-preserve-unknown-fields": True})
    return node.get("properties", {}).get(name)


def _has(node: Any, value: str | None) -> bool:
    if node is None:
        return False
    values = node.get("items", node).get("enum")
    return value is None or values is None or value in values


def _other_rules(jobset: Json, policy: CheckpointPolicySpec) -> list[str]:
    """Returns the paths of other rules that make a Job fail whose failure restarts the JobSet without being counted."""
    targets, found = uncounted_helpers(jobset), []
    for member in gang(jobset, policy.training, Problems()):
        own = own_pod_rules(member, policy)
        found += [path for path, rule in _failing(member.path, member.job) if rule not in own]
    for helper in helpers(jobset, policy.training):
        if helper.name in targets:
            found += [path for path, rule in _failing(helper.path, helper.job) if not is_own_rule(rule)]
    return found


def _failing(path: str, job: Json) -> Iterator[tuple[str, Json]]:
    for i, rule in enumerate(job.get("podFailurePolicy", {}).get("rules") or []):
        if rule.get("action") == "FailJob":
            yield f"{path}.podFailurePolicy.rules[{i}]", rule
