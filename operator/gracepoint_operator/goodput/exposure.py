"""Whether a gang has a checkpoint that is young enough for a voluntary disruption. Pure.

A disruption costs a gang what it has trained since its newest checkpoint, or since it was restored: right after a
restore nothing can be lost, however old the checkpoint is. A gang is not protected if none of its processes reports its
times, because then no report would end the protection.
"""

from __future__ import annotations

import dataclasses

from gracepoint_operator.goodput.life import Life


@dataclasses.dataclass(frozen=True)
class Exposure:
    """See the module.

    Attributes:
        protect: Whether the gang is to be protected from voluntary disruptions now.
        until_ms: When the protection has to begin if no newer checkpoint comes. None if the gang is protected already,
            or if only an event can change that.
    """

    protect: bool
    until_ms: int | None = None


def exposure(life: Life | None, younger_than_ms: int, now_ms: int) -> Exposure:
    """Returns whether a gang is to be protected.

    Args:
        life: The current life of the gang. None if there is no account of it.
        younger_than_ms: The gang may be disrupted while its newest checkpoint is younger than this.
        now_ms: The time.
    """
    if life is None or not life.session or life.gone_ms is not None:
        return Exposure(False)
    known = [moment for moment in (life.restored_ms, life.saved_ms) if moment is not None]
    until_ms = max(known, default=now_ms - younger_than_ms) + younger_than_ms
    return Exposure(True) if now_ms >= until_ms else Exposure(False, until_ms)
