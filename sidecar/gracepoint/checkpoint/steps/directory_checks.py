"""Checks of a checkpoint directory: all processes share it, no other job uses it, and it has no newer step."""

from __future__ import annotations

import json
import time

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import lease, listing
from gracepoint.checkpoint.steps.lease import Lease
from gracepoint.checkpoint.storage.checks import appears
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, CheckpointExists
from gracepoint.process_group import ProcessGroup

#: Seconds after which a file that another machine wrote must be visible on a network file system.
_APPEARS_S = 5.0


def check_shared(paths: Layout, gang: ProcessGroup, *, key: str, attempt: str, deadline: Deadline) -> None:
    """Checks that all processes see the same directory, and not each a disk of its own. Collective.

    Without this check the problem shows only at the first save. In a job without periodic saves that is the emergency
    save.

    Raises:
        CheckpointError: Process 0 cannot write there, or another process does not see what it wrote.
        BarrierError: Other processes did not take part in time.
    """
    if gang.process_count == 1:
        return
    probe, problem = paths.shared_probe(attempt), None
    if gang.process_index == 0:
        try:
            paths.root.make_folder_durably()
            probe.touch()
            problem = ""
        except OSError as error:
            problem = str(error)
    problem = gang.broadcast(f"{key}/written", problem, timeout_s=deadline.remaining_s())
    if problem:
        raise CheckpointError(f"process 0 cannot write to {paths.root}: {problem}")
    sees = "yes" if appears(probe, within_s=_APPEARS_S, sleep=time.sleep) else "no"
    answers = gang.gather(f"{key}/seen", sees, timeout_s=deadline.remaining_s())
    if gang.process_index == 0:
        probe.delete()
    blind = [str(process) for process, answer in enumerate(answers) if answer == "no"]
    if blind:
        raise CheckpointError(
            f"{paths.root} is not the same storage in all processes: process {', '.join(blind)} does not see "
            f"what process 0 wrote there. Mount one volume that all pods share at this path"
        )


def claim(
    paths: Layout, gang: ProcessGroup, *, key: str, job: str, attempt: str, deadline: Deadline, start: str | None = None
) -> Lease | None:
    """Takes the directory's lease in process 0. Collective.

    ``start`` is the same argument as in ``StepCheckpointer.claim``.

    Returns:
        The lease in process 0. None in the other processes.

    Raises:
        CheckpointError: Another job, or another cluster of the same start, uses the directory, or process 0
            cannot write there. Raised in all processes.
        BarrierError: Process 0 did not answer in time.
    """
    held, problem = None, None
    if gang.process_index == 0:
        patience = Deadline.after(min(lease.PATIENCE_S, deadline.remaining_s()), deadline.clock)
        try:
            paths.root.make_folder_durably()
            paths.root.check_usable()
            held = lease.claim(paths, job, attempt, deadline=patience, sleep=time.sleep, start=start)
            problem = ""
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"process 0 cannot write to {paths.root}: {error}"
    problem = gang.broadcast(key, problem, timeout_s=deadline.remaining_s())
    if problem:
        raise CheckpointError(problem)
    return held


def check_nothing_newer(paths: Layout, gang: ProcessGroup, *, key: str, step: int, deadline: Deadline) -> None:
    """Checks that the directory has no complete step that is ``step`` or newer. Collective.

    Raises:
        CheckpointExists: There is such a step. Raised in all processes.
        CheckpointError: Process 0 cannot list the directory. Raised in all processes.
        BarrierError: Process 0 did not answer in time.
    """
    newest, problem = None, ""
    if gang.process_index == 0:
        try:
            newest = max(listing.complete_steps(paths), default=None)
        except OSError as error:
            problem = f"process 0 cannot look into {paths.root}: {error}"
    word = json.dumps([newest, problem]) if gang.process_index == 0 else None
    newest, problem = json.loads(gang.broadcast(key, word, timeout_s=deadline.remaining_s()))
    if problem:
        raise CheckpointError(problem)
    if newest is not None and newest >= step:
        raise CheckpointExists(
            f"save({step}): {paths.root} has a complete step {newest}, and nothing was restored. The next restore "
            "would take that one, not what is saved now: restore first, save to another directory, or say force=True"
        )
