"""Sentences that describe a preemption, for its status and its Events. Pure."""

from __future__ import annotations

from gracepoint.wire.messages import Mode, Phase, Report
from gracepoint_operator.resources import PreemptionSpec, PreemptionStatus


def signal_message(spec: PreemptionSpec) -> str:
    """Describes the signal and what follows from it."""
    seconds = (spec.deadline - spec.observed_at).total_seconds()
    where = f" on {', '.join(spec.nodes[:5])}" if spec.nodes else ""
    return f"{spec.cause}: {spec.signal}{where}, {seconds:.0f} s ahead; {_request(spec)}"


def phase_message(phase: Phase, at: PreemptionStatus | Report) -> str:
    """Describes a phase that the gang has reached."""
    step, spare_s = at.step, at.seconds_to_spare
    match phase:
        case Phase.FROZEN:
            return "every process is held at its next sync point"
        case Phase.AGREED:
            # The step at that point is known when the processes have come there.
            return f"all processes save at their sync point {at.ordinal}"
        case Phase.DRAINED:
            return f"all processes have reached step {step}, and their devices are idle"
        case Phase.WRITTEN:
            return f"every process has written its part of step {step}"
        case Phase.DURABLE:
            return f"all parts of step {step} are on stable storage"
        case Phase.COMMITTED | Phase.PROMOTED:
            lost = "" if at.steps_lost is None else f", {at.steps_lost} steps lost"
            spare = "" if spare_s is None else f", {spare_s:.1f} s to spare"
            return f"step {step} is saved{lost}{spare}"
        case _:
            return str(phase)


def _request(spec: PreemptionSpec) -> str:
    """Describes what the gang is asked to do."""
    match spec.mode:
        case Mode.OBSERVE:
            return "observed only"
        case Mode.DRILL:
            return "a drill: the gang saves and trains on"
        case Mode.ENFORCE:
            return "the gang is told" if spec.exits else "the gang saves and trains on"
