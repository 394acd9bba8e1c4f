"""A training job at one moment, as the API server shows it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from gracepoint.wire import names

#: Of each run.
PROCESSES = 2
_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pod:
    """A trainer, as the API server shows it."""

    name: str
    node: str
    phase: str
    attempt: int
    process: int
    exit_code: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that the API server knows of a run at one moment.

    Attributes:
        jobset: The JobSet; None if there is none.
        pods: Its pods of all attempts, sorted by attempt and process.
        preemptions: Its Preemption objects, by epoch.
        unix_s: When it was taken.
    """

    jobset: Json | None
    pods: tuple[Pod, ...]
    preemptions: tuple[Json, ...]
    unix_s: float

    @staticmethod
    def of(items: Iterable[Json], name: str, *, unix_s: float) -> Snapshot:
        """Reads a listing of JobSets, pods and Preemptions; what is not of the JobSet ``name`` is left out."""
        every = list(items)
        jobsets = [i for i in every if i["kind"] == "JobSet" and i["metadata"]["name"] == name]
        pods = [_pod(i) for i in every if i["kind"] == "Pod" and _labels(i).get(names.JOBSET_LABEL_NAME) == name]
        asked = [i for i in every if i["kind"] == "Preemption" and i["spec"]["jobSet"]["name"] == name]
        preemptions = [i for i in asked if "epoch" in i["spec"]]  # the others are requests
        return Snapshot(
            jobset=jobsets[0] if jobsets else None,
            pods=tuple(sorted(pods, key=lambda pod: (pod.attempt, pod.process))),
            preemptions=tuple(sorted(preemptions, key=lambda item: int(item["spec"]["epoch"]))),
            unix_s=unix_s,
        )

    @property
    def end(self) -> str | None:
        """``Completed`` or ``Failed``; None while the JobSet runs."""
        return (self.jobset or {}).get("status", {}).get("terminalState") or None

    @property
    def restarts(self) -> int:
        """How often the JobSet was restarted."""
        return int((self.jobset or {}).get("status", {}).get("restarts", 0))

    @property
    def restarts_counted(self) -> int:
        """How many of the restarts count towards maxRestarts."""
        return int((self.jobset or {}).get("status", {}).get("restartsCountTowardsMax", 0))

    def running(self) -> tuple[Pod, ...]:
        """The pods of the newest attempt, if all of its processes run."""
        newest = [pod for pod in self.pods if pod.attempt == self.restarts and pod.phase == "Running"]
        return tuple(newest) if len(newest) == PROCESSES else ()

    def describe(self) -> str:
        """The run in a few words, for messages."""
        pods = ", ".join(f"{pod.name} {pod.phase} on {pod.node or 'no node'}" for pod in self.pods) or "no pods"
        end = f", {self.end}" if self.end else ""
        return f"JobSet {'exists' if self.jobset else 'is gone'}{end}, restarts {self.restarts}, {pods}"


def _labels(item: Json) -> Json:
    labels: Json = item["metadata"].get("labels", {})
    return labels


def _pod(item: Json) -> Pod:
    statuses = item.get("status", {}).get("containerStatuses") or [{}]
    ended = statuses[0].get("state", {}).get("terminated")
    return Pod(
        name=item["metadata"]["name"],
        node=item["spec"].get("nodeName", ""),
        phase=item.get("status", {}).get("phase", "Pending"),
        attempt=int(_labels(item).get(names.JOBSET_LABEL_RESTART_ATTEMPT, 0)),
        process=int(_labels(item).get(_COMPLETION_INDEX, 0)),
        exit_code=ended.get("exitCode") if ended else None,
    )
