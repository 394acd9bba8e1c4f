"""``doctor``: checks an installation.

From objects of the API: versions, definitions, the operator and where its pods run, webhooks, certificates and
policies. On request also from where a job runs: a pod like those of the job checks the channel and the storage.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from cryptography import x509

from gracepoint.version import __version__
from gracepoint.wire.names import Env
from gracepoint_cli import CommandError, ExitCode
from gracepoint_cli.cluster import called
from gracepoint_cli.options import (
    WORKLOAD,
    As,
    AsGroups,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    RequestTimeout,
    workload_names,
)
from gracepoint_cli.output import OutputFormat, progress, put, put_data, put_table, say
from gracepoint_operator.decisions.waiting import ORDINARY, in_words
from gracepoint_operator.model.preemption_record import kept_policy
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, Training, default_of
from gracepoint_operator.resources.crds import definitions
from gracepoint_operator.webhooks.installation import installed_releases, read_installed_api
from gracepoint_operator.webhooks.training_jobs import Problems, gang
from gracepoint_operator.workloads import BY_NAME

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster

Json = dict[str, Any]
_POD_WITHIN_S = 180.0
_LOOK_EVERY_S = 1.0
_TRIES = 3


def doctor(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar=WORKLOAD,
            help="Also check from a pod like those of this JobSet, Job or TrainJob.",
            autocompletion=workload_names,
        ),
    ] = None,
    namespace: Namespace = None,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
) -> None:
    """Checks the installation: versions, operator, webhooks, certificates, policies.

    With a job, a short-lived pod in its namespace, with its image, volumes and service account, also checks whether
    it reaches the operator, trusts its certificate, and may write where checkpoints go. Exit code 1: a check failed.
    """
    from gracepoint_cli.cluster import Cluster, parse

    if workload is not None:
        parse(workload)  # before the connection, so that a wrong name is reported even if there is no cluster
    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        where = namespace or cluster.namespace
        checks = list(_installation(cluster, where))
        if workload is not None:
            checks += _from_a_pod(cluster, where, workload)
    if output.is_data:
        put_data(output, [check.to_json() for check in checks])
    else:
        put_table(["CHECK", "RESULT", "FOUND"], [[check.name, check.state, check.message] for check in checks])
        if workload is None:
            put()
            put("To check channel and storage from a pod like those of a job: kubectl gracepoint doctor JOB")
    if any(check.state is CheckState.FAILED for check in checks):
        raise typer.Exit(ExitCode.BAD)


def _installation(cluster: Cluster, namespace: str) -> Iterable[CheckResult]:
    from gracepoint_operator.kube.objects import (
        CLUSTER_POLICIES,
        CRDS,
        MUTATING_WEBHOOKS,
        NAMESPACES,
        NODES,
        PODS,
        POLICIES,
        VALIDATING_WEBHOOKS,
        Kind,
        read_labels,
    )
    from gracepoint_operator.resources.crds import definitions
    from gracepoint_operator.webhooks.installation import CRD_NAME

    def version() -> Iterable[CheckResult]:
        return [kubernetes_version(cluster.path("/version"))]

    def own() -> Iterable[CheckResult]:
        names = {name: body["metadata"]["name"] for name, body in definitions().items()}
        return [own_definitions({key: cluster.find(CRDS, None, name) for key, name in names.items()})]

    def jobset() -> Iterable[CheckResult]:
        return [jobset_api(cluster.find(CRDS, None, CRD_NAME))]

    def operator() -> Iterable[CheckResult]:
        labels = "app.kubernetes.io/part-of=gracepoint"
        return check_operator(cluster.list(Kind("/apis/apps/v1", "deployments"), None, labels=labels))

    def placement() -> Iterable[CheckResult]:
        pods = cluster.list(PODS, None, labels="app.kubernetes.io/part-of=gracepoint,helm.sh/chart")
        nodes = {body["metadata"]["name"]: body for body in cluster.list(NODES, None)} if pods else {}
        return check_placement(pods, nodes)

    def webhooks() -> Iterable[CheckResult]:
        rows = [
            {**body, "kind": kind}
            for kind, plural in (
                ("MutatingWebhookConfiguration", MUTATING_WEBHOOKS),
                ("ValidatingWebhookConfiguration", VALIDATING_WEBHOOKS),
            )
            for body in cluster.list(plural, None)
        ]
        return check_webhooks(rows, now=datetime.datetime.now(datetime.UTC))

    def cluster_policies() -> Iterable[CheckResult]:
        policies = cluster.list(CLUSTER_POLICIES, None)
        labels = read_labels(cluster.get(NAMESPACES, None, namespace)["metadata"]) if policies else {}
        return check_cluster_policies(policies, namespace, labels)

    def policies() -> Iterable[CheckResult]:
        return _policies(cluster, namespace)

    def waits() -> Iterable[CheckResult]:
        return check_waits(cluster.list(POLICIES, namespace), time.time())

    named: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "Kubernetes": version,
        "definitions": own,
        "JobSet": jobset,
        "operator": operator,
        "placement": placement,
        "webhooks": webhooks,
        "cluster policies": cluster_policies,
        "policies": policies,
        "waits": waits,
    }
    for name, look in named.items():
        try:
            yield from look()
        except CommandError as error:
            if "does not answer" in str(error):
                raise
            # A user of a namespace may not read objects of the cluster.
            yield CheckResult(name, CheckState.UNKNOWN, str(error))


def _policies(cluster: Cluster, namespace: str) -> Iterable[CheckResult]:
    from gracepoint_cli import status
    from gracepoint_operator.kube.objects import POLICIES

    rows = status.policy_rows(cluster.list(POLICIES, namespace))
    yield from _missing_policies(cluster, namespace)
    if not rows:
        yield CheckResult("policies", CheckState.OK, f"there is none in the namespace {namespace!r}")
    for policy in rows:
        problems = [*([policy.error] if policy.error else []), *policy.problems]
        state = CheckState.FAILED if policy.error or policy.conditions.get("Ready") != "True" else CheckState.WARNING
        if problems:
            yield CheckResult(f"policy {policy.name}", state, "; ".join(problems))
        else:
            yield CheckResult(
                f"policy {policy.name}", CheckState.OK, f"{policy.workloads} job{'s' * (policy.workloads != 1)}"
            )


def _missing_policies(cluster: Cluster, namespace: str) -> Iterable[CheckResult]:
    """Looks for jobs whose policy does not exist, in the whole cluster. In the namespace, if this user may no more."""
    from gracepoint_cli import NotAllowed
    from gracepoint_cli.cluster import listed
    from gracepoint_operator.kube.objects import POLICIES

    where: str | None = None
    try:
        policies = cluster.list(POLICIES, where)
    except NotAllowed:
        where = namespace
        policies = cluster.list(POLICIES, where)
    return missing_policies(listed(cluster, where)[0], policies)


def _from_a_pod(cluster: Cluster, namespace: str, name: str) -> Iterable[CheckResult]:
    from gracepoint_cli.cluster import find
    from gracepoint_operator.kube.objects import PODS, POLICIES
    from gracepoint_operator.resources import CheckpointPolicy, Training

    job = find(cluster, namespace, name)
    policy = job.read().policy
    policy_body = cluster.find(POLICIES, namespace, policy) if policy else None
    try:
        body = make_probe_pod(job.body, CheckpointPolicy.of(policy_body).spec.training if policy_body else Training())
    except ValueError as error:
        return [CheckResult("pod", CheckState.FAILED, str(error))]
    pod = cluster.create(PODS, namespace, body)
    name = pod["metadata"]["name"]
    try:
        with progress(f"The pod {name} checks channel and storage"):
            began_s = time.monotonic()
            while not ended(pod):
                if time.monotonic() - began_s > _POD_WITHIN_S:
                    reason = waits_for(pod) or (pod.get("status") or {}).get("phase", "")
                    text = f"the pod {name} did not end within {_POD_WITHIN_S:.0f} s: {reason}"
                    return [CheckResult("pod", CheckState.FAILED, text)]
                time.sleep(_LOOK_EVERY_S)
                pod = cluster.get(PODS, namespace, name, todo="Somebody deleted the pod of the check")
        return list(results(pod))
    finally:
        _delete(cluster, namespace, name)


def _delete(cluster: Cluster, namespace: str, name: str) -> None:
    from gracepoint_operator.kube.objects import PODS

    for _ in range(_TRIES):
        try:
            if (remaining := cluster.find(PODS, namespace, name)) is not None:
                cluster.delete(PODS, remaining)
            return
        except CommandError as error:  # the kubelet may have written the pod in between
            reason = error
    say(f"The pod {name} could not be deleted ({reason}); it ends by itself.")


class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # it works, and somebody should look at it
    FAILED = "FAILED"
    UNKNOWN = "unknown"  # this user may not see what the check needs


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What a check says.

    Attributes:
        name: What was checked.
        message: What was found, and what to do.
    """

    name: str
    state: CheckState
    message: str

    def to_json(self) -> dict[str, str]:
        """Returns the check as JSON."""
        return {"name": self.name, "state": str(self.state), "message": self.message}


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
    version_text = str(version.get("gitVersion", "?"))
    numbers = re.match(r"v?(\d+)\.(\d+)", version_text)
    if numbers is None:
        return CheckResult(
            "Kubernetes", CheckState.WARNING, f"found the version {version_text!r}, which cannot be read"
        )
    if (int(numbers[1]), int(numbers[2])) < _OLDEST:
        text = f"found {version_text}, expected {'.'.join(map(str, _OLDEST))} or newer"
        return CheckResult("Kubernetes", CheckState.FAILED, text)
    return CheckResult("Kubernetes", CheckState.OK, version_text)


def own_definitions(crds: Mapping[str, Json | None]) -> CheckResult:
    """Checks Gracepoint's own CRDs. ``crds``: each by its file name (see ``definitions``). None: not found."""
    differ = []
    for name, definition in definitions().items():
        installed = crds.get(name)
        if installed is None:
            return CheckResult(
                "definitions",
                CheckState.FAILED,
                f"found no {definition['metadata']['name']}: install the chart (charts/gracepoint), or apply crds/",
            )
        if _fields(installed) != _fields(definition):
            differ.append(str(definition["metadata"]["name"]))
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
        installed = read_installed_api(crd)
    except LookupError as error:
        return CheckResult("JobSet", CheckState.FAILED, str(error))
    if installed.missing:
        return CheckResult(
            "JobSet", CheckState.FAILED, f"found no {', no '.join(installed.missing)}: upgrade JobSet to v0.10 or newer"
        )
    if installed.warning is not None:
        return CheckResult("JobSet", CheckState.WARNING, installed.warning)
    return CheckResult("JobSet", CheckState.OK, "has all that a restart after a save needs")


def check_operator(deployments: Sequence[Json]) -> list[CheckResult]:
    """Checks the operator's Deployments."""
    if not deployments:
        text = "found no Deployment: helm install gracepoint charts/gracepoint"
        return [CheckResult("operator", CheckState.FAILED, text)]
    checks = []
    for body in deployments:
        meta, status = body["metadata"], body.get("status") or {}
        name = f"{meta['namespace']}/{meta['name']}"
        replicas, ready = int(body["spec"].get("replicas", 1)), int(status.get("readyReplicas") or 0)
        version = (meta.get("labels") or {}).get("app.kubernetes.io/version", "")
        if ready == 0:
            hint = f"kubectl -n {meta['namespace']} describe pods -l app.kubernetes.io/name=gracepoint"
            text = f"{name}: none of {replicas} replicas is ready. Look at: {hint}"
            checks.append(CheckResult("operator", CheckState.FAILED, text))
        elif ready < replicas:
            text = f"{name}: {ready} of {replicas} replicas are ready"
            checks.append(CheckResult("operator", CheckState.WARNING, text))
        else:
            checks.append(CheckResult("operator", CheckState.OK, f"{name}: {ready} of {replicas} replicas are ready"))
        if version != __version__:
            text = f"{name} has version {version or 'unknown'}, and this command {__version__}"
            checks.append(CheckResult("versions", CheckState.WARNING, text))
        else:
            checks.append(CheckResult("versions", CheckState.OK, f"operator, library and this command: {__version__}"))
    return checks


def check_placement(pods: Sequence[Json], nodes: Mapping[str, Json]) -> list[CheckResult]:
    """Checks that not all of the operator's pods stand on machines of which they have to notify others that they end.

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
    places = {pod: (node, _why_it_goes_away(nodes.get(node) or {})) for pod, node in placed.items()}
    ending = "; ".join(f"{pod} on {node} ({reason})" for pod, (node, reason) in sorted(places.items()) if reason)
    if all(reason for _, reason in places.values()):
        todo = "Set nodeSelector or affinity of the chart, or add other nodes"
        text = f"{ending}: if these machines end together, no job is notified. {todo}"
        return [CheckResult("placement", CheckState.WARNING, text)]
    if ending:
        return [CheckResult("placement", CheckState.OK, f"a replica stands on a machine that stays; not so {ending}")]
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


def check_webhooks(configurations: Sequence[Json], *, now: datetime.datetime) -> list[CheckResult]:
    """Checks the webhook configurations of the cluster, and the authorities that they trust."""
    by_name = {
        webhook["name"]: (body["metadata"]["name"], webhook)
        for body in configurations
        for webhook in body.get("webhooks") or ()
    }
    missing = [f"{name} ({cost})" for name, cost in _WEBHOOKS.items() if name not in by_name]
    if missing:
        text = f"found no {', no '.join(missing)}. Install or upgrade the chart"
        return [CheckResult("webhooks", CheckState.FAILED, text)]
    checks = [CheckResult("webhooks", CheckState.OK, f"{len(_WEBHOOKS)} are configured"), *_releases(configurations)]
    first = by_name["jobsets.gracepoint.dev"][0]
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
                title = f"{webhook['name']} ({body['metadata']['name']})" if several else webhook["name"]
                checks.append(_authorities(title, (webhook.get("clientConfig") or {}).get("caBundle"), now))
    return checks


def _releases(configurations: Sequence[Json]) -> list[CheckResult]:
    """Finds releases that answer for the same namespaces."""
    checks = []
    for one, other in itertools.combinations(installed_releases(configurations), 2):
        if shared := one.shares(other.namespaces):
            text = (
                f"{one.configuration} and {other.configuration} answer for {shared}, and a pod listens to only one of "
                "the two. Remove one (helm uninstall), or give each separate watchNamespaces"
            )
            checks.append(CheckResult("releases", CheckState.FAILED, text))
    return checks


def missing_policies(workloads: Iterable[Json], policies: Iterable[Json]) -> Iterable[CheckResult]:
    """Points out unfinished jobs that name a policy that does not exist. ``workloads``: each with its kind."""
    existing = {(body["metadata"]["namespace"], body["metadata"]["name"]) for body in policies}
    users: dict[tuple[str, str], list[str]] = {}
    unkept: set[tuple[str, str]] = set()
    for body in workloads:
        try:
            workload = BY_NAME[body["kind"]].read(body)
        except Unreadable:
            continue  # ``status`` says so
        key = (workload.namespace, workload.policy)
        if key not in existing and not (workload.finished or workload.deleted):
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


def check_waits(policies: Iterable[Json], now: float) -> Iterable[CheckResult]:
    """Looks for jobs that wait to start. ``now``: seconds since the epoch."""
    for body in policies:
        try:
            entries = CheckpointPolicy.of(body).status.waits or ()
        except Unreadable:
            continue  # another check says so
        for entry in entries:
            is_ordinary = all(wait.kind in ORDINARY for wait in entry.waits)
            state = CheckState.OK if is_ordinary else CheckState.WARNING
            awaited = "; ".join(in_words(wait, now) for wait in entry.waits)
            yield CheckResult(called(entry.kind, entry.name), state, f"waits for: {awaited}")


def _authorities(name: str, bundle: str | None, now: datetime.datetime) -> CheckResult:
    title = f"certificate authority of {name}"
    if not bundle:
        text = "found none: the operator has not started, or may not write the configuration. See its log"
        return CheckResult(title, CheckState.FAILED, text)
    try:
        certificates = x509.load_pem_x509_certificates(base64.b64decode(bundle))
    except ValueError as error:
        return CheckResult(title, CheckState.FAILED, f"cannot be read: {error}")
    expires = max(certificate.not_valid_after_utc for certificate in certificates)
    left_days = (expires - now).total_seconds() / 86400
    if left_days < 0:
        text = f"expired {-left_days:.0f} days ago. See docs/operations.md, “Certificates”"
        return CheckResult(title, CheckState.FAILED, text)
    state = CheckState.OK if left_days >= _SOON_DAYS else CheckState.WARNING
    return CheckResult(title, state, f"valid for {left_days:.0f} days")


def check_cluster_policies(bodies: Sequence[Json], namespace: str, labels: Mapping[str, str]) -> list[CheckResult]:
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


_LIVES_S = 120
_NO_CONTAINER = "it has no container that ended"
#: The result if the pod was ended in the middle of a check.
_LATE = (
    f"was not done after {_LIVES_S} s. The next check waits for something that does not answer: the storage, its "
    "metadata server, or the start of the container"
)
_MESSAGE = "/dev/termination-log"
#: Fields of the pod that decide where it may run and what it may reach.
_POD_FIELDS = (
    "affinity",
    "dnsConfig",
    "dnsPolicy",
    "hostNetwork",
    "imagePullSecrets",
    "nodeSelector",
    "runtimeClassName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
)
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "envFrom", "securityContext", "volumeMounts")
_KIND_OF_WORKLOAD = "app.kubernetes.io/component"


def make_probe_pod(workload: Json, training: Training) -> Json:
    """Returns a pod like those of a stored JobSet or Job, which checks channel and storage from where the job runs.

    It has the image, the volumes, the service account and the variables of the job's pods, and none of their labels, so
    that neither a controller nor the operator takes it for one of the gang. It asks for no accelerator. It writes its
    result as the container's termination message, which is read from its status.

    Raises:
        ValueError: No pods of the workload form a gang under its policy. The message says why.
    """
    problems = Problems()
    members = gang(json.loads(json.dumps(workload)), training, problems)
    if not members:
        raise ValueError("; ".join(problems))
    meta, member = workload["metadata"], members[0]
    pod, container = member.template["spec"], member.container
    values = {Env.JOBSET_NAME: meta["name"], Env.JOBSET_UID: meta.get("uid", "")}
    environment = []
    for variable in container.get("env") or ():
        if variable["name"] in values:
            variable = {"name": variable["name"], "value": values[variable["name"]]}
        elif "metadata.labels" in json.dumps(variable.get("valueFrom") or {}):
            variable = {"name": variable["name"], "value": "0"}
        environment.append(variable)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{meta['name'][:40]}-doctor-",
            "namespace": meta["namespace"],
            "labels": {"app.kubernetes.io/part-of": "gracepoint", _KIND_OF_WORKLOAD: "doctor"},
        },
        "spec": {
            **{name: pod[name] for name in _POD_FIELDS if name in pod},
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIVES_S,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": pod.get("automountServiceAccountToken", True),
            "containers": [
                {
                    **{name: container[name] for name in _CONTAINER_FIELDS if name in container},
                    "name": "doctor",
                    "command": ["python3", "-m", "gracepoint", "check", f"--json={_MESSAGE}"],
                    "env": [*environment, {"name": "JAX_PLATFORMS", "value": "cpu"}],
                    "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
                }
            ],
        },
    }


def ended(pod: Json) -> bool:
    """Returns whether the pod has come to its end."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def waits_for(pod: Json) -> str:
    """Returns what a pod that does not run waits for. Empty if it does not say."""
    status = pod.get("status") or {}
    for item in status.get("containerStatuses") or ():
        if waiting := (item.get("state") or {}).get("waiting"):
            return f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            return str(condition.get("message") or "a node")
    return ""


def results(pod: Json) -> Sequence[CheckResult]:
    """Returns what the pod has found."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    late = f"the pod {name} {_LATE}" if status.get("reason") == "DeadlineExceeded" else ""
    for item in status.get("containerStatuses") or ():
        terminated = (item.get("state") or {}).get("terminated") or {}
        try:
            checks = [
                CheckResult(f"pod: {check['name']}", CheckState(check["state"]), str(check["message"]))
                for check in json.loads(terminated.get("message") or "")
            ]
        except (ValueError, KeyError, TypeError):
            text = late or (
                f"the pod {name} ended with exit code {terminated.get('exitCode')} and no result. The image needs "
                "python3 and this version of the library (python3 -m gracepoint check)"
            )
            return [CheckResult("pod", CheckState.FAILED, text)]
        return [*checks, *([CheckResult("pod", CheckState.FAILED, late)] if late else [])]
    return [CheckResult("pod", CheckState.FAILED, late or f"the pod {name}: {status.get('message') or _NO_CONTAINER}")]
