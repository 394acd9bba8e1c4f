"""The errors of a request that the store has answered."""

from __future__ import annotations

import errno


class Transient(OSError):
    """The store did not carry the request out, and may do so later.

    Attributes:
        after_s: Seconds to wait at least, as the store asks. 0 if it does not ask.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(errno.EAGAIN, message)
        self.after_s = after_s


class ConditionFailed(OSError):
    """The object does not have the generation that a request asked for. Or the upload of the request has ended."""


class UploadConflict(OSError):
    """Another writer interfered with the end of an upload. The upload must be made again."""
