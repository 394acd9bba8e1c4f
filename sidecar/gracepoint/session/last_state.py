"""What the training loop handed to its last sync point, for a save after the loop broke off.

A SIGTERM to a whole process group ends the workers that load data. The loop then raises at the next batch, before the
next sync point. What can be saved is what it handed to the last one, if it is still there:

* **Arrays of JAX** never change, but the next step may have donated them. They are held by weak references, so that no
  device keeps a state for this that the loop has dropped. Once the process will soon be ended, they are held.
* **Arrays of numpy and host state** may change in place. So they are copied at each sync point. Where the arrays are
  large, as those of a state that is kept on the host, there may be no memory for a copy: then nothing is kept.
* **A container that is changed in place** has other leaves then. So the leaves are kept, and not the container.

Keeping takes a tenth of a microsecond for each array. Where it takes more than a two-hundredth of the time between two
sync points, as with slow host state, nothing is kept until the process will soon be ended.

The training thread makes all calls but ``hold`` and ``lost``, which are for the agreement's threads. It replaces
``_kept`` as a whole.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint.errors import AgreementError
from gracepoint.multihost.sync_point.timekeeper import Handed

log = logging.getLogger(__name__)

#: What keeping may take at each sync point, in seconds, or as a part of the time since the one before if that is more.
_MOST_S, _MOST_PART = 50e-6, 0.005
#: How much of numpy is copied at each sync point, at most.
_MOST_BYTES = 1 << 28
#: How long after a SIGTERM the loop is held, in case that the one of another process breaks off.
_LINGER_S = 0.2
#: Where it takes more, that is measured again after 8 times as many sync points as before, and at most after so many.
_MEASURED_AGAIN = 64


@dataclasses.dataclass(frozen=True)
class _Kept:
    ordinal: int
    step: int
    leaves: Sequence[Callable[[], Any]]
    form: Any  # the tree without its leaves
    host_state: Mapping[str, Any]
    error: str = ""  # why the rest is not known


@dataclasses.dataclass(frozen=True)
class HandedState:
    """What was handed to a sync point.

    Attributes:
        step: The step.
        state: The train state after it.
        host_state: The per-process state that is not in it, by name.
    """

    step: int
    state: Any
    host_state: Mapping[str, Any]


class LastState(Handed):
    """See the module.

    Args:
        host_state: Returns the per-process state that is not in the train state, as a copy that does not change.
        pressing: Returns True if the process will soon be ended.
        signalled: Returns True if a signal may have ended processes on which the loop of another process depends.
        clock: Returns monotonic seconds.

    Attributes:
        saves_at: The sync point whose state this process saves, or has saved. None before that.
        handed_in: The thread that handed the last state. None before the first.
    """

    def __init__(
        self,
        host_state: Callable[[], Mapping[str, Any]],
        pressing: Callable[[], bool],
        signalled: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._host_state = host_state
        self._pressing = pressing
        self._signalled = signalled
        self._clock = clock
        self._kept: _Kept | None = None
        self._held: Sequence[Any] | None = None  # keeps the arrays of ``_kept``; None while nothing presses
        self._took_s = self._took_before_s = 0.0  # the last two times
        self._at_s = -math.inf
        self._begun: tuple[int, int, Any] | None = None  # the sync point under way
        self._skipped, self._skips = 0, 1
        self.saves_at: int | None = None
        self.handed_in: threading.Thread | None = None

    def begin(self, ordinal: int, step: int, state: Any) -> None:
        """Notes what is handed to the sync point that begins now; ``ordinal`` is that of the one before."""
        self._begun = (ordinal, step, state)

    def interrupted(self) -> tuple[int, int, Any] | None:
        """Returns the arguments of ``begin`` if that sync point was not passed. Then it is over."""
        begun, self._begun = self._begun, None
        return begun

    def keep(self, ordinal: int, step: int, state: Any) -> None:
        """Keeps what was handed to a sync point in place of what was handed to the one before."""
        self._begun = None
        self.handed_in = threading.current_thread()
        began_s = self._clock()
        since_s, self._at_s = began_s - self._at_s, began_s
        took_s = min(self._took_s, self._took_before_s)  # one alone may be the machine's fault
        slow = took_s > max(_MOST_S, _MOST_PART * since_s)
        if slow and self._skipped < self._skips and not self._pressing():
            self._skipped += 1
            took = f"to keep it takes {took_s * 1e3:.2g} ms of a step of {since_s * 1e3:.2g} ms"
            self._kept = _Kept(ordinal, step, (), None, {}, f"nothing pressed then, and {took}")
            return
        self._skipped, self._skips = 0, min(8 * self._skips, _MEASURED_AGAIN) if slow else 1
        self._kept = kept = self._copied(ordinal, step, state)
        self._held = [leaf() for leaf in kept.leaves] if self._pressing() else None
        self._took_s, self._took_before_s = self._clock() - began_s, self._took_s

    def _copied(self, ordinal: int, step: int, state: Any) -> _Kept:
        import jax
        import numpy as np

        try:
            leaves, form = jax.tree_util.tree_flatten(state)
            # Asked once for each type: this is done at every step, for thousands of leaves.
            kinds = {type(leaf): leaf for leaf in leaves}
            arrays = {kind for kind, leaf in kinds.items() if isinstance(leaf, jax.Array)}
            numpy = {kind for kind, leaf in kinds.items() if isinstance(leaf, np.ndarray)}
            if numpy and (size := sum(leaf.nbytes for leaf in leaves if type(leaf) in numpy)) > _MOST_BYTES:
                why = f"it has {size >> 20} MiB in arrays of numpy, and no more than {_MOST_BYTES >> 20} are copied"
                return _Kept(ordinal, step, (), None, {}, why)
            held = [weakref.ref(leaf) if type(leaf) in arrays else _constant(leaf) for leaf in leaves]
            return _Kept(ordinal, step, held, form, self._host_state())
        except Exception as error:  # noqa: BLE001 - training goes on; a save by itself says what is wrong
            return _Kept(ordinal, step, (), None, {}, f"{type(error).__name__}: {error}")

    def has(self, point: int) -> bool:
        """Returns True if something was handed to a sync point, and to none after it."""
        return self._kept is not None and self._kept.ordinal == point and self.saves_at is None

    def hold(self) -> None:
        """Notes that there is a notice: what is kept now must stay until the next sync point, if it is still there."""
        kept = self._kept
        if kept is not None and self._held is None:
            self._held = [leaf() for leaf in kept.leaves]

    def linger_s(self) -> float:
        """As ``Handed``."""
        return _LINGER_S if self._signalled() else 0.0

    def lost(self, point: int) -> str:
        """Returns why what was handed at a sync point cannot be saved. Empty if it can be, or may come yet."""
        kept, saves_at = self._kept, self.saves_at
        if saves_at is not None:
            return "" if saves_at == point else f"it saves at sync point {saves_at} already, not {point}"
        if kept is None or kept.ordinal < point:
            return ""
        if kept.ordinal > point:
            return f"it was at sync point {kept.ordinal} already, and the state of sync point {point} is gone"
        if kept.error:
            return f"the state of step {kept.step} was not kept: {kept.error}"
        if any(_is_gone(leaf()) for leaf in kept.leaves):
            return f"the state of step {kept.step} is gone: it was donated to the next step, or deleted"
        return ""

    def take(self, point: int) -> HandedState:
        """Returns what was handed at a sync point, to be saved.

        Raises:
            AgreementError: It is not there. The message says why.
        """
        why, kept = self.lost(point), self._kept
        if why or kept is None or kept.ordinal != point:
            raise AgreementError(why or f"no state was handed to sync point {point}")
        state = kept.form.unflatten([leaf() for leaf in kept.leaves])
        return HandedState(kept.step, state, kept.host_state)

    def forget(self) -> None:
        """Drops what is kept."""
        self._kept = self._held = self._begun = None


def _constant(leaf: Any) -> Callable[[], Any]:
    import numpy as np

    kept = leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    return lambda: kept


def _is_gone(leaf: Any) -> bool:
    return leaf is None or bool(getattr(leaf, "is_deleted", bool)())
