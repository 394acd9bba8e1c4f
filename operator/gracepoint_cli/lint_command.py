"""``lint``: checks a job, of a file or of the cluster, and says what a preemption would do to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gracepoint_cli import CommandError, ExitCode
from gracepoint_cli.options import (
    NO_VALUE,
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
from gracepoint_cli.output import OutputFormat, put, put_data, say

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.lint.job_checks import LintReport
    from gracepoint_operator.resources import CheckpointPolicy

Json = dict[str, Any]
_T = TypeVar("_T")
#: Which cluster is asked, as whom and with which limit: the arguments of ``Cluster``.
_Asked = tuple[str | None, str | None, str | None, float | None, list[str] | None]
#: The cluster that is asked for what a file lacks. None: no cluster is asked.
_Reached = _Asked | None
_STYLES = {"error": "red", "warning": "yellow", "info": "cyan"}


def lint(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar=f"FILE|{WORKLOAD}...",
            help="Files of manifests, - for stdin, or JobSets, Jobs or TrainJobs of the cluster.",
            autocompletion=workload_names,
        ),
    ],
    strict: Annotated[
        bool, typer.Option("--strict", metavar=NO_VALUE, help="Warnings also end with exit code 1.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", metavar=NO_VALUE, help="Do not ask a cluster for what a file lacks.")
    ] = False,
    namespace: Namespace = None,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
) -> None:
    """Checks a JobSet, Job or TrainJob before a preemption does, and says what a preemption would do to it."""
    from gracepoint_cli.lint.manifests import to_check
    from gracepoint_cli.lint.pods import Severity

    reached = (kubeconfig, context, as_user, request_timeout, as_groups)
    names = dict.fromkeys(what)
    files = {name: _objects(name) for name in names if _is_file(name)}
    documents = [item for items in files.values() for item in items]
    workloads = to_check(files)
    reports = []
    for name in names:
        if name in files:
            reports += _of_file(workloads[name], name, documents, namespace, None if offline else reached)
        else:
            reports += _of_cluster(name, namespace, reached)
    if output.is_data:
        put_data(output, [report.to_json() for report in reports])
    else:
        for report in reports:
            _put(report)
    bad = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    if any(report.worst() in bad for report in reports):
        raise typer.Exit(ExitCode.BAD)


def _is_file(name: str) -> bool:
    return name == "-" or Path(name).exists() or name.endswith((".yaml", ".yml", ".json"))


def _objects(name: str) -> list[Json]:
    """Returns the objects of a file."""
    from gracepoint_cli.lint.manifests import objects

    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"cannot read {name}: {error}") from error
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}") from error
    return objects(text, name)


def _of_cluster(name: str, namespace: str | None, reached: _Asked) -> list[LintReport]:
    from gracepoint_cli.cluster import Cluster, applied_policy, find, parse
    from gracepoint_cli.lint.job_checks import check

    parse(name)  # before the connection, so that a wrong name is reported even if there is no cluster
    try:
        connected = Cluster(*reached)
    except CommandError as error:
        raise CommandError(f"there is no file {name!r}, and {error}", error.todo, error.code) from error
    with connected as cluster:
        where = namespace or cluster.namespace
        job = find(cluster, where, name, todo="For a file, give its path")
        named = job.read().policy
        policy = applied_policy(cluster, where, named) if named else None
        return [check(job.body, policy, _claims(cluster, where), maker=job.maker)]


def _of_file(
    workloads: list[Json], name: str, items: list[Json], namespace: str | None, reached: _Reached
) -> list[LintReport]:
    """Checks the workloads of a file. ``items``: the objects of all files that were given."""
    from gracepoint_cli.lint import manifests
    from gracepoint_cli.lint.job_checks import report
    from gracepoint_cli.lint.manifests import named

    reports = []
    for body in workloads:
        where = namespace or (body.get("metadata") or {}).get("namespace")
        if body["kind"] != manifests.KIND:
            reports.append(_checked(body, name, items, where, reached))
            continue
        kind, runtime_name = manifests.runtime_of(body)
        runtime = named(items, kind, runtime_name) or _ask(
            reached, where, f"{kind} {runtime_name!r}", _runtime(kind, runtime_name)
        )
        try:
            jobset = manifests.jobset_of(body, runtime)
        except manifests.NotMade as error:
            reports.append(report(body, [error.finding], kind=manifests.KIND))
        else:
            reports.append(_checked(jobset, name, items, where, reached, maker=manifests.KIND))
    return reports


def _checked(
    workload: Json, file: str, items: list[Json], namespace: str | None, reached: _Reached, *, maker: str = ""
) -> LintReport:
    """Checks a workload of a file with the policy and the claims of the files, or else of the cluster."""
    from gracepoint.wire.names import LABEL_POLICY
    from gracepoint_cli.cluster import applied_policy
    from gracepoint_cli.lint.job_checks import check
    from gracepoint_cli.lint.manifests import named, of_kind
    from gracepoint_operator.read_errors import Unreadable
    from gracepoint_operator.resources import CheckpointPolicy

    policy_name = ((workload.get("metadata") or {}).get("labels") or {}).get(LABEL_POLICY)
    body = named(items, "CheckpointPolicy", policy_name) if policy_name is not None else None
    claims = {item["metadata"]["name"]: item for item in of_kind(items, "PersistentVolumeClaim")}
    if body is None and (policy_name is not None or (reached is not None and _may_get_default(workload))):

        def look(cluster: Cluster, where: str) -> tuple[CheckpointPolicy | None, dict[str, Json]]:
            return applied_policy(cluster, where, policy_name), _claims(cluster, where)

        subject = "default policy" if policy_name is None else f"CheckpointPolicy {policy_name!r}"
        policy, more = _ask(reached, namespace, subject, look) or (None, {})
        return check(workload, policy, {**more, **claims}, maker=maker)
    try:
        policy = None if body is None else CheckpointPolicy.of(body)
    except Unreadable as error:
        raise CommandError(f"{file}: {error}", code=ExitCode.BAD) from error
    return check(workload, policy, claims, maker=maker)


def _may_get_default(workload: Json) -> bool:
    """True if the webhook gives the default policy of its namespace to a workload that names none."""
    from gracepoint.wire.names import LABEL_DEFAULT

    labels = (workload.get("metadata") or {}).get("labels") or {}
    indexed = workload["kind"] != "Job" or (workload.get("spec") or {}).get("completionMode") == "Indexed"
    return indexed and labels.get(LABEL_DEFAULT) != "off"


def _ask(reached: _Reached, namespace: str | None, subject: str, look: Callable[[Cluster, str], _T]) -> _T | None:
    """Asks the cluster for what the files lack. It is no error if there is no cluster."""
    from gracepoint_cli.cluster import Cluster

    if reached is None:
        return None
    try:
        with Cluster(*reached) as cluster:
            return look(cluster, namespace or cluster.namespace)
    except CommandError as error:
        say(f"The {subject} is in no file, and it cannot be looked up: {error}")
        return None


def _runtime(kind: str, name: str) -> Callable[[Cluster, str], Json | None]:
    def look(cluster: Cluster, namespace: str) -> Json | None:
        from gracepoint_cli.lint import manifests

        if (place := manifests.RUNTIMES.get(kind)) is None:
            return None
        return cluster.find(place, None if kind.startswith("Cluster") else namespace, name)

    return look


def _claims(cluster: Cluster, namespace: str) -> dict[str, Json]:
    from gracepoint_operator.kube.objects import Kind

    return {
        body["metadata"]["name"]: body for body in cluster.list(Kind("/api/v1", "persistentvolumeclaims"), namespace)
    }


def _put(report: LintReport) -> None:
    put(f"{report.kind} {report.name}" + (f" (paths: {report.paths_of})" if report.paths_of else ""), style="bold")
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
