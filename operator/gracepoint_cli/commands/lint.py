"""``lint``: checks a JobSet, of a file or of the cluster, and says what a preemption would do to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracepoint_cli.commands.options import Context, Kubeconfig, Namespace, Output, jobset_names
from gracepoint_cli.errors import CommandError, ExitCode
from gracepoint_cli.output import Format, put, put_json, say

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.lint.jobsets import Report
    from gracepoint_operator.resources import CheckpointPolicy

Json = dict[str, Any]
_STYLES = {"error": "red", "warning": "yellow", "info": "cyan"}


def lint(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|JOBSET", help="A file of manifests, - for stdin, or a JobSet.", autocompletion=jobset_names
        ),
    ],
    strict: Annotated[bool, typer.Option("--strict", help="Warnings also end with exit code 1.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask a cluster for what a file lacks.")] = False,
    namespace: Namespace = None,
    output: Output = Format.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Checks a JobSet before a preemption does, and says what a preemption would do to it."""
    from gracepoint_cli.lint.findings import Severity

    if what == "-" or Path(what).exists() or what.endswith((".yaml", ".yml", ".json")):
        reports = _of_file(what, namespace, None if offline else (kubeconfig, context))
    else:
        reports = _of_cluster(what, namespace, kubeconfig, context)
    if output is Format.JSON:
        put_json([report.to_json() for report in reports])
    else:
        for report in reports:
            _put(report)
    bad = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    if any(report.worst() in bad for report in reports):
        raise typer.Exit(ExitCode.BAD)


def _of_cluster(name: str, namespace: str | None, kubeconfig: str | None, context: str | None) -> list[Report]:
    from gracepoint.wire.names import LABEL_POLICY
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.lint.jobsets import check
    from gracepoint_operator.workloads.jobset import JOBSETS

    with Cluster(kubeconfig, context) as cluster:
        where = namespace or cluster.namespace
        jobset = cluster.get(JOBSETS, where, name, todo="For a file, give its path")
        policy = _policy_of(cluster, where, (jobset["metadata"].get("labels") or {}).get(LABEL_POLICY))
        return [check(jobset, policy, _claims(cluster, where))]


def _of_file(name: str, namespace: str | None, reached: tuple[str | None, str | None] | None) -> list[Report]:
    from gracepoint.wire.names import LABEL_POLICY
    from gracepoint_cli.lint.jobsets import check
    from gracepoint_cli.lint.manifests import objects, of_kind
    from gracepoint_operator.resources import CheckpointPolicy
    from gracepoint_operator.unreadable import Unreadable

    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {name}: {error}") from error
    items = objects(text, name)
    jobsets = of_kind(items, "JobSet")
    policies = {}
    for body in of_kind(items, "CheckpointPolicy"):
        try:
            policies[body["metadata"]["name"]] = CheckpointPolicy.of(body)
        except Unreadable as error:
            raise CommandError(f"{name}: {error}", code=ExitCode.BAD) from error
    if not jobsets:
        kinds = ", ".join(sorted({str(item.get("kind")) for item in items})) or "nothing"
        raise CommandError(
            f"{name}: found {kinds}, expected a JobSet",
            "For a TrainJob, lint the JobSet that it makes: kubectl gracepoint lint NAME",
            ExitCode.BAD,
        )
    claims = {body["metadata"]["name"]: body for body in of_kind(items, "PersistentVolumeClaim")}
    reports = []
    for jobset in jobsets:
        meta = jobset.get("metadata") or {}
        wanted = (meta.get("labels") or {}).get(LABEL_POLICY)
        policy, known = policies.get(wanted), claims
        if reached is not None and wanted is not None and policy is None:
            policy, more = _ask(reached, namespace or meta.get("namespace"), wanted)
            known = {**more, **claims}
        reports.append(check(jobset, policy, known))
    return reports


def _ask(
    reached: tuple[str | None, str | None], namespace: str | None, policy: str
) -> tuple[CheckpointPolicy | None, dict[str, Json]]:
    """Asks the cluster for what the file lacks. It is no error if there is no cluster."""
    from gracepoint_cli.cluster import Cluster

    try:
        with Cluster(*reached) as cluster:
            where = namespace or cluster.namespace
            return _policy_of(cluster, where, policy), _claims(cluster, where)
    except CommandError as error:
        say(f"The CheckpointPolicy {policy!r} is not in the file, and there is no cluster to ask: {error}")
        return None, {}


def _policy_of(cluster: Cluster, namespace: str, name: str | None) -> CheckpointPolicy | None:
    from gracepoint_operator.kube.kinds import POLICIES
    from gracepoint_operator.resources import CheckpointPolicy
    from gracepoint_operator.unreadable import Unreadable

    body = cluster.find(POLICIES, namespace, name) if name else None
    try:
        return None if body is None else CheckpointPolicy.of(body)
    except Unreadable as error:
        raise CommandError(f"the CheckpointPolicy {name!r} cannot be used: {error}", code=ExitCode.BAD) from error


def _claims(cluster: Cluster, namespace: str) -> dict[str, Json]:
    from gracepoint_operator.kube.kinds import Kind

    return {
        body["metadata"]["name"]: body for body in cluster.list(Kind("/api/v1", "persistentvolumeclaims"), namespace)
    }


def _put(report: Report) -> None:
    put(f"JobSet {report.name}", style="bold")
    for finding in report.findings:
        put(f"  {finding.severity:7}  {finding.rule}", style=_STYLES[finding.severity])
        put(f"           {finding.path}: {finding.message}." if finding.path else f"           {finding.message}.")
    if not report.findings:
        put("  nothing found", style="green")
    if report.effects:
        put("  What a preemption would do:", style="bold")
        for sentence in report.effects:
            put(f"  - {sentence}")
    put()
