"""The sync points of a session: where the training thread takes part in a preemption.

All of this belongs to the training thread, except ``hold`` and ``lost`` of ``LastState``, which the agreement's threads
call; it replaces ``_kept`` as a whole. At the agreed sync point either the session saves, or the training loop does
(``asked``). Both raise ``Preempted`` then, or let training continue after a drill.

**RunAhead** keeps the host from running far ahead of its devices. JAX dispatches steps asynchronously. Without a limit
the host may be dozens of steps ahead when a notice comes, and the devices must finish all of them before anything can
be saved. So before the host continues with a new step, an earlier step must be done: the one ``LIMIT`` before it, or
the one just before it if steps are long. Two steps in flight keep the devices busy while the host works between steps.
If a step takes a second or more, one step in flight is enough for that, and there is one step less to finish.

The state itself cannot be waited for: it is donated to the next step, which deletes it. Instead, a tiny program copies
one element of the smallest array, on one device of this process. The copy is done when the step is, as the element is
one of the step's outputs. The program is compiled at the first step. The smallest array is looked up once, and then
found by its path: going through a thousand leaves at every step would take milliseconds. A node whose children cannot
be looked up is flattened for that, by a function of its author, which may take as long. Then an array is waited for at
every n-th step alone, so that all this takes a two-hundredth of the steps' time. It takes more if flattening takes more
than half a millisecond, as no more than a tenth of a second goes unseen.

**LastState** is what the training loop handed to its last sync point, for a save after the loop broke off. A SIGTERM to
a whole process group ends the workers that load data. The loop then raises at the next batch, before the next sync
point. What can be saved is what it handed to the last one, if it is still there:

* **Arrays of JAX** never change, but the next step may have donated them. They are held by weak references, so that no
  device keeps a state for this that the loop has dropped. Once the process will soon be ended, they are held.
* **Arrays of numpy and host state** may change in place. So they are copied at each sync point. Where the arrays are
  large, as those of a state that is kept on the host, there may be no memory for a copy: then nothing is kept.
* **A container that is changed in place** has other leaves then. So the leaves are kept, and not the container.

Keeping takes a tenth of a microsecond for each array. Where it takes more than a two-hundredth of the time between two
sync points, as with slow host state, nothing is kept until the process will soon be ended.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint import machine, trace
from gracepoint.arguments import check_state, shown, step_number
from gracepoint.errors import AgreementError, GracepointError, Preempted, SettingsError
from gracepoint.jax_isolation import jit
from gracepoint.multihost.agreement import Handed
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.preemption.forecast import LIMIT
from gracepoint.threads import check_not_forked

logger = logging.getLogger(__name__)

#: A save counts as having taken at least this many seconds: 0 is not a duration that ``own_save_took`` accepts.
_LEAST_S = 1e-3


class SyncPoints:
    """Where the training thread takes part in a preemption.

    Args:
        coordinator: Says where all processes stop, and saves there.
        steps_at_risk: Returns the steps since the last committed one. None if no step is known to be committed.
        on_own_save: Called with the seconds that the training loop took to save, and with the step.
        clock: Returns monotonic seconds.

    Attributes:
        asked: The step at which the training loop was asked to save and has not called ``saved``. None otherwise.
        closed: True once there are no sync points any more.
        preempted: What was raised because the process is to exit. Raised again if the training loop swallowed it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        steps_at_risk: Callable[[], int | None],
        on_own_save: Callable[[float, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._arrive = coordinator.arrive
        self._look = coordinator.look
        self._steps_at_risk = steps_at_risk
        self._on_own_save = on_own_save
        self._clock = clock
        self._asked_at_s = 0.0
        self._grows = True  # False once a step was not above the one before
        self._pid = machine.process_id()
        self.asked: int | None = None
        self.closed = False
        self.preempted: Preempted | None = None

    def begin_step(self, step: Any, state: Any) -> int:
        """Begins the sync point after a step, and returns the step. Warns once if steps do not grow.

        Raises:
            As ``begin``. And ``SettingsError`` if ``state`` is none.
        """
        number = self.begin(step)
        check_state("step(step, state)", state)
        if number <= (before := self._coordinator.step) and self._grows:
            self._grows = False
            logger.warning(
                "step(%d) was called after step %d: expected the number of finished steps, which is 1 after the first "
                "step and grows with each. For a sync point that is not a step, call poll()",
                number,
                before,
            )
        return number

    def begin(self, step: Any, call: str = "step(step, state)") -> int:
        """Begins a sync point and returns its step.

        Raises:
            Preempted: The process is to exit. It is raised again if the training loop swallowed it.
            SettingsError: ``step`` is no step's number, or there are no sync points any more.
        """
        if self.closed:
            check_not_forked(self._pid, "the session")
            raise self.preempted or SettingsError("the session is closed: pass no sync points after close()")
        number = step if type(step) is int and step >= 0 else step_number(call, step)
        self._look()
        if self.asked is not None:  # checked here, too: settle's text would be built at every quiet step
            self.settle(f"training went on to step {number}")
        return number

    def arrive(self) -> bool:
        """Passes the sync point. Returns True if it is the agreed one.

        Raises:
            Preempted: There is no agreement. Not after a drill.
        """
        try:
            return self._arrive()
        except AgreementError as error:
            self.not_saved(error)
            return False

    def save(self, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> None:
        """Saves at the agreed sync point.

        Raises:
            Preempted: Unless it is a drill.
        """
        self._leave(self._coordinator.save(state, host_state))

    def ask(self) -> bool:
        """Passes the sync point. Returns True if the training loop is to save now.

        Raises:
            Preempted: There is no agreement. Not after a drill.
        """
        try:
            if not self._arrive():
                return False
            self._coordinator.meet()
        except GracepointError as error:
            self.not_saved(error)
            return False
        self.asked, self._asked_at_s = self._coordinator.step, self._clock()
        return True

    def saved(self, step: Any) -> None:
        """Notes that the training loop has saved.

        Raises:
            Preempted: Unless it is a drill.
            SettingsError: The training loop was not asked to save this step.
        """
        if self.asked is None or self.asked != step_number("saved(step)", step):
            place = "nowhere" if self.asked is None else f"at step {self.asked}"
            raise SettingsError(
                f"saved({shown(step)}): expected the step at which reached_preemption() is True, found that {place}"
            )
        self._on_own_save(max(self._clock() - self._asked_at_s, _LEAST_S), self.asked)
        self.asked = None
        self._leave(self._coordinator.saved())

    def settle(self, event: str) -> None:
        """Ends an epoch in which the training loop did not call ``saved``. Does nothing if it was not asked to save.

        Raises:
            Preempted: Unless it is a drill.
        """
        if self.asked is not None:
            step, self.asked = self.asked, None
            self.not_saved(AgreementError(f"{event} without saved({step}), which reached_preemption() had asked for"))

    def not_saved(self, error: Exception) -> None:
        """Ends the epoch, or a preemption before its epoch, without a save.

        Raises:
            Preempted: Unless it is a drill.
        """
        self._leave(self._coordinator.not_saved(error, self._steps_at_risk()))

    def _leave(self, outcome: Preempted | None) -> None:
        if outcome is not None:
            self.closed = True
            self.preempted = outcome
            trace.moment("Preempted is raised")
            raise outcome


#: The way to a leaf: at each node the key of the child, and its number among the children for nodes without such keys.
Path = Sequence[tuple[Any, int]]

# A state without arrays of JAX, such as one of numpy's, is searched for them once in so many calls.
_REST = 50
# What finding the array may take: so many seconds, or such a part of the steps' time.
_MOST_S, _MOST_PART = 50e-6, 0.005
# For how many seconds of steps none is waited for, at most.
_UNSEEN_S = 0.1


class RunAhead:
    """Used by the training thread alone. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: collections.deque[Any] = collections.deque()
        self._copy_first: Any = None
        self._path: Path | None = None  # to the array that is waited for
        self._found = False  # whether the newest look found an array
        self._every = 1  # an array is looked for in each so-many-th call
        self._calls = 0  # since it was looked for
        self._looked_s = -math.inf  # when that was
        self._took_s = 0.0  # how long that took

    def throttle(self, state: Any, limit: int = LIMIT) -> int:
        """Waits until no more than ``limit`` steps are in flight, and returns how many steps it has waited for.

        These are the steps since the last call that waited; 0 if this one has not. What passed between two calls that
        waited is the time of the steps; between others, it is that of the host.

        Args:
            state: The newest step's output.
            limit: How many steps may be in flight when this returns.

        Raises:
            jax.errors.JaxRuntimeError: That step failed on the device.
        """
        self._calls += 1
        if self._calls < self._every:
            return 0 if self._found else 1
        steps = self._calls if self._found else 1
        began_s = self._clock()
        array = None if self._path is None else _follow(self._path, state)
        if array is None:
            array, self._path = _smallest(state)
        self._found = array is not None
        self._rest(began_s)
        if array is None:  # no array of JAX in it: nothing runs ahead
            return 1
        if self._copy_first is None:
            self._copy_first = _compile()
        self._marks.append(self._copy_first(array.addressable_data(0)))
        while len(self._marks) > (limit if self._every == 1 else 1):
            self._marks.popleft().block_until_ready()
        return steps

    def _rest(self, began_s: float) -> None:
        """Sets in which call an array is looked for again, after a look that began at ``began_s``."""
        step_s = (began_s - self._looked_s) / self._calls
        took_s = self._clock() - began_s
        least_s = min(took_s, self._took_s)  # one look alone may be the machine's fault
        self._calls, self._looked_s, self._took_s = 0, began_s, took_s
        if not self._found:
            self._every = _REST
        elif least_s <= max(_MOST_S, _MOST_PART * step_s):
            self._every = 1
        else:
            steps = min(least_s / _MOST_PART, _UNSEEN_S) / step_s
            # Not at once: what a step takes is known only where one was waited for.
            self._every = max(1, math.ceil(min(steps, 2 * self._every)))

    def forget(self) -> None:
        """Drops the copies: arrays must not outlive the session."""
        self._marks.clear()


def _smallest(state: Any) -> tuple[Any, Path | None]:
    """Returns the smallest array that this process holds a part of, and its path. None twice if there is none."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = [(keys, leaf) for keys, leaf in leaves if _is_held_here(leaf)]
    if not arrays:
        return None, None
    keys, array = min(arrays, key=lambda entry: int(entry[1].size))
    path, node = [], state
    for key in keys:
        children, _ = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
        index, node = next((i, child) for i, (other, child) in enumerate(children) if other == key)
        path.append((key, index))
    if _follow(path, state) is not array:  # what a node has at a key is something else than the child of that key
        path = [(None, index) for _, index in path]
    return array, path


def _is_held_here(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.Array) and leaf.size > 0 and bool(leaf.sharding.addressable_devices)


def _follow(path: Path, state: Any) -> Any:
    """Returns the array at ``path``. None if the state has changed its form."""
    import jax

    flatten = jax.tree_util.default_registry.flatten_one_level
    node = state
    try:
        for key, index in path:
            try:
                node = _at(node, key)
            except (AttributeError, IndexError, KeyError, TypeError):
                node = flatten(node)[0][index]
    except (IndexError, TypeError, ValueError):  # fewer children, or none
        return None
    return node if _is_held_here(node) else None


def _at(node: Any, key: Any) -> Any:
    """Returns the child at ``key`` without going through the others. Raises an error of a look-up if it cannot."""
    import jax

    match key:
        case jax.tree_util.DictKey():
            return node[key.key]
        case jax.tree_util.SequenceKey():
            return node[key.idx]
        case jax.tree_util.GetAttrKey():
            return getattr(node, key.name)
    raise KeyError(key)


def _compile() -> Any:
    import jax

    def copy_first(x: Any) -> Any:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        # copy=True: an output that is merely the input would be its buffer, and be donated with it.
        return jax.numpy.array(x.reshape(-1)[0], copy=True)

    return jit(copy_first)


#: What keeping may take at each sync point, in seconds, or as a part of the time since the one before if that is more.
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
    """What the training loop handed to its last sync point.

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
        self._begun: tuple[int, int, Any] | None = None  # the sync point in progress
        self._skipped, self._skips = 0, 1
        self.saves_at: int | None = None
        self.handed_in: threading.Thread | None = None

    def begin(self, ordinal: int, step: int, state: Any) -> None:
        """Notes what is handed to the sync point that begins now; ``ordinal`` is that of the one before."""
        self._begun = (ordinal, step, state)

    def interrupted(self) -> tuple[int, int, Any] | None:
        """Returns the arguments of ``begin`` if that sync point was not passed. Then it is over."""
        point, self._begun = self._begun, None
        return point

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
                problem = f"it has {size >> 20} MiB in arrays of numpy, and no more than {_MOST_BYTES >> 20} are copied"
                return _Kept(ordinal, step, (), None, {}, problem)
            held = [weakref.ref(leaf) if type(leaf) in arrays else _constant(leaf) for leaf in leaves]
            return _Kept(ordinal, step, held, form, self._host_state())
        except Exception as error:  # noqa: BLE001 - training continues; a save by itself says what is wrong
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
        problem, kept = self.lost(point), self._kept
        if problem or kept is None or kept.ordinal != point:
            raise AgreementError(problem or f"no state was handed to sync point {point}")
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
