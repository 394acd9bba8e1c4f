"""Which fault each Preemption of a job belongs to, and which belong to none. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from demo.snapshot import Json


@dataclasses.dataclass(frozen=True)
class Owner:
    """What happened to a job.

    Attributes:
        name: What it is, for messages.
        most: How many records there may be of it.
        causes: What these may say as their cause. None: anything.
    """

    name: str
    most: float
    causes: frozenset[str] | None


class Owners:
    """The records of one job by what happened to it: those that are first seen after one thing and before the next.

    A record may come late, after its fault was judged. So all of them are counted once more when the job has ended.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._owner = Owner("its start", 0, frozenset())
        self._number = 0
        self._surplus: list[str] = []

    def note(self, records: Iterable[Json]) -> None:
        """What is new belongs to what happened last."""
        for record in records:
            name = str(record["metadata"]["name"])
            if name in self._seen:
                continue
            self._seen.add(name)
            self._number += 1
            cause, owner = record["spec"]["cause"], self._owner
            if owner.causes is not None and (self._number > owner.most or cause not in owner.causes):
                self._surplus.append(
                    f"Preemption {name} ({cause}) belongs to nothing: it came after {owner.name}, which has "
                    f"{owner.most:g} at most, of {' or '.join(sorted(owner.causes)) or 'no cause'}"
                )

    def begin(self, owner: Owner, records: Iterable[Json]) -> None:
        """Something happens next. ``records`` are those that there are until then."""
        self.note(records)
        self._owner, self._number = owner, 0

    def excuse(self, name: str) -> None:
        """Of what happened last, which ``name`` names, any records may be: it was not as expected, which is told."""
        self._owner = Owner(name, math.inf, None)

    def surplus(self) -> list[str]:
        """Returns, in words, the records that belong to nothing of what happened."""
        return list(self._surplus)
