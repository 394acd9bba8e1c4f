"""``drill``: rehearses a preemption of a running job, waits for its end, and reports it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracepoint_cli.commands.options import (
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
from gracepoint_cli.errors import CommandError, ExitCode
from gracepoint_cli.output import OutputFormat, progress, put, put_data, say

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.drill_report import DrillOutcome

Json = dict[str, Any]
_LOOK_EVERY_S = 0.5
#: The operator adopts a request within a second or two.
_ADOPTED_WITHIN_S = 30.0
#: An end is known this long after the deadline at the latest.
_AFTER_DEADLINE_S = 60.0
#: A process may acknowledge after the commit: acknowledgements are spread, so that large gangs do not send all at once.
_ACKNOWLEDGED_WITHIN_S = 10.0


def drill(
    workload: Annotated[
        str,
        typer.Argument(
            metavar=WORKLOAD, help="A running JobSet, Job or TrainJob: llm, or job/llm.", autocompletion=workload_names
        ),
    ],
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time that the notice leaves for the save.", min=1, max=86400)
    ] = 60.0,
    wait: Annotated[bool, typer.Option(metavar=NO_VALUE, help="Wait for the end, and report it.")] = True,
    namespace: Namespace = None,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
) -> None:
    """Rehearses a preemption: a running job does everything but exit. Waits, and reports how it went.

    Training is interrupted for the time of one save. Exit code 1: nothing was committed, too late, or steps were lost.
    """
    from gracepoint_cli import drill_report
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.naming import parse
    from gracepoint_cli.workloads import find
    from gracepoint_operator.kube.kinds import POLICIES, REQUESTS

    parse(workload)  # before the connection, so that a wrong name is reported even if there is no cluster
    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        where = namespace or cluster.namespace
        job = find(cluster, where, workload)
        policy = job.read().policy
        if reason := drill_report.why_in_vain(job, cluster.find(POLICIES, where, policy) if policy else None):
            raise CommandError(reason)
        asked = cluster.create(REQUESTS, where, drill_report.request(job.type.name, job.name, where, deadline))
        name = asked["metadata"]["name"]
        say(f"Requested the drill {name} with a notice of {deadline:g} s.")
        if not wait:
            if output.is_data:
                put_data(output, {"request": name})
            else:
                put(f"kubectl get preemptionrequest {name} -n {where} -o yaml")
            return
        try:
            with progress(f"The {job.title} rehearses"):
                found = _wait(cluster, asked, deadline)
        except KeyboardInterrupt:
            say(f"Interrupted. The drill goes on; to withdraw it: kubectl delete preemptionrequest {name} -n {where}")
            raise
    if output.is_data:
        put_data(output, found.to_json())
    else:
        _report(found)
    if not found.good:
        raise typer.Exit(ExitCode.BAD)


def _wait(cluster: Cluster, asked: Json, deadline_s: float) -> DrillOutcome:
    """Waits for the end, and says on stderr which stages were reached."""
    from gracepoint_cli import drill_report
    from gracepoint_cli.timeline.stages import STAGES
    from gracepoint_operator.kube.kinds import PREEMPTIONS, REQUESTS

    where, name = asked["metadata"]["namespace"], asked["metadata"]["name"]
    began_s = time.monotonic()
    ended_s: float | None = None
    said: set[str] = set()
    while True:
        request = cluster.get(REQUESTS, where, name, todo="Somebody deleted it, which withdraws the drill")
        adopted = (request.get("status") or {}).get("preemption")
        record = cluster.find(PREEMPTIONS, where, adopted) if adopted else None
        for timing in sorted(((record or {}).get("status") or {}).get("timings") or (), key=lambda t: t["seconds"]):
            if timing["stage"] not in said:
                said.add(timing["stage"])
                say(f"  {timing['seconds']:8.3f} s  {STAGES.get(timing['stage'], timing['stage'])}")
        if (found := drill_report.outcome(request, record)) is not None:
            ended_s = ended_s or time.monotonic()
            if not found.missing or time.monotonic() - ended_s > _ACKNOWLEDGED_WITHIN_S:
                return found
            time.sleep(_LOOK_EVERY_S)
            continue
        waited_s = time.monotonic() - began_s
        phase = ((record or request).get("status") or {}).get("phase")
        if phase is None and adopted is None and waited_s > _ADOPTED_WITHIN_S:
            raise CommandError(
                f"the operator has not answered the request {name} for {_ADOPTED_WITHIN_S:.0f} s",
                "Run: kubectl gracepoint doctor",
            )
        if waited_s > deadline_s + _AFTER_DEADLINE_S:
            raise CommandError(
                f"the drill {name} has no end {_AFTER_DEADLINE_S:.0f} s after its deadline; it is {phase or 'new'}",
                f"Look at: kubectl describe {f'preemption {adopted}' if adopted else f'preemptionrequest {name}'} "
                f"-n {where}",
            )
        time.sleep(_LOOK_EVERY_S)


def _report(found: DrillOutcome) -> None:
    good = "The rehearsal went well" if found.good else "The rehearsal did NOT go well"
    put(f"{good}: {found.phase}. {found.message}".rstrip(), style="green" if found.good else "red")
    lines = {
        "step saved": found.step,
        "steps lost": found.steps_lost,
        "from the request to the commit": None if found.commit_s is None else f"{found.commit_s:.3f} s",
        "to spare before the deadline": None if found.seconds_to_spare is None else f"{found.seconds_to_spare:.1f} s",
        "processes": found.processes,
        "size": None if found.bytes is None else f"{found.bytes / 2**20:,.1f} MiB",
    }
    for name, value in lines.items():
        if value is not None:
            put(f"  {name:32} {value}")
    if found.missing:
        put(f"  did not acknowledge: {', '.join(found.missing)}", style="yellow")
    if found.preemption:
        put(f"To see it drawn: kubectl gracepoint timeline {found.preemption}")
