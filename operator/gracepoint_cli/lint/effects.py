"""What a preemption would do to a JobSet or a Job, in sentences. Pure."""

from __future__ import annotations

from typing import Any

from gracepoint.wire.messages import Mode
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks.training_jobs import Problems, gang, helpers, is_job

Json = dict[str, Any]


def effects(made: Json, policy: CheckpointPolicy) -> list[str]:
    """Returns the sentences.

    Args:
        made: The workload with everything that the operator fills in.
        policy: Its policy.
    """
    spec, members = policy.spec, gang(made, policy.spec.training, Problems())
    processes = sum(member.processes for member in members)
    names = ", ".join(member.name for member in members if member.name)
    grace_s = min(int(member.template["spec"]["terminationGracePeriodSeconds"]) for member in members)
    said = [f"The gang has {processes} process{'' if processes == 1 else 'es'}{f': {names}' if names else ''}."]
    if helping := ", ".join(helper.name for helper in helpers(made, spec.training)):
        said.append(
            f"Pods of {helping} do not train. Where the end of one would restart the JobSet, its disruption counts as "
            "one of the gang."
        )
    if spec.mode is Mode.OBSERVE:
        return [*said, "The policy has mode Observe: a disruption is recorded, and pods get no notice."]
    head_start_s = spec.deadline.head_start_seconds
    said.append(
        f"On a notice with more than {head_start_s:g} s, training continues until {head_start_s:g} s before the "
        f"deadline, or stops earlier if the predicted save times {spec.deadline.margin:g} is longer. On a shorter "
        "notice, the gang saves at once."
    )
    said.append(
        f"On a SIGTERM without a notice, agreement, save and exit have {grace_s} s, the grace period of the pods. "
        "Then comes SIGKILL."
    )
    if spec.mode is Mode.DRILL:
        return [*said, "The policy has mode Drill: the gang saves, and continues to train until it gets a SIGTERM."]
    if spec.eviction_hold.enabled:
        bound_s = spec.eviction_hold.bound_seconds
        said.append(f"An eviction, for example by kubectl drain, waits for the save, for at most {bound_s} s.")
    codes = spec.after_save
    said.append(f"All processes exit with {codes.saved_exit_code} after the save. {_return(made)}")
    every = [f"{spec.checkpoint.every_steps} steps"] if spec.checkpoint.every_steps else []
    every += [f"{spec.checkpoint.every_seconds} s"] if spec.checkpoint.every_seconds else []
    said.append(
        f"If nothing can be saved in time, they exit with {codes.unsaved_exit_code}, and the job continues from its "
        "newest "
        + (
            f"periodic save (every {' or '.join(every)})."
            if every
            else "emergency save, as there are no periodic saves."
        )
    )
    if spec.exit_breaker.saved_exits:
        said.append(
            f"After {spec.exit_breaker.saved_exits} such exits within {spec.exit_breaker.within_seconds} s it saves "
            "at the next notice and continues to train, until it gets a SIGTERM."
        )
    return said


def _return(made: Json) -> str:
    """Returns how the workload comes back after a save."""
    if is_job(made):
        limit = made["spec"].get("backoffLimitPerIndex")
        return (
            "The Job replaces its pods on other nodes, which does not count towards backoffLimitPerIndex "
            f"({limit}), and continues from that step. Kubernetes waits 10 s before the first replacement, and twice "
            "as long before each next one, up to 10 minutes."
        )
    restarts = (made["spec"].get("failurePolicy") or {}).get("maxRestarts", 0)
    return (
        "The JobSet starts again on other nodes, which does not count towards maxRestarts "
        f"({restarts}), and continues from that step."
    )
