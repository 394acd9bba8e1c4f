"""A training job at one moment, as the API server shows it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from demo.forms import JOBSET, Form

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
        form: What kind of workload it is.
        workload: The workload. None if there is none.
        pods: Its pods of all attempts, sorted by attempt and process.
        preemptions: Its Preemption objects, by epoch.
        unix_s: When it was taken.
    """

    form: Form
    workload: Json | None
    pods: tuple[Pod, ...]
    preemptions: tuple[Json, ...]
    unix_s: float

    @staticmethod
    def of(items: Iterable[Json], name: str, *, unix_s: float, form: Form = JOBSET) -> Snapshot:
        """Reads a listing of workloads, pods and Preemptions. Leaves out what is not of the workload ``name``."""
        every = list(items)
        workloads = [i for i in every if i["kind"] == form.kind and i["metadata"]["name"] == name]
        pods = [_pod(i, form) for i in every if i["kind"] == "Pod" and _labels(i).get(form.name_label) == name]
        preemptions = [i for i in every if i["kind"] == "Preemption" and i["spec"]["jobSet"]["name"] == name]
        return Snapshot(
            form=form,
            workload=workloads[0] if workloads else None,
            pods=tuple(sorted(pods, key=lambda pod: (pod.attempt, pod.process))),
            preemptions=tuple(sorted(preemptions, key=lambda item: int(item["spec"]["epoch"]))),
            unix_s=unix_s,
        )

    @property
    def end(self) -> str | None:
        """``Completed`` or ``Failed``; None while the workload runs."""
        return self.form.end(self._status)

    @property
    def restarts(self) -> int:
        """How often the workload was restarted."""
        if "restarts" in self._status:
            return int(self._status["restarts"])
        return max((pod.attempt for pod in self.pods), default=0)

    @property
    def restarts_counted(self) -> int:
        """How many of the restarts count towards the workload's limit."""
        return self.form.counted(self._status)

    @property
    def _status(self) -> Json:
        status: Json = (self.workload or {}).get("status", {})
        return status

    def running(self) -> tuple[Pod, ...]:
        """The pods of the newest attempt, if all of its processes run."""
        newest = [pod for pod in self.pods if pod.attempt == self.restarts and pod.phase == "Running"]
        return tuple(newest) if len(newest) == PROCESSES else ()

    def describe(self) -> str:
        """The run in a few words, for messages."""
        pods = ", ".join(f"{pod.name} {pod.phase} on {pod.node or 'no node'}" for pod in self.pods) or "no pods"
        end = f", {self.end}" if self.end else ""
        return f"{self.form.kind} {'exists' if self.workload else 'is gone'}{end}, restarts {self.restarts}, {pods}"


def _labels(item: Json) -> Json:
    labels: Json = item["metadata"].get("labels", {})
    return labels


def _pod(item: Json, form: Form) -> Pod:
    statuses = item.get("status", {}).get("containerStatuses") or [{}]
    ended = statuses[0].get("state", {}).get("terminated")
    return Pod(
        name=item["metadata"]["name"],
        node=item["spec"].get("nodeName", ""),
        phase=item.get("status", {}).get("phase", "Pending"),
        attempt=form.attempt(item["metadata"]),
        process=int(_labels(item).get(_COMPLETION_INDEX, 0)),
        exit_code=ended.get("exitCode") if ended else None,
    )
