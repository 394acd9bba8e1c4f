"""Restarts in place (JobSet 0.11, KEP-467) are for crashes: after a save the gang still leaves its nodes. Pure.

With the restart strategy InPlaceRestart, a container that fails restarts in its pod, by a rule of the container. An
agent of JobSet in each pod then restarts the other pods of the JobSet in the same way, and lets all of them begin
together. Jobs do not fail by that, so JobSet requires the highest backoff limit.

The release contract stays as it is. An exit with one of the policy's codes, or a disruption, fails the Job, and JobSet
makes new pods as with the strategy Recreate. So the gang leaves a node that goes away, and stays where it is otherwise.
"""

from __future__ import annotations

from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob
from gracepoint_operator.workloads import pod_ends

STRATEGY = pod_ends.IN_PLACE
#: JobSet's webhook requires this backoff limit.
BACKOFF_LIMIT = 2**31 - 1
#: Variables that JobSet's agent needs, and the one by which it starts the training itself.
_AGENT_NEEDS = {"JOBSET_NAME", "POD_NAME"}
_WORKER_COMMAND = "WORKER_COMMAND"
_ALL_CONTAINERS = "RestartAllContainers"
_RESTARTS = ("Restart", _ALL_CONTAINERS)


def restarts_in_place(jobset: Json) -> bool:
    """Returns whether the JobSet has the restart strategy InPlaceRestart."""
    return pod_ends.restarts_in_place(jobset.get("spec", {}))


def in_place_is_possible(member: TrainingJob) -> bool:
    """Returns whether the pods of a member have what a restart in place needs: JobSet's agent, and a rule."""
    containers = _containers(member)
    has_agent = any(_variables(container) >= _AGENT_NEEDS for container in containers)
    return has_agent and any(rule.get("action") in _RESTARTS for rule in _rules(containers))


def restarts_all_containers(member: TrainingJob) -> bool:
    """Returns whether a restart in place ends all containers of the pod, and not only the one that has failed."""
    return any(rule.get("action") == _ALL_CONTAINERS for rule in _rules(_containers(member)))


def agent_starts_training(member: TrainingJob) -> bool:
    """Returns whether JobSet's agent is the process of the training container, and the training its child."""
    return _variables(member.container) >= {*_AGENT_NEEDS, _WORKER_COMMAND}


def allow_restarts_in_place(member: TrainingJob, problems: Problems) -> None:
    """Fills in what JobSet requires of the Jobs of such a JobSet, or adds what contradicts it to ``problems``."""
    job = member.job
    if job.get("backoffLimit") is None:
        job["backoffLimit"] = BACKOFF_LIMIT
    elif job["backoffLimit"] != BACKOFF_LIMIT:
        problems.add(
            f"{member.path}.backoffLimit",
            found=job["backoffLimit"],
            expected=f"{BACKOFF_LIMIT}, which JobSet requires with the restart strategy {STRATEGY}",
            fix="Remove it",
        )
    # JobSet requires these to be written, even if they are the default.
    if job.get("podReplacementPolicy") is None:
        job["podReplacementPolicy"] = "Failed"
    if job.get("parallelism") is None and job.get("completions") is None:
        job["parallelism"] = job["completions"] = 1


def _containers(member: TrainingJob) -> list[Json]:
    pod = member.template["spec"]
    return [*(pod.get("initContainers") or []), *(pod.get("containers") or [])]


def _rules(containers: list[Json]) -> list[Json]:
    return [rule for container in containers for rule in container.get("restartPolicyRules") or []]


def _variables(container: Json) -> set[str]:
    return {variable.get("name", "") for variable in container.get("env") or []}
