"""The picture of the demo: what ``kubectl gracepoint timeline`` draws, with what the runs have recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from demo.records import Step
from demo.timeline import Stage
from gracepoint_cli import timeline_picture
from gracepoint_cli.timeline import GANG, Loss, Span, SpanKind, Timeline, TimelineMoment, time_of, timeline_of

#: Training before the signal, and after it has begun again, is shown for so many seconds.
_AROUND_S = 3.0


def timeline(
    preemption: dict[str, Any],
    *,
    zero_unix_s: float,
    observed: Iterable[Stage],
    undisturbed: Sequence[Step],
    disturbed: Sequence[Step],
    disturbance: str,
) -> Timeline:
    """Returns the timeline of the disturbed run.

    Args:
        preemption: The Preemption.
        zero_unix_s: When the taint was put, or the node was switched off, from which ``observed`` counts.
        observed: What the demo has seen of the node, and the newest snapshot.
        undisturbed: The steps that the run recorded with which it is compared.
        disturbed: The steps that the disturbed run recorded.
        disturbance: What has happened to it, as the losses' legend says it.
    """
    made = timeline_of(preemption)
    seen_unix_s = time_of(preemption["spec"]["observedAt"]).timestamp()
    lanes = {"nodeGone": made.lanes[0], "snapshot": GANG}
    moments = [
        TimelineMoment(lanes[stage.name], zero_unix_s + stage.seconds - seen_unix_s, stage.text)
        for stage in observed
        if stage.name in lanes
    ]
    begin_s = min([-_AROUND_S, *(moment.at_s for moment in moments)])
    last_s = max([made.deadline_s or 0.0, *(span.end_s for span in made.spans), *(moment.at_s for moment in moments)])
    spans = [
        Span(
            f"process {process}",
            max(first_s - seen_unix_s, begin_s),
            min(end_s - seen_unix_s, last_s + _AROUND_S),
            SpanKind.TRAINING,
            f"trains, attempt {attempt}",
        )
        for (process, attempt), (first_s, end_s) in sorted(_trained(disturbed).items())
    ]
    return dataclasses.replace(
        made,
        lanes=(*made.lanes, *dict.fromkeys(span.lane for span in spans)),
        spans=(*made.spans, *(span for span in spans if span.start_s < span.end_s)),
        moments=(*made.moments, *moments),
        losses=(*_losses("undisturbed", undisturbed), *_losses(disturbance, disturbed)),
    )


def without_notice(made: Timeline, *, lost: int, interval: int, restored_step: int, source: str) -> Timeline:
    """Returns the timeline of a node that was switched off, with what came out.

    Args:
        made: As ``timeline`` has made it.
        lost: How many steps were trained again.
        interval: Steps between two snapshots.
        restored_step: The step that training continued from.
        source: Where that step was, in words.
    """
    lost_steps = f"{lost} steps trained again, of {interval} between two snapshots"
    again = f"continued from step {restored_step} in {source}"
    return dataclasses.replace(
        made,
        title=f"{made.title.partition(':')[0]}: a node is switched off without notice",
        facts=(lost_steps, again),
        # What was said of the node after it was off stands no longer beside that, and had no deadline.
        moments=tuple(moment for moment in made.moments if moment.lane != made.lanes[0] or moment.at_s < 0),
        deadline_s=None,
        saved_step=restored_step,
    )


def write(made: Timeline, folder: Path, name: str) -> None:
    """Writes the picture as SVG, and as a page."""
    (folder / f"{name}.svg").write_text(timeline_picture.svg(made), encoding="utf-8")
    (folder / f"{name}.html").write_text(timeline_picture.page(made), encoding="utf-8")


def _trained(steps: Iterable[Step]) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns when each process had its first and its last loss, by process and attempt."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for step in steps:
        first, last = found.get((step.process, step.attempt), (step.unix_s, step.unix_s))
        found[step.process, step.attempt] = min(first, step.unix_s), max(last, step.unix_s)
    return found


def _losses(run: str, steps: Iterable[Step]) -> list[Loss]:
    """Returns the losses of process 0, as all processes have the same."""
    values = {step.step: float.fromhex(step.loss) for step in steps if step.process == 0}
    return [Loss(run, step, value) for step, value in sorted(values.items())]
