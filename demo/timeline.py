"""The stages of a preemption in the order of time, from what the operator and the demo have seen. Pure."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from gracepoint_cli.timeline import STAGES


@dataclasses.dataclass(frozen=True)
class Stage:
    """One line of the timeline; ``seconds`` count from the moment that the taint was put."""

    name: str
    text: str
    seconds: float


def timeline(preemption: Mapping[str, Any], *, zero_unix_s: float, observed: Iterable[Stage]) -> list[Stage]:
    """Merges the Preemption's timings with what the demo has seen itself.

    Args:
        preemption: The Preemption object. Its timings count from ``spec.observedAt``.
        zero_unix_s: When the taint was put.
        observed: What the demo saw by itself; their seconds count from the taint already.

    Returns:
        The stages, the earliest first.
    """
    seen_unix_s = unix_s(preemption["spec"]["observedAt"])
    stages = [Stage("seen", "taint seen by the operator", seen_unix_s - zero_unix_s)]
    for timing in preemption.get("status", {}).get("timings", []):
        at = seen_unix_s + timing["seconds"] - zero_unix_s
        stages.append(Stage(timing["stage"], STAGES.get(timing["stage"], timing["stage"]), at))
    stages += observed
    order = ["seen", *STAGES]
    return sorted(
        stages,
        key=lambda stage: (round(stage.seconds, 3), order.index(stage.name) if stage.name in order else 0),
    )


def table(stages: Iterable[Stage]) -> str:
    """The timeline as lines of text."""
    return "\n".join(f"  {stage.seconds:8.3f} s  {stage.text}" for stage in stages)


def unix_s(rfc3339: str) -> float:
    """Seconds since the epoch of a time as the API server writes it."""
    return datetime.datetime.fromisoformat(rfc3339).timestamp()
