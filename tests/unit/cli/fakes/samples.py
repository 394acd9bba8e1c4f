"""Objects that several tests of the command line read."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

STAGES = {
    "noticeSent": 0.01,
    "firstAck": 0.02,
    "lastAck": 0.05,
    "frozen": 0.1,
    "agreed": 0.11,
    "drained": 0.2,
    "written": 0.4,
    "durable": 0.41,
    "committed": 0.5,
    "exited": 2.5,
    "unblocked": 3.5,
    "podsBack": 4.0,
    "started": 3.9,
    "attaching": 4.3,
    "joined": 4.6,
    "restored": 5.0,
    "compiled": 7.0,
    "training": 9.0,
}


def preemption(stages: dict[str, float] | None = None, **status: Any) -> Json:
    timings = [{"stage": name, "seconds": value} for name, value in (STAGES if stages is None else stages).items()]
    return {
        "metadata": {"name": "llm-12345678-1", "namespace": "team"},
        "spec": {
            "epoch": 1,
            "jobSet": {"name": "llm", "uid": "u"},
            "cause": "SpotTermination",
            "signal": "taint cloud.google.com/impending-node-termination:NoSchedule",
            "mode": "Enforce",
            "nodes": ["gke-spot-7"],
            "observedAt": "2026-03-01T12:00:00.250000Z",
            "deadline": "2026-03-01T12:00:15.250000Z",
        },
        "status": {
            "phase": "Committed",
            "step": 93,
            "stepsLost": 0,
            "secondsToSpare": 14.5,
            "restoredStep": 93,
            "timings": timings,
            **status,
        },
    }


def pod(
    index: int, attempt: int = 0, *, started: str | None = None, ended: str | None = None, numbered: bool = True
) -> Json:
    """A pod of the gang. ``numbered``: as JobSet labels it; a Job by itself counts its failures."""
    state: Json = {}
    if ended is not None:
        state = {"terminated": {"startedAt": started, "finishedAt": ended, "exitCode": 77}}
    elif started is not None:
        state = {"running": {"startedAt": started}}
    return {
        "metadata": {
            "name": f"llm-workers-0-{index}-{attempt}",
            "creationTimestamp": "2026-03-01T11:59:00Z" if attempt == 0 else "2026-03-01T12:00:03Z",
            "annotations": {} if numbered else {"batch.kubernetes.io/job-index-ignored-failure-count": str(attempt)},
            "labels": {
                **({"jobset.sigs.k8s.io/restart-attempt": str(attempt)} if numbered else {}),
                "batch.kubernetes.io/job-completion-index": str(index),
            },
        },
        "spec": {"nodeName": f"node-{index}"},
        "status": {"phase": "Running", "containerStatuses": [{"state": state}]},
    }
