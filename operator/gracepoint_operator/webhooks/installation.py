"""What is installed in the cluster: which fields the JobSet API has, and which releases of Gracepoint there are.

``admission``, the server and ``doctor`` call it. ``log_overlapping_releases`` is one task on the controller's event
loop, which ends when it is cancelled. All else is pure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any

from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject, KubeClient, KubeError
from gracepoint_operator.kube.objects import LABEL_NAMESPACE_NAME
from gracepoint_operator.logs import about
from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks.release_contract import (
    RULE_ACTION,
    RULE_REASON,
    RULES,
    is_own_rule,
    own_pod_rules,
    uncounted_helpers,
)
from gracepoint_operator.webhooks.training_jobs import Json, Problems, gang, helpers

logger = logging.getLogger(__name__)

CRD_NAME = "jobsets.jobset.x-k8s.io"
VERSION = "v1alpha2"

_FIX = "Upgrade JobSet to v0.10 or newer"
_PATTERNS = "onJobFailureMessagePatterns"


@dataclasses.dataclass(frozen=True)
class InstalledApi:
    """Which fields that the release contract needs are missing in the installed JobSet API.

    The API server silently removes fields that a CRD does not define. A rule without one of its fields matches too
    much, or nothing. So the contract is compared with the schema of the served CRD.

    Attributes:
        missing: Fields and values without which a JobSet that leaves after its save would fail, or its restart would
            count. Empty if none is missing.
        by_message: False if JobSet cannot distinguish the contract's own FailJob rules from others.
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
    targets, paths = uncounted_helpers(jobset), []
    for member in gang(jobset, policy.training, Problems()):
        own = own_pod_rules(member, policy, in_place=False)  # these versions of JobSet have no restarts in place
        paths += [path for path, rule in _failing(member.path, member.job) if rule not in own]
    for helper in helpers(jobset, policy.training):
        if helper.name in targets:
            paths += [path for path, rule in _failing(helper.path, helper.job) if not is_own_rule(rule)]
    return paths


def _failing(path: str, job: Json) -> Iterator[tuple[str, Json]]:
    for i, rule in enumerate(job.get("podFailurePolicy", {}).get("rules") or []):
        if rule.get("action") == "FailJob":
            yield f"{path}.podFailurePolicy.rules[{i}]", rule


#: The first look comes later, as Helm removes the configuration of a former name last.
_FIRST_S = 20.0
_EVERY_S = 300.0
_WEBHOOK = "jobsets.gracepoint.dev"


@dataclasses.dataclass(frozen=True)
class InstalledRelease:
    """A release of the chart, by its webhook configuration.

    Attributes:
        configuration: The name of its MutatingWebhookConfiguration.
        host: The host name of its operator: ``<service>.<namespace>.svc``.
        namespaces: The namespaces that it answers for. Empty: all.
    """

    configuration: str
    host: str
    namespaces: frozenset[str]

    def shares(self, other: Collection[str]) -> str:
        """The namespaces that it has in common with a release that has these, for people. Empty: none."""
        if self.namespaces and other:
            return ", ".join(sorted(self.namespaces.intersection(other)))
        return ", ".join(sorted(self.namespaces or other)) or "all namespaces"


def installed_releases(configurations: Iterable[JsonObject]) -> list[InstalledRelease]:
    """Reads MutatingWebhookConfigurations. Those of others are left out."""
    releases = []
    for body in configurations:
        for webhook in body.get("webhooks") or ():
            if webhook.get("name") == _WEBHOOK:
                service = (webhook.get("clientConfig") or {}).get("service") or {}
                host = f"{service.get('name', '')}.{service.get('namespace', '')}.svc"
                releases.append(InstalledRelease(str(body["metadata"]["name"]), host, _namespaces(webhook)))
    return releases


def _namespaces(webhook: JsonObject) -> frozenset[str]:
    expressions = (webhook.get("namespaceSelector") or {}).get("matchExpressions") or ()
    return frozenset(
        name
        for expression in expressions
        if (expression.get("key"), expression.get("operator")) == (LABEL_NAMESPACE_NAME, "In")
        for name in expression.get("values") or ()
    )


async def log_overlapping_releases(
    api: KubeClient,
    host: str,
    namespaces: Collection[str],
    *,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Logs that another release answers for the same jobs, once for each change. Runs until cancelled.

    The chart refuses a second release, but it does not see the cluster where it is rendered without one, as GitOps
    tools do.

    Args:
        api: The API server.
        host: The host name of this operator.
        namespaces: The namespaces that this operator answers for. Empty: all.
        sleep: Waits.
    """
    logged: dict[str, str] = {}
    pause_s = _FIRST_S
    while True:
        await sleep(pause_s)
        pause_s = _EVERY_S
        try:
            releases = installed_releases((await api.list(objects.MUTATING_WEBHOOKS)).items)
        except KubeError as error:
            if not logged:
                logger.warning("cannot see whether another release is installed", extra=about(error=str(error)))
            logged = logged or {"": ""}
            continue
        shared = {item.host: shares for item in releases if item.host != host and (shares := item.shares(namespaces))}
        if shared and shared != logged:
            for other, namespaces_of_both in shared.items():
                logger.error(
                    "another release of Gracepoint answers for the same namespaces, and a pod listens to only one of "
                    "the two: remove one, or set other watchNamespaces for each",
                    extra=about(other=other, namespaces=namespaces_of_both),
                )
        logged = shared
