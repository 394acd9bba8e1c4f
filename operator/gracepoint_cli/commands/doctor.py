"""``doctor``: checks an installation, and from a pod like a job's the channel and the storage."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracepoint_cli.commands.options import (
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
from gracepoint_cli.errors import CommandError, ExitCode
from gracepoint_cli.output import OutputFormat, progress, put, put_data, put_table, say

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.doctor.checks import CheckResult

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
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.doctor.checks import CheckState
    from gracepoint_cli.naming import parse

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
    from gracepoint_cli.doctor import installation
    from gracepoint_cli.doctor.checks import CheckResult, CheckState
    from gracepoint_operator.kube.fields import read_labels
    from gracepoint_operator.kube.kinds import (
        CLUSTER_POLICIES,
        CRDS,
        MUTATING_WEBHOOKS,
        NAMESPACES,
        NODES,
        PODS,
        VALIDATING_WEBHOOKS,
        Kind,
    )
    from gracepoint_operator.resources.crds import definitions
    from gracepoint_operator.webhooks.contracts.installed_api import CRD_NAME

    def version() -> Iterable[CheckResult]:
        return [installation.kubernetes_version(cluster.path("/version"))]

    def own() -> Iterable[CheckResult]:
        names = {name: body["metadata"]["name"] for name, body in definitions().items()}
        return [installation.own_definitions({key: cluster.find(CRDS, None, name) for key, name in names.items()})]

    def jobset() -> Iterable[CheckResult]:
        return [installation.jobset_api(cluster.find(CRDS, None, CRD_NAME))]

    def operator() -> Iterable[CheckResult]:
        labels = "app.kubernetes.io/part-of=gracepoint"
        return installation.operator(cluster.list(Kind("/apis/apps/v1", "deployments"), None, labels=labels))

    def placement() -> Iterable[CheckResult]:
        pods = cluster.list(PODS, None, labels="app.kubernetes.io/part-of=gracepoint,helm.sh/chart")
        nodes = {body["metadata"]["name"]: body for body in cluster.list(NODES, None)} if pods else {}
        return installation.placement(pods, nodes)

    def webhooks() -> Iterable[CheckResult]:
        found = [
            {**body, "kind": kind}
            for kind, plural in (
                ("MutatingWebhookConfiguration", MUTATING_WEBHOOKS),
                ("ValidatingWebhookConfiguration", VALIDATING_WEBHOOKS),
            )
            for body in cluster.list(plural, None)
        ]
        return installation.webhooks(found, now=datetime.datetime.now(datetime.UTC))

    def cluster_policies() -> Iterable[CheckResult]:
        found = cluster.list(CLUSTER_POLICIES, None)
        labels = read_labels(cluster.get(NAMESPACES, None, namespace)["metadata"]) if found else {}
        return installation.cluster_policies(found, namespace, labels)

    def policies() -> Iterable[CheckResult]:
        return _policies(cluster, namespace)

    named: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "Kubernetes": version,
        "definitions": own,
        "JobSet": jobset,
        "operator": operator,
        "placement": placement,
        "webhooks": webhooks,
        "cluster policies": cluster_policies,
        "policies": policies,
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
    from gracepoint_cli import status_report
    from gracepoint_cli.doctor.checks import CheckResult, CheckState
    from gracepoint_operator.kube.kinds import POLICIES

    found = status_report.policies(cluster.list(POLICIES, namespace))
    yield from _missing_policies(cluster, namespace)
    if not found:
        yield CheckResult("policies", CheckState.OK, f"there is none in the namespace {namespace!r}")
    for policy in found:
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
    from gracepoint_cli.doctor import installation
    from gracepoint_cli.errors import NotAllowed
    from gracepoint_cli.workloads import listed
    from gracepoint_operator.kube.kinds import POLICIES

    where: str | None = None
    try:
        policies = cluster.list(POLICIES, where)
    except NotAllowed:
        where = namespace
        policies = cluster.list(POLICIES, where)
    return installation.missing_policies(listed(cluster, where)[0], policies)


def _from_a_pod(cluster: Cluster, namespace: str, name: str) -> Iterable[CheckResult]:
    from gracepoint_cli.doctor import probe_pod
    from gracepoint_cli.doctor.checks import CheckResult, CheckState
    from gracepoint_cli.workloads import find
    from gracepoint_operator.kube.kinds import PODS, POLICIES
    from gracepoint_operator.resources import CheckpointPolicy, Training

    job = find(cluster, namespace, name)
    policy = job.read().policy
    found = cluster.find(POLICIES, namespace, policy) if policy else None
    try:
        body = probe_pod.probe_pod(job.body, CheckpointPolicy.of(found).spec.training if found else Training())
    except ValueError as error:
        return [CheckResult("pod", CheckState.FAILED, str(error))]
    pod = cluster.create(PODS, namespace, body)
    name = pod["metadata"]["name"]
    try:
        with progress(f"The pod {name} checks channel and storage"):
            began_s = time.monotonic()
            while not probe_pod.ended(pod):
                if time.monotonic() - began_s > _POD_WITHIN_S:
                    why = probe_pod.waits_for(pod) or (pod.get("status") or {}).get("phase", "")
                    text = f"the pod {name} did not end within {_POD_WITHIN_S:.0f} s: {why}"
                    return [CheckResult("pod", CheckState.FAILED, text)]
                time.sleep(_LOOK_EVERY_S)
                pod = cluster.get(PODS, namespace, name, todo="Somebody deleted the pod of the check")
        return list(probe_pod.results(pod))
    finally:
        _delete(cluster, namespace, name)


def _delete(cluster: Cluster, namespace: str, name: str) -> None:
    from gracepoint_operator.kube.kinds import PODS

    for _ in range(_TRIES):
        try:
            if (left := cluster.find(PODS, namespace, name)) is not None:
                cluster.delete(PODS, left)
            return
        except CommandError as error:  # the kubelet may have written the pod in between
            why = error
    say(f"The pod {name} could not be deleted ({why}); it ends by itself.")
