"""Where training begins: at a checkpoint of this job, at one of another run, or at a new state."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from gracepoint.session.host_state_registry import HostStates

if TYPE_CHECKING:
    from gracepoint.checkpoint.engine import StepCheckpointer
    from gracepoint.checkpoint.restoring.restore_step import Restored
    from gracepoint.checkpoint.restoring.start_state import Asked
    from gracepoint.checkpoint.storage.storage_path import UserPath

logger = logging.getLogger(__name__)

RESTORE_TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True)
class RestoredFrom:
    """The checkpoint that ``Session.restore`` has restored.

    Attributes:
        directory: The directory that it is in.
        step: Its step there.
        own: True if this job saved it. False if it came from ``from_``.
        changed: What is different from the run that saved it, as text: number of processes, devices, mesh, batch.
            Empty if nothing is.
    """

    directory: str
    step: int
    own: bool
    changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Start:
    """Where training begins.

    Attributes:
        state: The train state.
        step: The step of this job that was restored. None if this job begins again.
        restored: Where the state came from. None if it is a new state.
        note: The text that the step was saved with, in process 0. None: there is none.
    """

    state: Any
    step: int | None
    restored: RestoredFrom | None
    note: str | None = None


def start_from(
    restored: Restored | None,
    checkpointer: StepCheckpointer,
    request: Asked,
    base: UserPath | None,
    values: HostStates,
) -> Start:
    """Begins at the restored step of this job, or else at another run's newest step, or else at the first state.

    Collective.

    Args:
        restored: The newest step of this job. None if there is none.
        checkpointer: The checkpoint engine of this job.
        request: The arguments of ``Session.restore``.
        base: The directory of the other run. None: there is none.
        values: The host states, which are set if a step of this job was restored.

    Raises:
        As ``Session.restore``.
    """
    with request.telling():
        if restored is not None:
            values.set(restored.host_state, restored.step)
            logger.info("restored step=%d", restored.step)
            changed = (*restored.changed, *values.changed)
            if changed and checkpointer.is_primary:
                logger.warning("the job continues in another form step=%d %s", restored.step, ", ".join(changed))
            origin = RestoredFrom(checkpointer.directory, restored.step, own=True, changed=changed)
            return Start(restored.state, restored.step, origin, restored.note)
        if base is not None:
            base_state = checkpointer.restore_base(
                base,
                request.like,
                timeout_s=RESTORE_TIMEOUT_S,
                restore_args=request.restore_args,
                options=request.options,
            )
            logger.warning(
                "training begins at step 0 with the state of another run from=%s step=%d", base, base_state.step
            )
            return Start(base_state.state, None, RestoredFrom(str(base), base_state.step, own=False))
    logger.warning("no checkpoint was restored, training begins at step 0")
    return Start(request.first_state(), None, None)
