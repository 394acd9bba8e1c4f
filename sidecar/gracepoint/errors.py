"""Every error that Gracepoint's library raises, in one tree.

    GracepointError
    ├── SettingsError          a setting (environment, argument) is missing, unknown or wrong
    ├── WireError              a message of the channel cannot be read
    ├── ClusterError           the JAX cluster cannot be joined, or was joined before
    │   └── NoCluster          there is no JAX cluster; a ``ValueError`` as in Orbax
    ├── BarrierError           the processes did not all pass a barrier
    │   ├── BarrierTimeout     not all came in time; names the missing ones
    │   ├── BarrierFailed      a process reported an error; has that error's text
    │   ├── BarrierCancelled   a process cancelled the barrier; says which and why
    │   └── BarrierReused      the key was used before
    ├── AgreementError         the processes are not at the same sync point, or did not say where they are
    ├── AsyncCallFailed        an asynchronous call failed; has the traceback of each process where it did
    ├── CannotKnow             the question has no honest answer, and False would be a guess
    └── CheckpointError        a checkpoint cannot be written or read
        ├── CheckpointNotFound  there is no checkpoint with the name that was given
        ├── CheckpointExists    something already exists where the checkpoint should be saved
        ├── CheckpointCorrupt   the checkpoint is incomplete, damaged, or no checkpoint
        ├── CheckpointTooNew    a newer Gracepoint wrote it, and this version cannot read it
        ├── CheckpointMismatch  it does not fit the tree that it should be restored into
        │   └── HostStateLost   it was saved in an emergency without a value of the host state
        ├── CheckpointRefused   a leaf cannot be saved, or cannot be restored as the arguments say
        ├── InvalidSharding     one replica cannot read for the others with this sharding
        ├── SaveFailed          a save did not become durable
        └── StorageAway         the storage does not answer, and may do so later

``Preempted`` and ``NotJoined`` are not in the tree: each is a ``SystemExit``. So a training script that does not know
of them exits with the right exit code, and ``except Exception`` does not swallow them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class GracepointError(Exception):
    """Base of all errors that the library raises on purpose."""


class SettingsError(GracepointError, ValueError):
    """A setting is missing, unknown or wrong; the message names it, what was found and what to do."""


class WireError(GracepointError, ValueError):
    """A message of the channel does not have the form that the protocol prescribes."""


class ClusterError(GracepointError, RuntimeError):
    """The JAX cluster cannot be joined, or was joined before."""


class NoCluster(ClusterError, ValueError):
    """The call needs a JAX cluster, and this process has not joined one; a ``ValueError`` as in Orbax."""


class BarrierError(GracepointError, RuntimeError):
    """The processes did not all pass a barrier."""


class BarrierTimeout(BarrierError, TimeoutError):
    """Not every process arrived in time. ``missing`` has the indices of those that did not."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class BarrierFailed(BarrierError):
    """A process reported an error at the barrier, so the others wait no longer."""


class BarrierCancelled(BarrierError):
    """A process cancelled the barrier; no process passes it."""


class BarrierReused(BarrierError):
    """This process has used the barrier's key before. Each key is for one use."""


class AgreementError(GracepointError, RuntimeError):
    """The processes are not at the same sync point, or did not say where they are."""


class AsyncCallFailed(GracepointError, RuntimeError):
    """An asynchronous call failed in some process. All processes raise it.

    Attributes:
        call: Number of the call. None if the error is about several calls.
        failures: Traceback of each process where the call failed, as text, by process index. If the error is about
            several calls, each process's traceback is of the first one that failed there.
        finalized: Numbers of the calls that were finalized at the same time.
    """

    def __init__(
        self,
        message: str,
        call: int | None = None,
        failures: Mapping[int, str] | None = None,
        finalized: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.call = call
        self.failures = dict(failures or {})
        self.finalized = tuple(finalized)

    @classmethod
    def of_processes(cls, call: int, failures: Mapping[int, str]) -> AsyncCallFailed:
        """Returns the error of a call that failed in these processes."""
        texts = "\n".join(f"process {process}:\n{text}" for process, text in sorted(failures.items()))
        return cls(f"asynchronous call {call} failed in {len(failures)} process(es)\n{texts}", call, failures)

    @classmethod
    def of_calls(cls, errors: Sequence[AsyncCallFailed], finalized: Sequence[int]) -> AsyncCallFailed:
        """Returns the error of calls that failed, while others were finalized."""
        failures: dict[int, str] = {}
        for error in reversed(errors):
            failures.update(error.failures)
        call = errors[0].call if len(errors) == 1 else None
        return cls("\n".join(map(str, errors)), call, failures, finalized)


class CannotKnow(GracepointError, RuntimeError):
    """The question has no honest answer, and False would be a guess."""


class ForkedChild(GracepointError, RuntimeError):
    """A forked child uses what belongs to the process that it was forked from."""


class CheckpointError(GracepointError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint with the name that was given."""


class CheckpointExists(CheckpointError, FileExistsError, ValueError):
    """Something already exists where a checkpoint should be saved; a ``ValueError`` as in Orbax."""


class CheckpointCorrupt(CheckpointError, ValueError):
    """A checkpoint is incomplete, damaged or no checkpoint, and was not restored; a ``ValueError`` as in Orbax."""


class CheckpointTooNew(CheckpointError):
    """A newer Gracepoint wrote the checkpoint in a format that this version does not know. It is not changed."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not fit the tree that it should be restored into."""


class HostStateLost(CheckpointMismatch):
    """A step was saved in an emergency without a value of the host state; says which and why."""


class CheckpointRefused(CheckpointError, ValueError):
    """A leaf cannot be saved, or cannot be restored as the arguments say; a ``ValueError`` as in Orbax."""


class InvalidSharding(CheckpointError, ValueError):
    """With the given sharding, one replica cannot read for the others."""


class SaveFailed(CheckpointError):
    """A save did not become durable. Earlier complete checkpoints are not affected."""


class StorageAway(CheckpointError):
    """The storage does not answer, or is not mounted. It may be there later: nothing says that access is wrong."""


class NotJoined(SystemExit):
    """Ends the training script before it trained, for a reason that is not the program's: another start may succeed.

    A process of an earlier attempt that is no longer wanted, a peer that did not come or died before all had joined,
    devices or storage that are away. ``code`` is the policy's exit code for that: such an exit is not counted as a
    failure of the program.

    Attributes:
        reason: What happened, as a sentence.
    """

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Preempted(SystemExit):
    """Ends the training script after a preemption; ``code`` is the policy's exit code.

    Attributes:
        saved: True if the state at ``step`` is committed.
        step: The step that was saved. If nothing was saved, the last step that was passed.
        steps_lost: Completed steps that the saved one lacks: more than 0 if an older snapshot was committed, as there
            was no time for more. None if nothing was saved.
        reason: What happened, as a sentence.
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
    "host state lost": HostStateLost,
    "mismatch": CheckpointMismatch,
    "too new": CheckpointTooNew,
    "invalid sharding": InvalidSharding,
    "refused": CheckpointRefused,
    "not found": CheckpointNotFound,
    "exists": CheckpointExists,
    "corrupt": CheckpointCorrupt,
    "save failed": SaveFailed,
    "storage away": StorageAway,
    "error": CheckpointError,
}


def to_word(error: BaseException) -> str:
    """Returns the name by which one process sends the others the kind of error that it met with a checkpoint.

    A file that is missing is "corrupt". An error that is not a ``CheckpointError`` is "error".
    """
    for name, kind in _WORDS.items():
        if isinstance(error, kind):
            return name
    return "corrupt" if isinstance(error, FileNotFoundError) else "error"


def from_word(name: str) -> type[CheckpointError]:
    """Returns the class of error that ``to_word`` returned ``name`` for, or the nearest that all processes know."""
    return _WORDS.get(name, CheckpointError)
