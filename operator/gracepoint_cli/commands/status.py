"""``status``: the jobs under Gracepoint, their policies, who is connected, and whose save fits its grace period."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gracepoint_cli.commands.options import (
    AllNamespaces,
    As,
    AsGroups,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    RequestTimeout,
    Watch,
)
from gracepoint_cli.errors import CommandError
from gracepoint_cli.output import OutputFormat, put, put_data, put_table, say

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.status_report import JobOverview, PolicyOverview

#: Seconds between two looks at the cluster with ``--watch``.
_WATCH_EVERY_S = 2.0


class _Seen(NamedTuple):
    policies: Sequence[PolicyOverview]
    jobs: Sequence[JobOverview]
    unmade: Sequence[tuple[str, str]]
    refused: Sequence[str]


def status(
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
    watch: Watch = False,
) -> None:
    """Shows jobs and policies: who is connected, and whose save fits its grace period."""
    from gracepoint_cli.cluster import Cluster

    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        where = None if all_namespaces else namespace or cluster.namespace
        shown = None
        while True:
            try:
                seen = _seen(cluster, where)
            except CommandError as error:
                if shown is None:  # nothing was right yet: the arguments may be wrong
                    raise
                say(f"error: {error}")
                seen = shown
            if seen != shown:
                if shown is not None:
                    _put_between(output)
                _show(seen, where, output)
                shown = seen
            if not watch:
                return
            time.sleep(_WATCH_EVERY_S)


def _put_between(output: OutputFormat) -> None:
    """Separates two answers. JSON values need nothing between them."""
    if not output.is_data:
        put()
    elif output is OutputFormat.YAML:
        put("---")


def _seen(cluster: Cluster, where: str | None) -> _Seen:
    from gracepoint.wire.names import LABEL_POLICY
    from gracepoint_cli import status_report
    from gracepoint_cli.workloads import listed, without_workload
    from gracepoint_operator.kube.kinds import PODS, POLICIES, PREEMPTIONS

    policy_bodies = cluster.list(POLICIES, where)
    bodies, refused = listed(cluster, where)
    jobs = status_report.jobs(
        bodies,
        policy_bodies,
        cluster.list(PODS, where, labels=LABEL_POLICY),
        cluster.list(PREEMPTIONS, where),
        now=datetime.datetime.now(datetime.UTC),
        leases=_leases(cluster),
    )
    unmade = without_workload(cluster, where, bodies)
    return _Seen(status_report.policies(policy_bodies), jobs, unmade, refused)


def _show(seen: _Seen, where: str | None, output: OutputFormat) -> None:
    from gracepoint.wire.names import LABEL_POLICY
    from gracepoint_operator.workloads import ANY_NAME

    policies, jobs, unmade, refused = seen
    with_namespace = where is None or output is OutputFormat.WIDE
    for reason in refused:
        say(f"warning: {reason}")
    if output.is_data:
        answer = {"policies": [item.to_json() for item in policies], "workloads": [item.to_json() for item in jobs]}
        put_data(output, answer)
        return
    if not policies and not jobs and not unmade:
        place = "in the cluster" if where is None else f"in the namespace {where!r}"
        put(f"There is no CheckpointPolicy and no {ANY_NAME} with the label {LABEL_POLICY} {place}.")
        put("  To look elsewhere: -n NAMESPACE or -A. To begin: docs/install.md, “The first job”.")
        return
    _put_policies(policies, with_namespace)
    put()
    if jobs:
        _put_jobs(jobs, with_namespace)
    else:
        put(f"No {ANY_NAME} has the label {LABEL_POLICY}.")
    problems = [(f"policy {p.name}", text) for p in policies for text in (*p.problems, *([p.error] if p.error else []))]
    problems += [(job.called, text) for job in jobs for text in job.problems if not job.finished]
    problems += unmade
    if problems:
        put()
        for who, text in problems:
            put(f"{who}: {text}", style="yellow")


def _leases(cluster: Cluster) -> list[dict[str, Any]] | None:
    """Returns the Leases of the operator's replicas. None if this user may not see them."""
    from gracepoint_cli.errors import NotAllowed
    from gracepoint_operator.kube.kinds import LEASES
    from gracepoint_operator.recording.replica_lease import LABEL

    try:
        return cluster.list(LEASES, None, labels=LABEL)
    except NotAllowed:
        return None


def _put_policies(policies: Sequence[PolicyOverview], with_namespace: bool) -> None:
    columns = ["POLICY", "MODE", "JOBS", "READY", "INJECTED", "CONNECTED", "FITSGRACE", "RECORDED"]
    types = ("Ready", "Injected", "Connected", "FitsGrace", "Recorded")
    rows = []
    for item in policies:
        row: list[object] = [item.name, item.mode or "unreadable", item.workloads]
        row += [item.conditions.get(name, "-") for name in types]
        rows.append([item.namespace, *row] if with_namespace else row)
    put_table(["NAMESPACE", *columns] if with_namespace else columns, rows)


def _put_jobs(jobs: Sequence[JobOverview], with_namespace: bool) -> None:
    columns = ["JOB", "POLICY", "MODE", "CONNECTED", "SAVE NEEDS", "GRACE", "FITS", "RESTARTS", "LAST PREEMPTION"]
    rows = []
    for job in jobs:
        connected = "-" if job.connected is None else f"{job.connected} of {job.running}"
        fits = {True: "yes", False: "no", None: "unknown"}[job.fits]
        last = "" if job.last is None else f"{job.last[0]} {job.last[1]}".strip()
        row: list[object] = [
            job.called,
            job.policy,
            job.mode or "-",
            "ended" if job.finished else connected,
            "unknown" if job.needed_s is None else f"{job.needed_s:.1f} s",
            "unknown" if job.grace_s is None else f"{job.grace_s} s",
            fits,
            "-" if job.restarts is None else job.restarts,
            last,
        ]
        rows.append([job.namespace, *row] if with_namespace else row)
    put_table(["NAMESPACE", *columns] if with_namespace else columns, rows)
