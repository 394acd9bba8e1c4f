"""The picture of the demo: what ``kubectl gracepoint timeline`` draws, with what the runs have recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from demo.records import Step
from demo.timeline import Stage
from gracepoint_cli import timeline_picture
from gracepoint_cli.timeline import Loss, Span, SpanKind, Timeline, TimelineMoment, time_of, timeline_of

#: Training before the signal, and after it has begun again, is shown for so many seconds.
_AROUND_S = 3.0


def timeline(
    preemption: dict[str, Any],
    *,
    zero_unix_s: float,
    observed: Iterable[Stage],
    undisturbed: Sequence[Step],
    disturbed: Sequence[Step],
) -> Timeline:
    """Returns the timeline of the disturbed run.

    Args:
        preemption: The Preemption.
        zero_unix_s: When the taint was put, from which ``observed`` counts.
        observed: What the demo has seen of the node.
        undisturbed: The steps that the run recorded with which it is compared.
        disturbed: The steps that the disturbed run recorded.
    """
    made = timeline_of(preemption)
    seen_unix_s = time_of(preemption["spec"]["observedAt"]).timestamp()
    node = made.lanes[0]
    moments = [
        TimelineMoment(node, zero_unix_s + stage.seconds - seen_unix_s, stage.text)
        for stage in observed
        if stage.name == "nodeGone"
    ]
    last_s = max([made.deadline_s or 0.0, *(span.end_s for span in made.spans), *(moment.at_s for moment in moments)])
    spans = [
        Span(
            f"process {process}",
            max(first_s - seen_unix_s, -_AROUND_S),
            min(end_s - seen_unix_s, last_s + _AROUND_S),
            SpanKind.TRAINING,
            f"trains, attempt {attempt}",
        )
        for (process, attempt), (first_s, end_s) in sorted(_trained(disturbed).items())
    ]
    step = made.saved_step
    return dataclasses.replace(
        made,
        lanes=(*made.lanes, *dict.fromkeys(span.lane for span in spans)),
        spans=(*made.spans, *(span for span in spans if span.start_s < span.end_s)),
        moments=(*made.moments, *moments),
        losses=(*_losses("undisturbed", undisturbed), *_losses(f"preempted at step {step}", disturbed)),
    )


def write(made: Timeline, folder: Path) -> None:
    """Writes ``timeline.svg`` and ``timeline.html``."""
    (folder / "timeline.svg").write_text(timeline_picture.svg(made), encoding="utf-8")
    (folder / "timeline.html").write_text(timeline_picture.page(made), encoding="utf-8")


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
