"""Every error that Gracepoint's library raises, in one tree.

    GracepointError
    ├── SettingsError          a setting (environment, argument) is missing, unknown or wrong
    ├── WireError              a message of the channel cannot be read
    ├── ClusterError           the JAX cluster cannot be joined, or was joined before
    │   └── NoCluster          ... because there is none; a ``ValueError`` as in Orbax
    ├── BarrierError           processes could not be brought together
    │   ├── BarrierTimeout     ... not in time; names who had not arrived
    │   ├── BarrierFailed      ... because a process reported an error; carries that error's text
    │   ├── BarrierCancelled   ... because one gave it up on purpose; says which and why
    │   └── BarrierReused      ... because the key was used before
    ├── AgreementError         the processes do not agree on where they are
    ├── CannotKnow             the question has no honest answer (never answered with False)
    └── CheckpointError        a checkpoint cannot be written or read
        ├── CheckpointNotFound  there is none where one was asked for by name
        ├── CheckpointExists    something is already where one should be saved
        ├── CheckpointCorrupt   one is there, and it is torn, foreign or damaged
        ├── CheckpointTooNew    a newer Gracepoint wrote it, and this one cannot read it
        ├── CheckpointMismatch  it does not fit the tree that it should be restored into
        ├── CheckpointRefused   a leaf or an argument is one that cannot be saved, or restored so
        ├── InvalidSharding     one replica cannot read for the others with this sharding
        └── SaveFailed          a save did not become durable

``Preempted`` is not in the tree: it is a ``SystemExit``, so that a training script that does not know of it
ends with the right exit code, and ``except Exception`` does not swallow it.
"""

from __future__ import annotations


class GracepointError(Exception):
    """Base of all errors that the library raises on purpose."""


class SettingsError(GracepointError, ValueError):
    """A setting is missing, unknown or wrong; the message names it, what was found and what to do."""


class WireError(GracepointError, ValueError):
    """A message of the channel is not of the form that the protocol says."""


class ClusterError(GracepointError, RuntimeError):
    """The JAX cluster cannot be joined, or was joined before."""


class NoCluster(ClusterError, ValueError):
    """Several processes should meet, and this one has not joined a JAX cluster; a ``ValueError`` as in Orbax."""


class BarrierError(GracepointError, RuntimeError):
    """The processes could not be brought together at a barrier."""


class BarrierTimeout(BarrierError, TimeoutError):
    """Not every process arrived in time; ``missing`` holds the indices of those that had not."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class BarrierFailed(BarrierError):
    """A process reported an error at the barrier, which the others thus need not wait for."""


class BarrierCancelled(BarrierError):
    """A process gave the barrier up on purpose; nobody passes it."""


class BarrierReused(BarrierError):
    """The barrier's key was used before in this process; keys are for one use."""


class AgreementError(GracepointError, RuntimeError):
    """The processes are not at the same point, or did not say where they are."""


class CannotKnow(GracepointError, RuntimeError):
    """The question has no honest answer here, and False would be a guess."""


class CheckpointError(GracepointError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """No complete checkpoint is where one was asked for by name."""


class CheckpointExists(CheckpointError, FileExistsError, ValueError):
    """Something is already where a checkpoint should be saved; a ``ValueError`` as in Orbax."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint is torn, foreign or damaged, and was not restored."""


class CheckpointTooNew(CheckpointError):
    """A newer Gracepoint wrote a checkpoint, in a format that this version does not know; it is left as it is."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not fit the tree that it should be restored into."""


class CheckpointRefused(CheckpointError, ValueError):
    """A leaf cannot be saved, or not restored as the arguments say; a ``ValueError`` as in Orbax."""


class InvalidSharding(CheckpointError, ValueError):
    """One replica cannot read for the others with the sharding that was given."""


class SaveFailed(CheckpointError):
    """A save did not become durable; what was complete before still is."""


class Preempted(SystemExit):
    """Ends the training script after a preemption; ``code`` is the policy's exit code.

    Attributes:
        saved: True if the state at ``step`` is committed.
        step: The step that was saved, or the last one passed where nothing was saved.
        steps_lost: How many completed steps that one lacks: more than 0 where an older snapshot was saved, as there
            was no time for more. None where nothing was saved.
        reason: What happened, in words.
    """

    def __init__(self, code: int, *, saved: bool, step: int, reason: str, steps_lost: int = 0) -> None:
        super().__init__(code)
        self.saved = saved
        self.step = step
        self.steps_lost = steps_lost if saved else None
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


# The first that an error is an instance of counts, so the more specific ones come first.
_WORDS: dict[str, type[CheckpointError]] = {
    "mismatch": CheckpointMismatch,
    "too new": CheckpointTooNew,
    "invalid sharding": InvalidSharding,
    "refused": CheckpointRefused,
    "not found": CheckpointNotFound,
    "exists": CheckpointExists,
    "corrupt": CheckpointCorrupt,
    "save failed": SaveFailed,
    "error": CheckpointError,
}


def to_word(error: BaseException) -> str:
    """Returns the word by which one process tells the others what kind of error it met with a checkpoint.

    A file that is missing is "corrupt". An error that is not a ``CheckpointError`` is "error".
    """
    for word, kind in _WORDS.items():
        if isinstance(error, kind):
            return word
    return "corrupt" if isinstance(error, FileNotFoundError) else "error"


def from_word(word: str) -> type[CheckpointError]:
    """Returns the class of error that ``to_word`` returned ``word`` for, or the nearest that all processes know."""
    return _WORDS.get(word, CheckpointError)
