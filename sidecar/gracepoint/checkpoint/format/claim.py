"""The claim of a save or a deletion on a step, in a store that cannot rename."""

from __future__ import annotations

import dataclasses
import secrets
from typing import ClassVar, Self

from gracepoint.checkpoint.format.sealed_json import seal, unsealed


@dataclasses.dataclass(frozen=True)
class Claim:
    """Stands in place of a step's manifest in a store that cannot rename, while a save or a deletion owns the step.

    Attributes:
        attempt: The attempt of the job that saves. In the claim of a deletion: ``deletes``.
        ordinal: Number of the save within the attempt. In the claim of a deletion: 0.
        begun_ns: When the save or the deletion began, in nanoseconds since the epoch by the store's clock.
        trash: Name of the trash of a step that is deleted. None in the claim of a save.
        nonce: Makes the contents unique, as some stores tell versions apart by their contents.
        swept_ns: When the process that deletes the objects last renewed the claim, in nanoseconds since the epoch by
            the store's clock. 0 if no process deletes them yet.
    """

    attempt: str
    ordinal: int
    begun_ns: int
    trash: str | None = None
    nonce: str = dataclasses.field(default_factory=lambda: Claim.new_nonce())
    swept_ns: int = 0

    FORMAT: ClassVar[str] = "gracepoint.claim/1"

    @staticmethod
    def new_nonce() -> str:
        return secrets.token_hex(8)

    @property
    def note(self) -> str:
        """The note that the save leaves with each object that it writes."""
        return f"{self.attempt} {self.ordinal} {self.begun_ns}"

    @classmethod
    def noted(cls, note: str) -> Claim | None:
        """Returns the save that left a note. None if Gracepoint did not leave it."""
        attempt, _, rest = note.partition(" ")
        numbers = rest.split(" ")
        if not attempt or len(numbers) < 2 or not all(number.isdecimal() for number in numbers[:2]):
            return None
        return cls(attempt, int(numbers[0]), int(numbers[1]))

    def is_same(self, other: Claim) -> bool:
        """Returns whether both are of one save."""
        return (self.attempt, self.ordinal) == (other.attempt, other.ordinal)

    def is_later(self, other: Claim) -> bool:
        """Returns whether this save began after ``other``."""
        if self.attempt == other.attempt:
            return self.ordinal > other.ordinal
        return self.begun_ns > other.begun_ns

    def to_bytes(self) -> bytes:
        return seal(self.FORMAT, dataclasses.asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        return cls(**unsealed((cls.FORMAT,), data, where))


def is_claim(data: bytes) -> bool:
    """Returns whether ``data`` is a claim of any version, and not a manifest."""
    return data.startswith(b'{"format": "gracepoint.claim/')
