"""What happens when in a soak, from a seed. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

#: Steps of training before the first disruption, and between two, at most.
SPACING = 30


@dataclasses.dataclass(frozen=True)
class Disruption:
    """One disruption.

    Attributes:
        number: Its place in the soak, from 1.
        kind: Name of its kind.
        after_steps: It comes when the job has trained so many steps since the one before was over.
        process: The process that it is done to, or the one on whose node it is done.
    """

    number: int
    kind: str
    after_steps: int
    process: int


def plan(
    seed: int, count: int, kinds: Sequence[str], *, processes: int = 2, spacing: int = SPACING
) -> tuple[Disruption, ...]:
    """Returns a soak of ``count`` disruptions, in their order.

    The kinds come in rounds: each kind once in a round, in an order of its own. So a short soak has all kinds, too.

    Raises:
        ValueError: There are no kinds, or less than one disruption.
    """
    if count < 1 or not kinds:
        raise ValueError(f"expected at least one disruption and one kind, found {count} of {list(kinds)}")
    chance = random.Random(seed)
    made: list[Disruption] = []
    while len(made) < count:
        for kind in chance.sample(list(kinds), len(kinds))[: count - len(made)]:
            # Never at a regular distance: a disruption hits saves, compilations and quiet training alike.
            steps = chance.randint(spacing // 3, spacing)
            made.append(Disruption(len(made) + 1, kind, steps, chance.randrange(processes)))
    return tuple(made)
