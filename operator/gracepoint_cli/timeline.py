"""The timeline of a preemption: lanes for node, operator, gang and each process, with the deadline as a line.

It is made from a Preemption and pods of the API (``timeline_of``), and shown as text (``text_lines``) or as a picture
(``timeline_picture``). Times are seconds since the signal. The stages of a preemption are in the order in which they
usually come. Pure.

``timeline_command`` calls it, and ``drill`` uses the names of the stages. The demo draws its run in the same way, and
adds what it has measured itself.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from rich.text import Text

from gracepoint.wire.messages import one_line
from gracepoint.wire.names import JOBSET_LABEL_JOB_INDEX, JOBSET_LABEL_RESTART_ATTEMPT
from gracepoint_operator.decisions.waiting import awaited_by
from gracepoint_operator.kube.objects import LABEL_COMPLETION_INDEX
from gracepoint_operator.model.preemption_record import CONDITION_STARTED


class SpanKind(StrEnum):
    """What happens in a span. Each kind has a colour."""

    TRAINING = "training"
    NOTICE = "notice"
    FREEZE = "freeze and agree"
    DRAIN = "drain"
    SAVE = "save"
    COMMIT = "commit"
    EXIT = "exit"
    WAIT = "waits to start"
    PODS = "pods start"
    IMPORTS = "imports"
    JOIN = "join"
    RESTORE = "restore"
    COMPILE = "compile"


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that takes time."""

    lane: str
    start_s: float
    end_s: float
    kind: SpanKind
    text: str


@dataclasses.dataclass(frozen=True)
class TimelineMoment:
    """Something that happens at one time."""

    lane: str
    at_s: float
    text: str


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of one training step of one run."""

    run: str
    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One preemption.

    Attributes:
        title: Title of the picture.
        facts: What came out, in short sentences.
        lanes: Names of the lanes, from the top.
        deadline_s: When the first pod is expected to be killed. None if it is not known.
        losses: Losses of one run or of several, to be drawn over each other. Empty if they are not known.
        saved_step: The training step that was saved. None if none was.
    """

    title: str
    facts: tuple[str, ...]
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    moments: tuple[TimelineMoment, ...]
    deadline_s: float | None
    losses: tuple[Loss, ...] = ()
    saved_step: int | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Begin and end of everything, with some padding at both sides."""
        times = [0.0, *(span.start_s for span in self.spans), *(span.end_s for span in self.spans)]
        times += [moment.at_s for moment in self.moments]
        times += [] if self.deadline_s is None else [self.deadline_s]
        begin_s, end_s = min(times), max(times)
        padding = max(end_s - begin_s, 0.1) * 0.03
        return begin_s - padding, end_s + padding

    @property
    def events(self) -> list[TimelineMoment]:
        """Returns what happened, in order: moments, ends of spans with how long they took, the deadline."""
        events = list(self.moments)
        events += [TimelineMoment(s.lane, s.end_s, f"{s.text} ({s.end_s - s.start_s:.3f} s)") for s in self.spans]
        if self.deadline_s is not None:
            events.append(TimelineMoment("", self.deadline_s, "deadline"))
        return sorted(events, key=lambda event: event.at_s)

    def to_json(self) -> dict[str, Any]:
        """Returns the timeline as JSON."""
        return {
            "title": self.title,
            "facts": list(self.facts),
            "lanes": list(self.lanes),
            "deadlineSeconds": self.deadline_s,
            "spans": [
                {"lane": s.lane, "start": s.start_s, "end": s.end_s, "kind": str(s.kind), "text": s.text}
                for s in self.spans
            ],
            "moments": [{"lane": m.lane, "at": m.at_s, "text": m.text} for m in self.moments],
        }


#: Stages of a Preemption's ``status.timings``, and what they mean.
STAGES = {
    "noticeSent": "notice sent",
    "firstAck": "first process acknowledged",
    "lastAck": "all acknowledged",
    "frozen": "all frozen",
    "agreed": "agreed on the step to save",
    "drained": "queued steps done",
    "evacuated": "shards in snapshot servers",
    "written": "shards written",
    "durable": "on stable storage",
    "committed": "checkpoint committed",
    "exited": "all trainers have left",
    "unblocked": "what the restart waited for is there",
    "podsBack": "new trainers run",
    "started": "new processes started",
    "attaching": "modules imported",
    "joined": "processes joined",
    "restored": "state restored",
    "compiled": "programs compiled or loaded",
    "training": "training again",
}
#: Those that each preemption has whose step is saved to storage and whose gang continues. The others are there only if
#: the step went to snapshot servers, or the restart had to wait.
COMMON_STAGES = STAGES.keys() - {"evacuated", "unblocked"}


Json = Mapping[str, Any]

OPERATOR = "operator"
#: All processes together: a stage is reached when the last of them has reached it.
GANG = "all processes"
#: How often a Job without a JobSet has replaced the pod of an index: annotations of the pod.
_REPLACED = ("batch.kubernetes.io/job-index-failure-count", "batch.kubernetes.io/job-index-ignored-failure-count")
#: More lanes are not drawn one by one.
_PODS = 16

#: What the gang does until it reaches a stage.
_UNTIL = {
    "frozen": (SpanKind.TRAINING, "trains until all are frozen"),
    "agreed": (SpanKind.FREEZE, "agrees on the step to save"),
    "drained": (SpanKind.DRAIN, "finishes the queued steps"),
    "evacuated": (SpanKind.SAVE, "sends the shards to snapshot servers"),
    "written": (SpanKind.SAVE, "writes the shards"),
    "durable": (SpanKind.SAVE, "waits for stable storage"),
    "committed": (SpanKind.COMMIT, "commits the checkpoint"),
    "exited": (SpanKind.EXIT, "leaves"),
    "unblocked": (SpanKind.WAIT, "waits"),
    "podsBack": (SpanKind.PODS, "new pods start"),
    "started": (SpanKind.PODS, "new processes start"),
    "attaching": (SpanKind.IMPORTS, "imports modules"),
    "joined": (SpanKind.JOIN, "joins the other processes"),
    "restored": (SpanKind.RESTORE, "restores the state"),
    "compiled": (SpanKind.COMPILE, "compiles or loads programs"),
    "training": (SpanKind.TRAINING, "does the first step"),
}


def timeline_of(preemption: Json, pods: Iterable[Json] = (), now: datetime.datetime | None = None) -> Timeline:
    """Returns the timeline of a Preemption.

    Args:
        preemption: A record of the operator.
        pods: The pods of its workload that exist now. Each gets a lane.
        now: The time, up to which a restart waits that has not begun. None: when its wait was recorded.
    """
    spec, status = preemption["spec"], preemption.get("status") or {}
    node = _node_lane(spec)
    at = {item["stage"]: float(item["seconds"]) for item in status.get("timings") or ()}
    observed_at = time_of(spec["observedAt"])
    started: Json = next((item for item in status.get("conditions") or () if item.get("type") == CONDITION_STARTED), {})
    if started.get("status") == "False":
        at["unblocked"] = ((now or time_of(started["lastTransitionTime"])) - observed_at).total_seconds()
    spans, reached = [], at.get("noticeSent", 0.0)
    for stage, (kind, text) in _UNTIL.items():
        if stage in at:
            # Stages are reported by several clocks, so that one may seem to end before it began.
            end = max(at[stage], reached)
            awaited = f" for: {awaited_by(started)}" if stage == "unblocked" and started else ""
            spans.append(Span(GANG, reached, end, kind, text + awaited))
            reached = end
    moments = [TimelineMoment(node, 0.0, str(spec["signal"]))]
    if "noticeSent" in at:
        moments.append(TimelineMoment(OPERATOR, at["noticeSent"], "notice sent"))
    if "firstAck" in at and "lastAck" in at:
        first_s, last_s = at["firstAck"], max(at["firstAck"], at["lastAck"])
        spans.append(Span(OPERATOR, first_s, last_s, SpanKind.NOTICE, "acknowledgements arrive"))
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
        where = " from the memory of nodes" if status.get("restoredFromMemory") else ""
        yield f"continued from step {status['restoredStep']}{where}"


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
        end_times = [seconds(s["finishedAt"]) for state in states for s in state.values() if s.get("finishedAt")]
        where = f" on {pod['spec']['nodeName']}" if (pod.get("spec") or {}).get("nodeName") else ""
        if not began:
            spans.append(Span(lane, created_s, float("inf"), SpanKind.PODS, f"attempt {attempt} starts{where}"))
            continue
        spans.append(Span(lane, created_s, min(began), SpanKind.PODS, f"attempt {attempt} starts{where}"))
        last_s = max(end_times) if end_times and len(end_times) == len(states) else float("inf")
        spans.append(Span(lane, min(began), last_s, SpanKind.TRAINING, f"attempt {attempt} runs{where}"))
    return lanes, spans


def _by_attempt(pods: Iterable[Json]) -> list[tuple[int, Json]]:
    """Returns the pods, each with the number of its attempt. Sorted by attempt, then by the place in the gang."""
    pods_by_attempt = []
    for pod in pods:
        labels, annotations = (pod["metadata"].get(field) or {} for field in ("labels", "annotations"))
        attempt = _number(labels, JOBSET_LABEL_RESTART_ATTEMPT) + sum(_number(annotations, key) for key in _REPLACED)
        place = _number(labels, JOBSET_LABEL_JOB_INDEX), _number(labels, LABEL_COMPLETION_INDEX)
        pods_by_attempt.append((attempt, place, pod))
    return [(attempt, pod) for attempt, _, pod in sorted(pods_by_attempt, key=lambda item: item[:2])]


def _number(values: Json, key: str) -> int:
    value = str(values.get(key, "0"))
    return int(value) if value.isdigit() else 0


def _in_view(spans: Iterable[Span], last_s: float) -> Iterable[Span]:
    """Cuts the spans to the time of the preemption, with some padding before and after it."""
    padding = max(last_s, 1.0) * 0.1
    for span in spans:
        start, end = max(span.start_s, -padding), min(span.end_s, last_s + padding)
        if start < end:
            yield Span(span.lane, start, end, span.kind, span.text)


_COLOURS = {
    SpanKind.TRAINING: "green",
    SpanKind.NOTICE: "bright_black",
    SpanKind.FREEZE: "cyan",
    SpanKind.DRAIN: "blue",
    SpanKind.SAVE: "magenta",
    SpanKind.COMMIT: "bright_magenta",
    SpanKind.EXIT: "red",
    SpanKind.WAIT: "white",
    SpanKind.PODS: "yellow",
    SpanKind.IMPORTS: "bright_yellow",
    SpanKind.JOIN: "bright_cyan",
    SpanKind.RESTORE: "bright_blue",
    SpanKind.COMPILE: "bright_red",
}
_LETTERS = {
    SpanKind.TRAINING: "=",
    SpanKind.NOTICE: "-",
    SpanKind.FREEZE: "f",
    SpanKind.DRAIN: "d",
    SpanKind.SAVE: "s",
    SpanKind.COMMIT: "c",
    SpanKind.EXIT: "x",
    SpanKind.WAIT: "w",
    SpanKind.PODS: "p",
    SpanKind.IMPORTS: "i",
    SpanKind.JOIN: "j",
    SpanKind.RESTORE: "r",
    SpanKind.COMPILE: "o",
}
_NARROWEST = 20


def text_lines(timeline: Timeline, width: int, *, colours: bool) -> list[Text]:
    """Returns the timeline as text: a line for each lane, then each stage with its seconds.

    Args:
        timeline: What to show.
        width: Columns of the terminal.
        colours: Whether spans are distinguished by colour. Without, by letters.
    """
    names = {lane: _shortened(one_line(lane), max(width // 3, _NARROWEST)) for lane in timeline.lanes}
    labels = max(map(len, names.values()), default=0)
    columns = max(width - labels - 3, _NARROWEST)
    begin_s, end_s = timeline.bounds

    def column(seconds: float) -> int:
        return min(int((seconds - begin_s) / (end_s - begin_s) * columns), columns - 1)

    texts = [Text(one_line(timeline.title), style="bold"), Text(one_line("; ".join(timeline.facts))), Text()]
    deadline = None if timeline.deadline_s is None else column(timeline.deadline_s)
    for lane in timeline.lanes:
        cells: list[tuple[str, str]] = [(" ", "")] * columns
        for span in timeline.spans:
            if span.lane == lane:
                sign = "█" if colours else _LETTERS[span.kind]
                for at in range(column(span.start_s), column(span.end_s) + 1):
                    cells[at] = (sign, _COLOURS[span.kind])
        for moment in timeline.moments:
            if moment.lane == lane:
                cells[column(moment.at_s)] = ("◆" if colours else "!", "bold")
        if deadline is not None:
            cells[deadline] = ("│" if colours else "|", "red")
        line = Text(f"{names[lane]:>{labels}}  ")
        for sign, style in cells:
            line.append(sign, style=style)
        texts.append(line)
    texts.append(Text(" " * (labels + 2) + _scale(begin_s, end_s, columns), style="bright_black"))
    texts.append(_legend(timeline, colours=colours))
    texts.append(Text())
    texts += [
        Text(one_line(f"{event.at_s:10.3f} s  {event.lane}{': ' if event.lane else ''}{event.text}"))
        for event in timeline.events
    ]
    return texts


def _scale(begin_s: float, end_s: float, columns: int) -> str:
    begin_label, right = f"{begin_s:.1f} s", f"{end_s:.1f} s"
    return begin_label + right.rjust(columns - len(begin_label))


def _shortened(text: str, limit: int) -> str:
    """Returns the text, without its middle if it is too long: the end of a pod's name distinguishes it from others."""
    if len(text) <= limit:
        return text
    begin = (limit - 1) // 2
    return f"{text[:begin]}…{text[len(text) - (limit - 1 - begin) :]}"


def _legend(timeline: Timeline, *, colours: bool) -> Text:
    legend = Text()
    for kind in sorted({span.kind for span in timeline.spans}, key=list(SpanKind).index):
        legend.append("█ " if colours else f"{_LETTERS[kind]} ", style=_COLOURS[kind]).append(f"{kind}   ")
    if timeline.moments:
        legend.append("◆ " if colours else "! ", style="bold").append("event   ")
    if timeline.deadline_s is not None:
        legend.append("│ " if colours else "| ", style="red").append("deadline")
    return legend
