"""What ``drill`` asks for, and what it reports. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gracepoint.wire.messages import Mode, Phase
from gracepoint.wire.names import API_VERSION, GROUP, LABEL_POLICY
from gracepoint_cli.naming import WorkloadMatch
from gracepoint_operator.resources import PreemptionRequest, RequestPhase
from gracepoint_operator.resources.base import OfWorkload

Json = dict[str, Any]


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


def why_in_vain(job: WorkloadMatch, policy: Json | None) -> str:
    """Returns why a drill of the workload cannot work, and what to do. Empty if nothing speaks against it."""
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
        """Whether a checkpoint was committed, before the deadline, and no step was lost."""
        in_time = self.seconds_to_spare is None or self.seconds_to_spare >= 0
        return self.phase == Phase.COMMITTED and in_time and not self.steps_lost

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


def outcome(asked: Json, record: Json | None) -> DrillOutcome | None:
    """Returns how a drill ended. None if it has not ended.

    Args:
        asked: The request.
        record: The Preemption that was made for it. None if there is none yet.
    """
    status: Mapping[str, Any] = asked.get("status") or {}
    name = asked["metadata"]["name"]
    found: Mapping[str, Any] = (record or {}).get("status") or {}
    phase = found.get("phase")
    if record is None or not (phase and Phase(phase).ended):
        said = status.get("phase")
        # A request without a Preemption ends by itself, for example as Superseded.
        if said and RequestPhase(said).ended and not status.get("preemption"):
            return DrillOutcome(name, "", said, str(status.get("message") or ""))
        return None
    timings = {item["stage"]: float(item["seconds"]) for item in found.get("timings") or ()}
    acknowledgements = found.get("acknowledgements") or {}
    return DrillOutcome(
        request=name,
        preemption=record["metadata"]["name"],
        phase=str(phase),
        message=str(found.get("message") or ""),
        step=found.get("step"),
        steps_lost=found.get("stepsLost"),
        seconds_to_spare=found.get("secondsToSpare"),
        processes=found.get("processes"),
        bytes=found.get("bytes"),
        choice=str(found.get("choice") or ""),
        commit_s=timings.get("committed"),
        missing=tuple(f"{item['pod']} ({item['lags']})" for item in acknowledgements.get("laggards") or ()),
    )
