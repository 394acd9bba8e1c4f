"""The agreement of a restore in which one replica reads for all, and the bits of values that it sends.

If a process failed before a collective operation, the others would wait in that operation forever. So each process
first reports, with a timeout, whether it has read its part (``ReplicaAgreement``). A process that fails earlier reports
that at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.options import SingleReplicaArrayRestoreArgs
from gracepoint.checkpoint.orbax import is_orbax
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, from_word, to_word
from gracepoint.process_group import ProcessGroup


@dataclasses.dataclass(frozen=True)
class ReplicaAnswer:
    """The report of one process.

    Attributes:
        limit_bytes: Most bytes of each device's part that the process can receive at once.
        word: Kind of the error with which reading failed (``errors.to_word``). None if the process has read its part.
        failure: Message of that error. Empty if there is none.
    """

    limit_bytes: int
    word: str | None
    failure: str


class ReplicaAgreement:
    """The reports that the processes exchange in one restore. At each meeting, each process reports once.

    Args:
        gang: The processes that restore together.
        key: Prefix of the keys of the exchanges. Unique to this restore.
        meets_first: Whether the processes also meet before they read (``ready``). The same in all processes.

    Attributes:
        agreed_bytes: Most bytes of each device's part that every process can receive at once. None before ``ready``.
    """

    def __init__(self, gang: ProcessGroup, key: str, *, meets_first: bool = False) -> None:
        self.gang = gang
        self.meets_first = meets_first
        self.agreed_bytes: int | None = None
        self._key = key
        self._meeting: str | None = f"{key}/ready" if meets_first else key  # the next one. None: there is none

    def ready(self, limit_bytes: int, deadline: Deadline) -> int:
        """Meets before reading. Returns ``agreed_bytes``. No other meeting follows without ``expects_report``.

        Raises:
            CheckpointError: Another process has failed.
            BarrierTimeout: A process did not report in time.
        """
        answers = self.report(None, limit_bytes, deadline)
        raise_failure_in(answers)
        self.agreed_bytes = min(answer.limit_bytes for answer in answers)
        return self.agreed_bytes

    def expects_report(self) -> None:
        """Notes after ``ready`` that all processes report once more."""
        self._meeting = self._key

    def report(self, failure: Exception | None, limit_bytes: int, deadline: Deadline) -> list[ReplicaAnswer]:
        """Reports for this process at the next meeting. Returns the reports of all processes, by index.

        Raises:
            BarrierTimeout: A process did not report in time.
        """
        key, self._meeting = self._meeting, None
        assert key is not None
        kind, text = (None, "") if failure is None else (to_word(failure), str(failure) or repr(failure))
        message = json.dumps([limit_bytes, kind, text])
        answers = self.gang.gather(key, message, timeout_s=deadline.remaining_s())
        return [ReplicaAnswer(*json.loads(answer)) for answer in answers]

    @contextlib.contextmanager
    def reporting_errors(self, deadline: Deadline) -> Iterator[None]:
        """Reports an error that leaves the block, if the others wait for this process at a meeting."""
        try:
            yield
        except Exception as error:
            if self._meeting is not None:
                with contextlib.suppress(BarrierError):
                    self.report(error, 0, deadline)
            raise


def raise_failure_in(answers: Sequence[ReplicaAnswer]) -> None:
    """Raises an error if a process reported one. If all reported the same kind of error, this one is of that kind."""
    failed = [(process, answer) for process, answer in enumerate(answers) if answer.word is not None]
    if failed:
        text = "; ".join(f"process {process} could not read its part: {answer.failure}" for process, answer in failed)
        kinds = {answer.word for _, answer in failed}
        raise from_word(str(kinds.pop()) if len(kinds) == 1 else "error")(text)


def asks_one_replica(restore_args: Any) -> bool:
    """Returns whether some of ``restore_args`` ask one replica to read for all."""
    kind = SingleReplicaArrayRestoreArgs
    return any(isinstance(arg, kind) or is_orbax(arg, kind.__name__) for arg in jax.tree.leaves(restore_args))


def to_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of ``values`` as unsigned integers. Complex values get one more axis, of size two.

    Types that are smaller than a byte on the device are converted to a wider type first.
    """
    dtype = values.dtype
    wide = _widened(dtype)
    if wide is not None:
        values = values.astype(wide)
    if dtype.kind == "c":
        values = np.stack([values.real, values.imag], axis=-1)
    return values.view(f"u{values.dtype.itemsize}")


def from_bits(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns the values of type ``dtype`` whose bits ``to_bits`` returned. Runs on the device."""
    wide = _widened(dtype)
    if dtype.kind == "b":
        return bits != 0
    if wide is not None:
        return jax.lax.bitcast_convert_type(bits, wide).astype(dtype)
    if dtype.kind == "c":
        halves = jax.lax.bitcast_convert_type(bits, np.dtype(f"f{dtype.itemsize // 2}"))
        return jax.lax.complex(halves[..., 0], halves[..., 1])
    return jax.lax.bitcast_convert_type(bits, dtype)


def _widened(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Returns a type of whole bytes that holds all values of a type smaller than a byte. None for other types."""
    for kind, info, wide in ((jnp.integer, jnp.iinfo, np.int8), (jnp.floating, jnp.finfo, np.float32)):
        if jnp.issubdtype(dtype, kind) and info(dtype).bits < 8:
            return np.dtype(wide)
    return None
