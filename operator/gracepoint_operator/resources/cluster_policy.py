"""ClusterCheckpointPolicy: what administrators say for the namespaces of a cluster: a default policy, and limits.

The default is for JobSets and Jobs that name no policy, and for those that name this one where their namespace has no
CheckpointPolicy of that name. The limits hold for every policy in these namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gracepoint_operator.resources.base import Model, Resource
from gracepoint_operator.resources.label_selector import LabelSelector
from gracepoint_operator.resources.policy import CheckpointPolicy, CheckpointPolicySpec


class PolicyLimits(Model):
    """What holds for every policy of these namespaces, whoever wrote it. Of several limits, the strictest holds."""

    longest_hold_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """Evictions are held for at most this number of seconds; evictions.longestHoldSeconds of the chart is the same for
    all namespaces. 0: no eviction is held, and those that are held now are let through. Gangs get their notices all the
    same. An edit takes effect at once. Absent: no limit by this policy."""
    protection: bool = True
    """False: pods are not protected from autoscalers, whatever spec.voluntaryDisruption of a policy says. An edit takes
    effect at once."""


class ClusterCheckpointPolicySpec(Model):
    """Written by administrators."""

    namespace_selector: LabelSelector
    """The namespaces that this is for, by their labels. Every namespace has the label kubernetes.io/metadata.name.
    Empty ({}): all namespaces."""
    default: CheckpointPolicySpec | None = None
    """The spec of a CheckpointPolicy. JobSets that name no policy get this one when they are created, and so do Indexed
    Jobs that no other object made, unless they have the label gracepoint.dev/default-policy: off, or cannot meet the
    release contract. Of several defaults for a namespace, the one whose policy's name comes first in the alphabet
    applies. A workload may also name this policy by its label; a CheckpointPolicy of this name in its namespace comes
    first. The operator keeps a CheckpointPolicy of this name, with this spec, in each namespace that uses it; its
    status is there. Absent: no default."""
    limits: PolicyLimits = PolicyLimits()
    """Limits for all policies of these namespaces."""


class ClusterCheckpointPolicyStatus(Model):
    """Written by the operator."""


class ClusterCheckpointPolicy(Resource):
    """A default policy for namespaces, and limits for the policies in them. For administrators."""

    kind_name: ClassVar[str] = "ClusterCheckpointPolicy"
    plural: ClassVar[str] = "clustercheckpointpolicies"
    cluster_scoped: ClassVar[bool] = True

    kind: Literal["ClusterCheckpointPolicy"]
    spec: ClusterCheckpointPolicySpec
    status: ClusterCheckpointPolicyStatus = ClusterCheckpointPolicyStatus()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Returns whether it is for a namespace with these labels."""
        return self.spec.namespace_selector.selects(labels)

    def as_policy(self, namespace: str) -> CheckpointPolicy | None:
        """Returns the default as the CheckpointPolicy of a namespace. None: it has no default."""
        return None if self.spec.default is None else CheckpointPolicy.of(self.copy_for(namespace))

    def copy_for(self, namespace: str) -> dict[str, Any]:
        """Returns the CheckpointPolicy that the operator keeps in a namespace. It is deleted together with this."""
        assert self.spec.default is not None, "asked for only if there is one"
        owner = {"apiVersion": self.api_version, "kind": self.kind_name, "name": self.name, "uid": self.uid}
        meta = {"name": self.name, "namespace": namespace, "ownerReferences": [{**owner, "controller": True}]}
        spec = self.spec.default.to_json()
        return {"apiVersion": self.api_version, "kind": CheckpointPolicy.kind_name, "metadata": meta, "spec": spec}


def default_of(
    policies: Iterable[ClusterCheckpointPolicy], labels: Mapping[str, str]
) -> ClusterCheckpointPolicy | None:
    """Returns the policy whose default is for workloads that name none, in a namespace with these labels."""
    found = (policy for policy in policies if policy.spec.default is not None and policy.selects(labels))
    return min(found, key=lambda policy: policy.name, default=None)


def why_no_default(name: str, policy: ClusterCheckpointPolicy | None, labels: Mapping[str, str]) -> str | None:
    """Returns why a namespace has no default of a name, and what to do. None: it has one.

    Args:
        name: The name.
        policy: The ClusterCheckpointPolicy of this name. None: it does not exist.
        labels: Labels of the namespace.
    """
    if policy is None:
        found = f"found no ClusterCheckpointPolicy {name}"
    elif policy.spec.default is None:
        found = f"found no spec.default in the ClusterCheckpointPolicy {name}"
    elif not policy.selects(labels):
        found = f"found a spec.namespaceSelector of the ClusterCheckpointPolicy {name} that is not for this namespace"
    else:
        return None
    return (
        f"{found}, expected a default. Let an administrator give it back, or delete the CheckpointPolicy {name} of "
        "this namespace and create one of your own"
    )


def made_from(policy: CheckpointPolicy) -> str:
    """Returns the name of the ClusterCheckpointPolicy that a policy is a copy of. Empty: of none."""
    owners = policy.metadata.get("ownerReferences") or ()
    return next((policy.name for owner in owners if _is_original(owner, policy.name)), "")


def _is_original(owner: object, name: str) -> bool:
    wanted = {"kind": ClusterCheckpointPolicy.kind_name, "name": name}
    return isinstance(owner, Mapping) and owner.get("controller") is True and wanted.items() <= owner.items()
