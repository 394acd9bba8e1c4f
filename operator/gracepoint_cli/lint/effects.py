"""What a preemption would do to a JobSet, in sentences. Pure."""

from __future__ import annotations

from typing import Any

from gracepoint.wire.messages import Mode
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks.training_jobs import Problems, gang

Json = dict[str, Any]


def effects(made: Json, policy: CheckpointPolicy) -> list[str]:
    """Returns the sentences.

    Args:
        made: The JobSet with everything that the operator fills in.
        policy: Its policy.
    """
    spec, members = policy.spec, gang(made, policy.spec.training, Problems())
    processes = sum(member.processes for member in members)
    names = ", ".join(member.name for member in members)
    grace_s = min(int(member.template["spec"]["terminationGracePeriodSeconds"]) for member in members)
    said = [f"The gang has {processes} process{'' if processes == 1 else 'es'}: {names}."]
    if spec.mode is Mode.OBSERVE:
        return [*said, "The policy has mode Observe: a disruption is recorded, and pods get no notice."]
    head_start_s = spec.deadline.head_start_seconds
    said.append(
        f"On a notice with more than {head_start_s:g} s, training goes on until {head_start_s:g} s before the "
        "deadline, or "
        f"earlier if the predicted save times {spec.deadline.margin:g} is longer. On a shorter one, the gang saves "
        "at once."
    )
    said.append(
        f"On a SIGTERM without a notice, agreement, save and exit have {grace_s} s, the grace period of the pods. "
        "Then comes SIGKILL."
    )
    if spec.mode is Mode.DRILL:
        return [*said, "The policy has mode Drill: the gang saves, and continues to train until it gets a SIGTERM."]
    if spec.eviction_hold.enabled:
        said.append(f"An eviction, as of kubectl drain, waits for the save up to {spec.eviction_hold.bound_seconds} s.")
    codes = spec.after_save
    restarts = (made["spec"].get("failurePolicy") or {}).get("maxRestarts", 0)
    said.append(
        f"All processes exit with {codes.saved_exit_code} after the save. The JobSet starts again on other nodes, "
        "which does "
        f"not count towards maxRestarts ({restarts}), and continues from that step."
    )
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
            "at the next "
            "notice and stays, until it gets a SIGTERM."
        )
    return said
