"""Makes sure that a checkpoint directory is one storage for all processes, no other job's, and has nothing newer."""

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

#: How late a file of another machine may be seen on a network file system.
_APPEARS_S = 5.0


def check_shared(paths: Layout, gang: ProcessGroup, *, key: str, attempt: str, deadline: Deadline) -> None:
    """Makes sure that the directory is not a disk of each process. Collective.

    Nothing else would tell before the first save, which for a job without periodic saves is the emergency.

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

    ``start`` as in ``Checkpointer.claim``.

    Returns:
        The lease; None in the other processes.

    Raises:
        CheckpointError: Another job, or another cluster of the same start, uses the directory, or process 0
            cannot write there; in all processes.
        BarrierError: Process 0 did not tell in time.
    """
    held, problem = None, None
    if gang.process_index == 0:
        patience = Deadline.after(min(lease.PATIENCE_S, deadline.remaining_s()), deadline.clock)
        try:
            paths.root.make_folder_durably()
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
    """Makes sure that what begins with ``step`` would not be behind what is there. Collective.

    Raises:
        CheckpointExists: There is a complete step as new or newer; in all processes.
        CheckpointError: Process 0 cannot look; in all processes.
        BarrierError: Process 0 did not tell in time.
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
