"""The timeline of a Preemption, from the objects of the API. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from gracepoint.wire.names import JOBSET_LABEL_JOB_INDEX, JOBSET_LABEL_RESTART_ATTEMPT
from gracepoint_cli.timeline.model import Span, SpanKind, Timeline, TimelineMoment
from gracepoint_operator.kube.objects import LABEL_COMPLETION_INDEX

Json = Mapping[str, Any]

OPERATOR = "operator"
#: All processes together: a stage is reached when the last of them has reached it.
GANG = "all processes"
#: How often a Job by itself has replaced the pod of an index: annotations of the pod.
_REPLACED = ("batch.kubernetes.io/job-index-failure-count", "batch.kubernetes.io/job-index-ignored-failure-count")
#: More lanes are not drawn one by one.
_PODS = 16

#: What the gang does until it reaches a stage.
_UNTIL = {
    "frozen": (SpanKind.TRAINING, "trains until all are frozen"),
    "agreed": (SpanKind.FREEZE, "agrees on the step to save"),
    "drained": (SpanKind.DRAIN, "finishes the queued steps"),
    "written": (SpanKind.SAVE, "writes the shards"),
    "durable": (SpanKind.SAVE, "waits for stable storage"),
    "committed": (SpanKind.COMMIT, "commits the checkpoint"),
    "exited": (SpanKind.EXIT, "leaves"),
    "podsBack": (SpanKind.PODS, "new pods start"),
    "started": (SpanKind.PODS, "new processes start"),
    "attaching": (SpanKind.IMPORTS, "imports modules"),
    "joined": (SpanKind.JOIN, "joins the other processes"),
    "restored": (SpanKind.RESTORE, "restores the state"),
    "compiled": (SpanKind.COMPILE, "compiles or loads programs"),
    "training": (SpanKind.TRAINING, "does the first step"),
}


def timeline_of(preemption: Json, pods: Iterable[Json] = ()) -> Timeline:
    """Returns the timeline of a Preemption.

    Args:
        preemption: A record of the operator.
        pods: The pods of its workload that exist now. Each gets a lane.
    """
    spec, status = preemption["spec"], preemption.get("status") or {}
    node = _node_lane(spec)
    at = {item["stage"]: float(item["seconds"]) for item in status.get("timings") or ()}
    spans, reached = [], at.get("noticeSent", 0.0)
    for stage, (kind, text) in _UNTIL.items():
        if stage in at:
            # Stages are reported by several clocks, so that one may seem to end before it began.
            end = max(at[stage], reached)
            spans.append(Span(GANG, reached, end, kind, text))
            reached = end
    moments = [TimelineMoment(node, 0.0, str(spec["signal"]))]
    if "noticeSent" in at:
        moments.append(TimelineMoment(OPERATOR, at["noticeSent"], "notice sent"))
    if "firstAck" in at and "lastAck" in at:
        first, last = at["firstAck"], max(at["firstAck"], at["lastAck"])
        spans.append(Span(OPERATOR, first, last, SpanKind.NOTICE, "acknowledgements arrive"))
    observed_at = time_of(spec["observedAt"])
    lanes, pod_spans = _pod_lanes(pods, observed_at)
    deadline = time_of(spec["deadline"]) if spec.get("deadline") else None
    return Timeline(
        title=f"{spec['jobSet']['name']}: {spec['cause']} ({preemption['metadata']['name']})",
        facts=tuple(_facts(spec, status)),
        lanes=(node, OPERATOR, GANG, *lanes),
        spans=(*spans, *_in_view(pod_spans, max(at.values(), default=0.0))),
        moments=tuple(moments),
        deadline_s=None if deadline is None else (deadline - observed_at).total_seconds(),
        saved_step=status.get("step"),
    )


def time_of(text: str) -> datetime.datetime:
    """Returns a time as the API server writes it."""
    return datetime.datetime.fromisoformat(text)


def _node_lane(spec: Json) -> str:
    nodes = list(spec.get("nodes") or ())
    if not nodes:
        return "signal"
    name = nodes[0] if nodes[0].startswith("node") else f"node {nodes[0]}"
    return name + (f" and {len(nodes) - 1} more" if len(nodes) > 1 else "")


def _facts(spec: Json, status: Json) -> Iterable[str]:
    yield f"{status.get('phase') or 'Noticed'} in mode {spec['mode']}"
    if status.get("step") is not None:
        yield f"step {status['step']} saved"
    if status.get("stepsLost") is not None:
        yield f"{status['stepsLost']} steps lost"
    if (spare := status.get("secondsToSpare")) is not None:
        yield f"{spare:.1f} s to spare" if spare >= 0 else f"{-spare:.1f} s after the deadline"
    if status.get("restoredStep") is not None:
        yield f"continued from step {status['restoredStep']}"


def _pod_lanes(pods: Iterable[Json], observed_at: datetime.datetime) -> tuple[list[str], list[Span]]:
    """Returns a lane for each pod and, in seconds since the signal, how it started and ran."""
    lanes: list[str] = []
    spans: list[Span] = []
    for attempt, pod in _by_attempt(pods)[:_PODS]:
        meta, status = pod["metadata"], pod.get("status") or {}
        lane = f"pod {meta['name']}"
        lanes.append(lane)

        def seconds(text: str) -> float:
            return (time_of(text) - observed_at).total_seconds()

        created_s = seconds(meta["creationTimestamp"])
        states = [item.get("state") or {} for item in status.get("containerStatuses") or ()]
        began = [seconds(s["startedAt"]) for state in states for s in state.values() if s.get("startedAt")]
        ended = [seconds(s["finishedAt"]) for state in states for s in state.values() if s.get("finishedAt")]
        where = f" on {pod['spec']['nodeName']}" if (pod.get("spec") or {}).get("nodeName") else ""
        if not began:
            spans.append(Span(lane, created_s, float("inf"), SpanKind.PODS, f"attempt {attempt} starts{where}"))
            continue
        spans.append(Span(lane, created_s, min(began), SpanKind.PODS, f"attempt {attempt} starts{where}"))
        last_s = max(ended) if ended and len(ended) == len(states) else float("inf")
        spans.append(Span(lane, min(began), last_s, SpanKind.TRAINING, f"attempt {attempt} runs{where}"))
    return lanes, spans


def _by_attempt(pods: Iterable[Json]) -> list[tuple[int, Json]]:
    """Returns the pods, each with the number of its attempt. Sorted by attempt, then by the place in the gang."""
    found = []
    for pod in pods:
        labels, annotations = (pod["metadata"].get(field) or {} for field in ("labels", "annotations"))
        attempt = _number(labels, JOBSET_LABEL_RESTART_ATTEMPT) + sum(_number(annotations, key) for key in _REPLACED)
        place = _number(labels, JOBSET_LABEL_JOB_INDEX), _number(labels, LABEL_COMPLETION_INDEX)
        found.append((attempt, place, pod))
    return [(attempt, pod) for attempt, _, pod in sorted(found, key=lambda item: item[:2])]


def _number(values: Json, key: str) -> int:
    value = str(values.get(key, "0"))
    return int(value) if value.isdigit() else 0


def _in_view(spans: Iterable[Span], last_s: float) -> Iterable[Span]:
    """Cuts the spans to the time of the preemption, with a little room before and after it."""
    room = max(last_s, 1.0) * 0.1
    for span in spans:
        start, end = max(span.start_s, -room), min(span.end_s, last_s + room)
        if start < end:
            yield Span(span.lane, start, end, span.kind, span.text)
