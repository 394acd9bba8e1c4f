"""Checks of an installation, from objects of the API server. Pure; the time is passed in."""

from __future__ import annotations

import base64
import datetime
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cryptography import x509

from gracepoint.version import __version__
from gracepoint_cli.doctor.checks import CheckResult, CheckState
from gracepoint_cli.naming import called
from gracepoint_operator.model.kept_policies import kept_policy
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import ClusterCheckpointPolicy, default_of
from gracepoint_operator.resources.crds import definitions
from gracepoint_operator.webhooks.contracts.installed_api import read_installed_api
from gracepoint_operator.webhooks.releases import installed_releases
from gracepoint_operator.workloads import BY_NAME

Json = dict[str, Any]

_OLDEST = (1, 30)
#: Webhooks by name, and what is missing without each.
_WEBHOOKS = {
    "jobsets.gracepoint.dev": "JobSets are not prepared at their creation",
    "jobs.gracepoint.dev": "Jobs are not prepared at their creation",
    "jobsets-without-policy.gracepoint.dev": "JobSets that name no policy do not get the default",
    "jobs-without-policy.gracepoint.dev": "Jobs that name no policy do not get the default",
    "trainjobs.gracepoint.dev": "the JobSets of TrainJobs do not get the label",
    "pods.gracepoint.dev": "restarted pods do not avoid nodes that go away",
    "evictions.gracepoint.dev": "kubectl drain does not wait for the save",
    "preemptionrequests.gracepoint.dev": "nothing limits the number of requests in a namespace",
    "policies.gracepoint.dev": "nobody is warned who deletes a policy that jobs use",
}
#: Labels of nodes that go away or have accelerators, with the values that say so. None: any value. The chart's replicas
#: prefer other nodes by the same labels.
GOING_AWAY: dict[str, str | None] = {
    "cloud.google.com/gke-spot": None,
    "cloud.google.com/gke-preemptible": None,
    "cloud.google.com/gke-tpu-accelerator": None,
    "cloud.google.com/gke-accelerator": None,
    "nvidia.com/gpu.present": None,
    "kubernetes.azure.com/scalesetpriority": None,
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
}
_ACCELERATORS = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu")
_JOBSETS_OWN = "jobset-mutating-webhook-configuration"
_SOON_DAYS = 7
_NAMED = 5


def kubernetes_version(version: Mapping[str, Any]) -> CheckResult:
    """Checks the answer of ``/version``."""
    found = str(version.get("gitVersion", "?"))
    numbers = re.match(r"v?(\d+)\.(\d+)", found)
    if numbers is None:
        return CheckResult("Kubernetes", CheckState.WARNING, f"found the version {found!r}, which cannot be read")
    if (int(numbers[1]), int(numbers[2])) < _OLDEST:
        text = f"found {found}, expected {'.'.join(map(str, _OLDEST))} or newer"
        return CheckResult("Kubernetes", CheckState.FAILED, text)
    return CheckResult("Kubernetes", CheckState.OK, found)


def own_definitions(crds: Mapping[str, Json | None]) -> CheckResult:
    """Checks Gracepoint's own CRDs. ``crds``: each by its file name (see ``definitions``). None: not found."""
    differ = []
    for name, wanted in definitions().items():
        found = crds.get(name)
        if found is None:
            return CheckResult(
                "definitions",
                CheckState.FAILED,
                f"found no {wanted['metadata']['name']}: install the chart (charts/gracepoint), or apply crds/",
            )
        if _fields(found) != _fields(wanted):
            differ.append(str(wanted["metadata"]["name"]))
    if differ:
        return CheckResult(
            "definitions",
            CheckState.WARNING,
            f"{', '.join(differ)}: the fields are not those of version {__version__}, the version of this command. "
            "Upgrade the chart, or this command",
        )
    return CheckResult("definitions", CheckState.OK, f"those of version {__version__}")


def _fields(crd: Json) -> set[str]:
    """Returns the paths of all fields in the schemas of the definition's versions."""

    def walk(node: Mapping[str, Any], path: str) -> Iterable[str]:
        for name, child in (node.get("properties") or {}).items():
            yield f"{path}.{name}"
            yield from walk(child, f"{path}.{name}")
        if isinstance(node.get("items"), dict):
            yield from walk(node["items"], f"{path}[]")

    versions = crd["spec"]["versions"]
    return {path for item in versions for path in walk(item["schema"]["openAPIV3Schema"], item["name"])}


def jobset_api(crd: Json | None) -> CheckResult:
    """Checks the definition of JobSets."""
    if crd is None:
        text = "found no definition of JobSets: only Jobs can be used. For JobSets and TrainJobs, install JobSet v0.10"
        return CheckResult("JobSet", CheckState.WARNING, f"{text} or newer")
    try:
        found = read_installed_api(crd)
    except LookupError as error:
        return CheckResult("JobSet", CheckState.FAILED, str(error))
    if found.missing:
        return CheckResult(
            "JobSet", CheckState.FAILED, f"found no {', no '.join(found.missing)}: upgrade JobSet to v0.10 or newer"
        )
    if found.warning is not None:
        return CheckResult("JobSet", CheckState.WARNING, found.warning)
    return CheckResult("JobSet", CheckState.OK, "has all that a restart after a save needs")


def operator(deployments: Sequence[Json]) -> list[CheckResult]:
    """Checks the operator's Deployments."""
    if not deployments:
        text = "found no Deployment: helm install gracepoint charts/gracepoint"
        return [CheckResult("operator", CheckState.FAILED, text)]
    checks = []
    for body in deployments:
        meta, status = body["metadata"], body.get("status") or {}
        name = f"{meta['namespace']}/{meta['name']}"
        wanted, ready = int(body["spec"].get("replicas", 1)), int(status.get("readyReplicas") or 0)
        version = (meta.get("labels") or {}).get("app.kubernetes.io/version", "")
        if ready == 0:
            why = f"kubectl -n {meta['namespace']} describe pods -l app.kubernetes.io/name=gracepoint"
            text = f"{name}: none of {wanted} replicas is ready. Look at: {why}"
            checks.append(CheckResult("operator", CheckState.FAILED, text))
        elif ready < wanted:
            text = f"{name}: {ready} of {wanted} replicas are ready"
            checks.append(CheckResult("operator", CheckState.WARNING, text))
        else:
            checks.append(CheckResult("operator", CheckState.OK, f"{name}: {ready} of {wanted} replicas are ready"))
        if version != __version__:
            text = f"{name} has version {version or 'unknown'}, and this command {__version__}"
            checks.append(CheckResult("versions", CheckState.WARNING, text))
        else:
            checks.append(CheckResult("versions", CheckState.OK, f"operator, library and this command: {__version__}"))
    return checks


def placement(pods: Sequence[Json], nodes: Mapping[str, Json]) -> list[CheckResult]:
    """Checks that not all of the operator's pods stand on machines of which they have to tell that they end.

    Args:
        pods: Those of the operator.
        nodes: All nodes, by name.
    """
    placed = {
        str(pod["metadata"]["name"]): str(pod["spec"]["nodeName"])
        for pod in pods
        if pod["spec"].get("nodeName") and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    }
    if not placed:
        return []
    found = {pod: (node, _why_it_goes_away(nodes.get(node) or {})) for pod, node in placed.items()}
    told = "; ".join(f"{pod} on {node} ({why})" for pod, (node, why) in sorted(found.items()) if why)
    if all(why for _, why in found.values()):
        todo = "Set nodeSelector or affinity of the chart, or add other nodes"
        text = f"{told}: if these machines end together, no job is told. {todo}"
        return [CheckResult("placement", CheckState.WARNING, text)]
    if told:
        return [CheckResult("placement", CheckState.OK, f"a replica stands on a machine that stays; not so {told}")]
    return [CheckResult("placement", CheckState.OK, "the replicas stand on machines that stay")]


def _why_it_goes_away(node: Json) -> str:
    """The label, taint or resource that says so. Empty: none does."""
    labels = (node.get("metadata") or {}).get("labels") or {}
    for key, value in GOING_AWAY.items():
        if key in labels and value in (None, labels[key]):
            return f"{key}={labels[key]}"
    taints = {taint["key"] for taint in (node.get("spec") or {}).get("taints") or ()}
    capacity = (node.get("status") or {}).get("capacity") or {}
    for resource in _ACCELERATORS:
        if resource in taints or str(capacity.get(resource, "0")) != "0":
            return resource
    return ""


def webhooks(configurations: Sequence[Json], *, now: datetime.datetime) -> list[CheckResult]:
    """Checks the webhook configurations of the cluster, and the authorities that they trust."""
    found = {
        webhook["name"]: (body["metadata"]["name"], webhook)
        for body in configurations
        for webhook in body.get("webhooks") or ()
    }
    missing = [f"{name} ({cost})" for name, cost in _WEBHOOKS.items() if name not in found]
    if missing:
        text = f"found no {', no '.join(missing)}. Install or upgrade the chart"
        return [CheckResult("webhooks", CheckState.FAILED, text)]
    checks = [CheckResult("webhooks", CheckState.OK, f"{len(_WEBHOOKS)} are configured"), *_releases(configurations)]
    first = found["jobsets.gracepoint.dev"][0]
    names = [
        body["metadata"]["name"] for body in configurations if body.get("kind") != "ValidatingWebhookConfiguration"
    ]
    if _JOBSETS_OWN in names and first > _JOBSETS_OWN:
        text = f"{first} comes after {_JOBSETS_OWN}: JobSets without restartPolicy: Never are refused. Rename it"
        checks.append(CheckResult("webhooks", CheckState.WARNING, text))
    several = len(installed_releases(configurations)) > 1
    for body in configurations:
        for webhook in body.get("webhooks") or ():
            if webhook["name"] in _WEBHOOKS:
                what = f"{webhook['name']} ({body['metadata']['name']})" if several else webhook["name"]
                checks.append(_authorities(what, (webhook.get("clientConfig") or {}).get("caBundle"), now))
    return checks


def _releases(configurations: Sequence[Json]) -> list[CheckResult]:
    """Finds releases that answer for the same namespaces."""
    checks = []
    for one, other in itertools.combinations(installed_releases(configurations), 2):
        if shared := one.shares(other.namespaces):
            text = (
                f"{one.configuration} and {other.configuration} answer for {shared}, and a pod listens to only one of "
                "the two. Remove one (helm uninstall), or give each watchNamespaces of its own"
            )
            checks.append(CheckResult("releases", CheckState.FAILED, text))
    return checks


def missing_policies(workloads: Iterable[Json], policies: Iterable[Json]) -> Iterable[CheckResult]:
    """Points out jobs that go on and name a policy that does not exist. ``workloads``: each with its kind."""
    known = {(body["metadata"]["namespace"], body["metadata"]["name"]) for body in policies}
    users: dict[tuple[str, str], list[str]] = {}
    unkept: set[tuple[str, str]] = set()
    for body in workloads:
        try:
            workload = BY_NAME[body["kind"]].read(body)
        except Unreadable:
            continue  # ``status`` says so
        key = (workload.namespace, workload.policy)
        if key not in known and not (workload.finished or workload.deleted):
            users.setdefault(key, []).append(called(workload.kind, workload.name))
            if kept_policy(workload, ()) is None:
                unkept.add(key)
    for (namespace, name), jobs in sorted(users.items()):
        more = f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
        text = (
            f"it does not exist in the namespace {namespace!r}, and {', '.join(sorted(jobs)[:_NAMED])}{more} name it: "
            "they keep the settings that they were created with, and new ones are refused. "
        )
        if (namespace, name) in unkept:
            text += (
                "To those that an older version prepared, disruptions are announced only if they have a Preemption. "
            )
        text += "Create it again, or correct the label"
        yield CheckResult(f"policy {name}", CheckState.WARNING, text)


def _authorities(name: str, bundle: str | None, now: datetime.datetime) -> CheckResult:
    what = f"certificate authority of {name}"
    if not bundle:
        text = "found none: the operator has not started, or may not write the configuration. See its log"
        return CheckResult(what, CheckState.FAILED, text)
    try:
        certificates = x509.load_pem_x509_certificates(base64.b64decode(bundle))
    except ValueError as error:
        return CheckResult(what, CheckState.FAILED, f"cannot be read: {error}")
    last = max(certificate.not_valid_after_utc for certificate in certificates)
    left_days = (last - now).total_seconds() / 86400
    if left_days < 0:
        text = f"expired {-left_days:.0f} days ago. See docs/operations.md, “Certificates”"
        return CheckResult(what, CheckState.FAILED, text)
    state = CheckState.OK if left_days >= _SOON_DAYS else CheckState.WARNING
    return CheckResult(what, state, f"valid for {left_days:.0f} days")


def cluster_policies(bodies: Sequence[Json], namespace: str, labels: Mapping[str, str]) -> list[CheckResult]:
    """Checks the ClusterCheckpointPolicies: which default and which limits a namespace with these labels has."""
    read, checks = [], []
    for body in bodies:
        try:
            read.append(ClusterCheckpointPolicy.of(body))
        except Unreadable as error:
            name = str(body["metadata"]["name"])
            checks.append(CheckResult(f"cluster policy {name}", CheckState.FAILED, f"cannot be used: {error}"))
    for policy in read:
        if policy.spec.limits.protection is False and policy.selects(labels):
            text = f"pods in {namespace} are not protected from autoscalers (spec.limits.protection is false)"
            checks.append(CheckResult(f"cluster policy {policy.name}", CheckState.OK, text))
        if policy.spec.limits.longest_hold_seconds == 0:
            selector = policy.spec.namespace_selector.to_json()
            where = f"in the namespaces that {selector} selects" if any(selector.values()) else "in any namespace"
            text = f"no eviction is held {where} (spec.limits.longestHoldSeconds is 0). When the incident is over: "
            text += f"kubectl delete clustercheckpointpolicy {policy.name}, or raise it"
            checks.append(CheckResult(f"cluster policy {policy.name}", CheckState.WARNING, text))
    default = default_of(read, labels)
    if default is not None:
        text = f"{default.name}, for JobSets and Indexed Jobs that name no policy"
        others = sorted(p.name for p in read if p.spec.default is not None and p.selects(labels) and p is not default)
        text += f"; it comes before {', '.join(others)}, by its name" if others else ""
        checks.append(CheckResult(f"default policy of {namespace}", CheckState.OK, text))
    limits = {p.name: p.spec.limits.longest_hold_seconds for p in read if p.selects(labels)}
    held = {name: seconds for name, seconds in limits.items() if seconds}
    if held and not any(seconds == 0 for seconds in limits.values()):
        name = min(held, key=lambda item: held[item])
        text = f"evictions are held for {held[name]} s at most (ClusterCheckpointPolicy {name})"
        checks.append(CheckResult(f"limits of {namespace}", CheckState.OK, text))
    return checks
