"""Decides when a part of this process makes no progress, and says what this and other processes do.

A part, such as the training thread, shows ``marks`` that change with every progress. If they have not changed for the
limit, the part is stalled. Three things are no stall: a stage that computes by itself, such as a restore or a
compilation, as long as the process uses processor time; a wait for what is not there, such as storage that process 0
tries to reach; and a time in which the whole process was stopped.
``StallDetector`` is pure: the times are given to it. The training thread sets the stage in ``Activities``, and the
stall thread calls it. All other functions have no state, and any thread may call them.

What another process does is what the kernel and py-spy say. py-spy can read the stack of a process that is stopped or
hangs in C code. It is not a dependency. It is used if it is installed in the image, and if the kernel lets this process
trace the other one (``ptrace(2)``). If it does not end in time, it is killed, and a daemon thread
("gracepoint-py-spy") waits for its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gracepoint import trace
from gracepoint.process_group import SaveProgress, StorageWait

#: A process that computes uses at least this share of one core.
_COMPUTES = 0.05
_MOST_LOOK_EVERY_S = 5.0
#: A look that comes this much later than it should, in seconds, shows that the process did not run.
_LATE_S = 5.0


@dataclasses.dataclass(frozen=True)
class Activity:
    """What one part of the process does now.

    Attributes:
        part: The part's name.
        stage: What it does, as text.
        marks: Values that change with every progress.
        order: How far the part is, as numbers that can be compared with those of other processes: less is further back.
        reached: The same as text.
        thread_id: The thread that does it. None if it is not known.
        computes: True if the stage uses processor time as long as it makes progress.
        may_last: True if it waits for what is not there. That is no stall.
    """

    part: str
    stage: str
    marks: tuple[object, ...]
    order: tuple[int, ...] = ()
    reached: str = ""
    thread_id: int | None = None
    computes: bool = False
    may_last: bool = False


@dataclasses.dataclass(frozen=True)
class Stalled:
    """A part that makes no progress, and for how many seconds."""

    activity: Activity
    for_s: float


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a look has shown.

    Attributes:
        stalled: Parts that have reached the limit since the look before.
        over: Parts that were stalled, and make progress again or have ended.
        paused_s: Seconds for which the whole process did not run. 0 if it ran.
    """

    stalled: list[Stalled] = dataclasses.field(default_factory=list)
    over: list[str] = dataclasses.field(default_factory=list)
    paused_s: float = 0.0


@dataclasses.dataclass
class _Part:
    marks: tuple[object, ...]
    since_s: float
    reported: bool = False


def look_every_s(*limits_s: float) -> float:
    """Returns the seconds between two looks for stalls with these limits."""
    return min(_MOST_LOOK_EVERY_S, *(limit_s / 10 for limit_s in limits_s))


class StallDetector:
    """Decides which parts of this process are stalled.

    Args:
        limit_s: Seconds without progress after which a part is stalled.
        look_every_s: Seconds between two looks.
    """

    def __init__(self, limit_s: float, look_every_s: float) -> None:
        self._limit_s = limit_s
        self._look_every_s = look_every_s
        self._parts: dict[str, _Part] = {}
        self._looked_s: float | None = None
        self._cpu_s = 0.0

    def look(self, now_s: float, cpu_s: float, activities: Sequence[Activity]) -> Changes:
        """Compares what the parts do now with what they did before.

        Args:
            now_s: Monotonic seconds.
            cpu_s: Processor seconds that the process has used.
            activities: What the parts do. A part that does nothing is left out.
        """
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        computing = cpu_s - self._cpu_s >= _COMPUTES * passed_s
        paused = passed_s > 2 * self._look_every_s + _LATE_S
        self._looked_s, self._cpu_s = now_s, cpu_s
        changes = Changes(paused_s=passed_s - self._look_every_s if paused else 0.0)
        for name in self._parts.keys() - {activity.part for activity in activities}:
            if self._parts.pop(name).reported:
                changes.over.append(name)
        for activity in activities:
            part = self._parts.get(activity.part)
            works = activity.may_last or (activity.computes and computing)
            moves = part is None or part.marks != activity.marks or paused or works
            if part is None or moves:
                if part is not None and part.reported:
                    changes.over.append(activity.part)
                self._parts[activity.part] = _Part(activity.marks, now_s)
            elif not part.reported and now_s - part.since_s >= self._limit_s:
                part.reported = True
                changes.stalled.append(Stalled(activity, now_s - part.since_s))
        return changes


logger = logging.getLogger(__name__)

_FRAMES = 12
#: Parts of the names of JAX's functions that make a program, as in jax 0.4.35 to 0.10.
_COMPILERS = ("compil", "trace_to", "lower_")


def is_compiling(thread_id: int) -> bool:
    """Returns whether the thread traces, lowers or compiles a JAX program. Reads the thread's stack."""
    frame = _frame(thread_id)
    while frame is not None:
        code = frame.f_code
        if "/jax/_src/" in code.co_filename and any(word in code.co_name for word in _COMPILERS):
            return True
        frame = frame.f_back
    return False


def _frame(thread_id: int) -> types.FrameType | None:
    """Returns what the thread runs. None if it has ended."""
    return sys._current_frames().get(thread_id)  # noqa: SLF001 - documented, despite its name


def stack_of(thread_id: int | None) -> str:
    """Returns the innermost frames of a thread, as lines of a traceback. Empty if it has ended or is None."""
    frame = None if thread_id is None else _frame(thread_id)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-_FRAMES:])


def log_stall(stalled: Stalled, stack: str, words: str = "") -> None:
    """Writes the one line of the log that says where a part makes no progress, and its stack.

    Args:
        stalled: The part.
        stack: Where its thread is.
        words: What else is known.
    """
    logger.error(
        "no progress part=%s stage=%s seconds=%.0f%s\n%s",
        stalled.activity.part,
        stalled.activity.stage,
        stalled.for_s,
        f" {words}" if words else "",
        stack,
    )


def dump_all_stacks() -> None:
    """Writes the stacks of all threads to the standard error stream."""
    try:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    except (io.UnsupportedOperation, AttributeError, ValueError, OSError):  # the stream is no file, or there is none
        logger.info("the stacks of all threads cannot be written to the standard error stream")


#: Stages of a process's part of a save, in order.
_STAGES = ("", "written", "durable", "committed")
_IN_WORDS = {"written": "all written but not durable", "durable": "its part durable", "committed": "committed"}


class Activities:
    """What the parts of this process do now, for the stall watch. Made in the training thread.

    Args:
        place: Returns the number of the latest sync point, the step, and whether an epoch is open.
        saving: Returns how far the background save is. None if none is in progress.
        written: Returns how many bytes are written of the save that the training thread makes itself.
        waits: Returns the wait for storage. None if none is waited for.
    """

    def __init__(
        self,
        place: Callable[[], tuple[int, int, bool]],
        saving: Callable[[], SaveProgress | None],
        written: Callable[[], int],
        waits: Callable[[], StorageWait | None],
    ) -> None:
        self._place = place
        self._saving = saving
        self._written = written
        self._waits = waits
        self._thread_id = threading.get_ident()
        self._doing = ("", False, False)  # the stage, whether it computes, and whether it saves

    @contextlib.contextmanager
    def at(self, stage: str, *, computes: bool = False, saves: bool = False) -> Iterator[None]:
        """Names what the training thread does within the block.

        Args:
            stage: As text.
            computes: True if the process reads and computes by itself for as long as that takes, without a sync point.
            saves: True if the thread saves, or waits for the background save. Each byte that is written is progress.
        """
        before, self._doing = self._doing, (stage, computes, saves)
        try:
            with trace.span(stage):
                yield
        finally:
            self._doing = before

    def __call__(self) -> list[Activity]:
        sync_point, step, in_epoch = self._place()
        stage, computes, saves = self._doing
        compiles = is_compiling(self._thread_id)
        words = "compilation" if compiles else stage or ("emergency save" if in_epoch else "training")
        saving, waits = self._saving(), self._waits()
        in_background = [] if saving is None else [_background_save(saving)]
        written = (self._written(), *(save.marks for save in in_background)) if saves else ()
        training = Activity(
            "training",
            f"{words} after step {step}" if step else words,
            (sync_point, stage, in_epoch, compiles, written, waits),
            (sync_point,),
            f"sync point {sync_point}",
            self._thread_id,
            computes=compiles or computes,
            may_last=waits is not None and waits.tries is None,
        )
        return [training, *in_background]


def _background_save(saving: SaveProgress) -> Activity:
    # Processes have parts of different sizes, so only the stages can be compared.
    progress = f"{saving.done_bytes:,} of {saving.total_bytes:,} bytes written"
    return Activity(
        "background save",
        f"background save of step {saving.step}",
        (saving.step, saving.stage, saving.done_bytes),
        (saving.step, _STAGES.index(saving.stage)),
        f"step {saving.step}, {_IN_WORDS.get(saving.stage, progress)}",
        saving.thread_id,
    )


_PROC = Path("/proc")
_PY_SPY = "py-spy"
_PY_SPY_S = 8.0
_STACK_CHARACTERS = 3000
_ERROR_CHARACTERS = 300
_STATES = {
    "T": "is stopped by a signal (state T)",
    "t": "is stopped by a debugger (state t)",
    "D": "waits in the kernel and cannot be interrupted (state D{where})",
    "S": "waits in the kernel (state S{where})",
    "R": "computes, and does not let its other threads run (state R)",
    "Z": "has ended (state Z)",
    "X": "has ended (state X)",
}


@dataclasses.dataclass(frozen=True)
class ProcessAt:
    """Where a process is, for processes in other containers.

    Attributes:
        process_id: The process's PID in its own PID namespace.
        namespace: Inode number of that namespace. 0: it is not known.
        thread_id: The kernel's number of its training thread.
    """

    process_id: int
    namespace: int
    thread_id: int

    @classmethod
    def here(cls, thread_id: int) -> ProcessAt:
        """Returns where this process is, and its thread of that number."""
        return cls(os.getpid(), _namespace(), thread_id)

    @property
    def visible(self) -> bool:
        """Whether this process sees that one: both are in the same PID namespace."""
        return self.namespace != 0 and self.namespace == _namespace()


@dataclasses.dataclass(frozen=True)
class SeenProcess:
    """What was seen of a process.

    Attributes:
        does: What it does, as text. Empty if it cannot be seen.
        stack: Its stack, as lines of a traceback. Empty if it could not be read.
        why_not: Why there is no stack. Empty if there is one.
    """

    does: str
    stack: str = ""
    why_not: str = ""


def look(at: ProcessAt, py_spy_s: float = _PY_SPY_S) -> SeenProcess:
    """Looks at a process. Takes up to ten seconds.

    Args:
        at: The process.
        py_spy_s: How many seconds py-spy may take for the stack.
    """
    if not at.visible:
        problem = "it is in another container, and the pod has no shareProcessNamespace"
        return SeenProcess("", why_not=problem)
    stack, why_not = _stack(at, py_spy_s)
    return SeenProcess(_state(at), stack, why_not)


def _state(at: ProcessAt) -> str:
    thread = _PROC / str(at.process_id) / "task" / str(at.thread_id)
    try:
        lines = (thread / "status").read_text().splitlines()
    except OSError:
        return "has ended, or its training thread has"
    letter = next((line.split()[1] for line in lines if line.startswith("State:")), "")
    where = ""
    with contextlib.suppress(OSError):  # forbidden, or not compiled in
        where = (thread / "wchan").read_text().strip("0\n")
    words = _STATES.get(letter, f"is in state {letter or 'unknown'}")
    return words.format(where=f", in {where}" if where else "")


def _stack(at: ProcessAt, within_s: float) -> tuple[str, str]:
    """Returns the stack of the training thread, and why there is none. One of the two is empty."""
    program = shutil.which(_PY_SPY) or shutil.which(_PY_SPY, path=str(Path(sys.executable).parent))
    if program is None:
        return "", f"{_PY_SPY} is not installed in this image"
    # Without --nonblocking, it would stop and continue the process.
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(at.process_id)]
    try:
        spy = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return "", f"{_PY_SPY} failed: {error}"
    try:
        dumped, errors = spy.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        spy.kill()
        # It may hang in the kernel, as the process that it looks at does. So nobody else waits for its end.
        threading.Thread(target=spy.communicate, name="gracepoint-py-spy", daemon=True).start()
        return "", f"{_PY_SPY} did not end within {within_s:g} s"
    if spy.returncode != 0:
        complaint = " ".join(errors.split())[-_ERROR_CHARACTERS:]
        return (
            "",
            f"{_PY_SPY} could not read it, which takes the right to trace it (docs: troubleshooting): {complaint}",
        )
    return _as_traceback(dumped, at.thread_id)


def _as_traceback(dumped: str, thread_id: int) -> tuple[str, str]:
    """Returns the frames of one thread, the innermost one last, of what py-spy prints."""
    try:
        threads = json.loads(dumped)
        frames = next(each["frames"] for each in threads if each["os_thread_id"] == thread_id)
        lines = [f'  File "{each["filename"]}", line {each["line"]}, in {each["name"]}' for each in frames[:_FRAMES]]
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        return "", f"{_PY_SPY} did not print the training thread ({error!r})"
    return "".join(f"{line}\n" for line in reversed(lines))[-_STACK_CHARACTERS:], ""


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
