"""``drill``: rehearses a preemption of a running job, waits for its end, and reports it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracepoint.wire.messages import Mode, Phase
from gracepoint.wire.names import API_VERSION, GROUP, LABEL_POLICY
from gracepoint_cli import CommandError, ExitCode
from gracepoint_cli.cluster import WorkloadMatch
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
from gracepoint_cli.output import OutputFormat, progress, put, put_data, say
from gracepoint_operator.resources import PreemptionRequest, RequestPhase
from gracepoint_operator.resources.base import OfWorkload

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster

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
    from gracepoint_cli.cluster import Cluster, find, parse
    from gracepoint_operator.kube.objects import POLICIES, REQUESTS

    parse(workload)  # before the connection, so that a wrong name is reported even if there is no cluster
    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        where = namespace or cluster.namespace
        job = find(cluster, where, workload)
        policy = job.read().policy
        if reason := why_no_drill(job, cluster.find(POLICIES, where, policy) if policy else None):
            raise CommandError(reason)
        created = cluster.create(REQUESTS, where, request(job.type.name, job.name, where, deadline))
        name = created["metadata"]["name"]
        say(f"Requested the drill {name} with a notice of {deadline:g} s.")
        if not wait:
            if output.is_data:
                put_data(output, {"request": name})
            else:
                put(f"kubectl get preemptionrequest {name} -n {where} -o yaml")
            return
        try:
            with progress(f"The {job.title} rehearses"):
                result = _wait(cluster, created, deadline)
        except KeyboardInterrupt:
            say(f"Interrupted. The drill continues; to withdraw it: kubectl delete preemptionrequest {name} -n {where}")
            raise
    if output.is_data:
        put_data(output, result.to_json())
    else:
        _report(result)
    if not result.good:
        raise typer.Exit(ExitCode.BAD)


def _wait(cluster: Cluster, created: Json, deadline_s: float) -> DrillOutcome:
    """Waits for the end, and says on stderr which stages were reached."""
    from gracepoint_cli.timeline import STAGES
    from gracepoint_operator.kube.objects import PREEMPTIONS, REQUESTS

    where, name = created["metadata"]["namespace"], created["metadata"]["name"]
    began_s = time.monotonic()
    ended_s: float | None = None
    shown_stages: set[str] = set()
    while True:
        request = cluster.get(REQUESTS, where, name, todo="Somebody deleted it, which withdraws the drill")
        adopted = (request.get("status") or {}).get("preemption")
        record = cluster.find(PREEMPTIONS, where, adopted) if adopted else None
        for timing in sorted(((record or {}).get("status") or {}).get("timings") or (), key=lambda t: t["seconds"]):
            if timing["stage"] not in shown_stages:
                shown_stages.add(timing["stage"])
                say(f"  {timing['seconds']:8.3f} s  {STAGES.get(timing['stage'], timing['stage'])}")
        if (result := outcome(request, record)) is not None:
            ended_s = ended_s or time.monotonic()
            if not result.missing or time.monotonic() - ended_s > _ACKNOWLEDGED_WITHIN_S:
                return result
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


def _report(result: DrillOutcome) -> None:
    good = "The rehearsal went well" if result.good else "The rehearsal did NOT go well"
    put(f"{good}: {result.phase}. {result.message}".rstrip(), style="green" if result.good else "red")
    lines = {
        "step saved": result.step,
        "steps lost": result.steps_lost,
        "from the request to the commit": None if result.commit_s is None else f"{result.commit_s:.3f} s",
        "to spare before the deadline": None if result.seconds_to_spare is None else f"{result.seconds_to_spare:.1f} s",
        "processes": result.processes,
        "size": None if result.bytes is None else f"{result.bytes / 2**20:,.1f} MiB",
    }
    for name, value in lines.items():
        if value is not None:
            put(f"  {name:32} {value}")
    if result.missing:
        put(f"  did not acknowledge: {', '.join(result.missing)}", style="yellow")
    if result.preemption:
        put(f"To see it drawn: kubectl gracepoint timeline {result.preemption}")


def request(kind: str, name: str, namespace: str, deadline_s: float) -> Json:
    """Returns the PreemptionRequest for a drill of a workload."""
    named = OfWorkload.named(kind)
    reference = {"name": name} if named is None else {"kind": named, "name": name}
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": PreemptionRequest.kind_name,
        "metadata": {"generateName": f"{name[:200]}-drill-", "namespace": namespace},
        "spec": {"jobSet": reference, "mode": str(Mode.DRILL), "deadlineSeconds": deadline_s},
    }


def why_no_drill(job: WorkloadMatch, policy: Json | None) -> str:
    """Returns why a drill of the workload cannot work, and what to do. Empty if it can work."""
    workload, title = job.read(), job.title
    label = workload.policy
    if not label:
        return f"the {title} has no label {LABEL_POLICY}: create it again with the label"
    if policy is None:
        return f"the {title} names the CheckpointPolicy {label!r}, which does not exist in its namespace: create it"
    if (policy.get("spec") or {}).get("mode") == Mode.OBSERVE:
        return f"the CheckpointPolicy {label!r} has mode Observe, in which pods get no notice: set spec.mode to Drill"
    if workload.finished:
        return f"the {title} has ended: rehearse with one that runs"
    if workload.deleted:
        return f"the {title} is being deleted: rehearse with one that runs"
    if (job.body.get("spec") or {}).get("suspend"):
        return f"the {title} is suspended: rehearse when it runs"
    if not workload.injected:
        return f"the {title} was created before its policy or label, so its pods get no notice: create it again"
    return ""


@dataclasses.dataclass(frozen=True)
class DrillOutcome:
    """How a drill ended.

    Attributes:
        request: Name of the request.
        preemption: Name of the record. Empty if there is none.
        phase: The final phase of the record, or of the request if there is no record.
        message: Description of the phase.
        step: The training step that was saved. None if none was.
        steps_lost: Number of completed steps that are not in the checkpoint. None if that is not known.
        seconds_to_spare: Seconds between the commit and the deadline. Negative if the commit came later.
        processes: Number of processes that took part. None if that is not known.
        bytes: Number of bytes written by all processes together. None if that is not known.
        choice: How the processes used the time that was left, for example SaveNow. Empty if they did not report it.
        commit_s: Seconds from the request to the commit. None if nothing was committed.
        missing: Pods that have not acknowledged the notice, each with the reason.
    """

    request: str
    preemption: str
    phase: str
    message: str
    step: int | None = None
    steps_lost: int | None = None
    seconds_to_spare: float | None = None
    processes: int | None = None
    bytes: int | None = None
    choice: str = ""
    commit_s: float | None = None
    missing: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether the step was committed or is safe in memory, before the deadline, and no step was lost."""
        in_time = self.seconds_to_spare is None or self.seconds_to_spare >= 0
        return self.phase in (Phase.EVACUATED, Phase.COMMITTED) and in_time and not self.steps_lost

    def to_json(self) -> Json:
        """Returns the outcome as JSON with names as in Kubernetes."""
        return {
            "good": self.good,
            "request": self.request,
            "preemption": self.preemption or None,
            "phase": self.phase,
            "message": self.message,
            "step": self.step,
            "stepsLost": self.steps_lost,
            "secondsToSpare": self.seconds_to_spare,
            "secondsToCommit": self.commit_s,
            "processes": self.processes,
            "bytes": self.bytes,
            "choice": self.choice or None,
            "notAcknowledged": list(self.missing),
        }


def outcome(request: Json, record: Json | None) -> DrillOutcome | None:
    """Returns how a drill ended. None if it has not ended.

    Args:
        request: The request.
        record: The Preemption that was made for it. None if there is none yet.
    """
    status: Mapping[str, Any] = request.get("status") or {}
    name = request["metadata"]["name"]
    record_status: Mapping[str, Any] = (record or {}).get("status") or {}
    phase = record_status.get("phase")
    if record is None or not (phase and Phase(phase).ended):
        request_phase = status.get("phase")
        # A request without a Preemption ends by itself, for example as Superseded.
        if request_phase and RequestPhase(request_phase).ended and not status.get("preemption"):
            return DrillOutcome(name, "", request_phase, str(status.get("message") or ""))
        return None
    timings = {item["stage"]: float(item["seconds"]) for item in record_status.get("timings") or ()}
    acknowledgements = record_status.get("acknowledgements") or {}
    return DrillOutcome(
        request=name,
        preemption=record["metadata"]["name"],
        phase=str(phase),
        message=str(record_status.get("message") or ""),
        step=record_status.get("step"),
        steps_lost=record_status.get("stepsLost"),
        seconds_to_spare=record_status.get("secondsToSpare"),
        processes=record_status.get("processes"),
        bytes=record_status.get("bytes"),
        choice=str(record_status.get("choice") or ""),
        commit_s=timings.get("committed"),
        missing=tuple(f"{item['pod']} ({item['lags']})" for item in acknowledgements.get("laggards") or ()),
    )
