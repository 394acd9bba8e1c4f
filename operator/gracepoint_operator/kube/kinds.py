"""The kinds of objects that the operator uses, and their paths in the API. Pure."""

from __future__ import annotations

import dataclasses

from gracepoint.wire import names


@dataclasses.dataclass(frozen=True)
class Kind:
    """The place of one kind of objects in the API."""

    prefix: str  # "/api/v1" or "/apis/<group>/<version>"; without the version if any version will do
    plural: str
    any_version: bool = False  # True: the version that the cluster prefers is read
    subset: str = ""  # distinguishes kinds at the same place that are watched with different label selectors
    namespaced: bool = True

    @property
    def title(self) -> str:
        """The plural, with the subset if there is one. Different for all kinds that are watched."""
        return f"{self.plural}-{self.subset}" if self.subset else self.plural

    @property
    def group(self) -> str:
        """The API group. Empty for the core group."""
        return self.prefix.split("/")[2] if self.prefix.startswith("/apis/") else ""

    @property
    def version(self) -> str | None:
        """The version in its group. None if any will do."""
        return None if self.any_version else self.prefix.rpartition("/")[2]

    @property
    def api_version(self) -> str:
        """Group and version, as in ``apiVersion`` of objects and references."""
        return self.prefix.removeprefix("/apis/").removeprefix("/api/")

    def of_version(self, group_version: str) -> Kind:
        """Returns the same kind in a version of its group."""
        return dataclasses.replace(self, prefix=f"/apis/{group_version}", any_version=False)

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        parts = [self.prefix]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


_GRACEPOINT = f"/apis/{names.GROUP}/{names.API_VERSION}"
NAMESPACES = Kind("/api/v1", "namespaces", namespaced=False)
CONFIG_MAPS = Kind("/api/v1", "configmaps")
SECRETS = Kind("/api/v1", "secrets")
MUTATING_WEBHOOKS = Kind("/apis/admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", namespaced=False)
VALIDATING_WEBHOOKS = Kind("/apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", namespaced=False)
NODES = Kind("/api/v1", "nodes", namespaced=False)
PODS = Kind("/api/v1", "pods")
JOBS = Kind("/apis/batch/v1", "jobs")
CRDS = Kind("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)
POD_DISRUPTION_BUDGETS = Kind("/apis/policy/v1", "poddisruptionbudgets")
#: Kinds of Karpenter and Kueue. A cluster may lack them, or get them later. The fields that are read from Kueue's kind
#: are the same in v1beta1 and v1beta2 except for one name.
NODE_CLAIMS = Kind("/apis/karpenter.sh/v1", "nodeclaims", namespaced=False)
KUEUE_WORKLOADS = Kind("/apis/kueue.x-k8s.io", "workloads", any_version=True)
#: Evictions that responders take part in (KEP-4563). Served only if the cluster's gate EvictionRequestAPI is on.
EVICTIONS = Kind("/apis/lifecycle.k8s.io/v1alpha1", "evictions")
#: Dynamic resource allocation: which pods use which devices, and the taints of devices. Watched only if configured.
RESOURCE_CLAIMS = Kind("/apis/resource.k8s.io/v1", "resourceclaims")
RESOURCE_SLICES = Kind("/apis/resource.k8s.io/v1", "resourceslices", namespaced=False)
DEVICE_TAINT_RULES = Kind("/apis/resource.k8s.io/v1", "devicetaintrules", namespaced=False)
DEVICES = frozenset({RESOURCE_CLAIMS, RESOURCE_SLICES, DEVICE_TAINT_RULES})
POLICIES = Kind(_GRACEPOINT, "checkpointpolicies")
CLUSTER_POLICIES = Kind(_GRACEPOINT, "clustercheckpointpolicies", namespaced=False)
PREEMPTIONS = Kind(_GRACEPOINT, "preemptions")
REQUESTS = Kind(_GRACEPOINT, "preemptionrequests")
EVENTS = Kind("/apis/events.k8s.io/v1", "events")
SUBJECT_ACCESS_REVIEWS = Kind("/apis/authorization.k8s.io/v1", "subjectaccessreviews", namespaced=False)
TOKEN_REVIEWS = Kind("/apis/authentication.k8s.io/v1", "tokenreviews", namespaced=False)
LEASES = Kind("/apis/coordination.k8s.io/v1", "leases")
