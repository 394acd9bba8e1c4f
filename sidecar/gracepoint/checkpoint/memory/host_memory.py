"""Checks that snapshots fit into the memory of the machine and into the limits of containers.

Linux kills a container that exceeds its memory limit without notice. So the available memory is checked before any is
reserved. The page cache counts as used memory in a container, but Linux reclaims it on demand, so it counts as
available here. Processes of the job that share a machine or a container share its memory, so they check it together.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping

from gracepoint.errors import CheckpointError, GracepointError
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

# The answer names at most this many processes, so that it stays small in a large gang.
_SHOWN = 64
# Seconds to wait for the other processes to reach this point. Their first step may take so much longer.
_MEETING_TIMEOUT_S = 900.0

_WHAT_TO_DO = (
    "give the container more memory, or raise the limit, or spread the state over more processes, or save without a "
    "copy (no periodic saves)"
)


@contextlib.contextmanager
def telling(gang: ProcessGroup, key: str) -> Iterator[None]:
    """Reports any error that leaves the block to the other processes, which wait for ``key`` now or later."""
    try:
        yield
    except BaseException as error:
        try:
            gang.fail(key, error)
        except GracepointError as unreachable:
            logger.warning("the other processes could not be told of an error: %s", unreachable)
        raise


def check_fits(
    needed_bytes: int,
    limit_bytes: int | None,
    *,
    gang: ProcessGroup,
    key: str,
    left: Callable[[], Mapping[str, int]],
) -> None:
    """Checks that the snapshots of all processes fit into memory. The result is the same in all processes. Collective.

    Args:
        needed_bytes: Host memory in bytes that this process needs.
        limit_bytes: The setting ``host_memory_limit_bytes`` of this process. None: no limit.
        gang: The processes of the job.
        key: Prefix of the keys under which the processes exchange values.
        left: Returns the available bytes of each memory pool, by a name that processes sharing the pool have in
            common. It is called after all processes have released the memory that they held.

    Raises:
        CheckpointError: The snapshots do not fit. The message says what to do.
        BarrierError: Another process did not arrive in time, or has failed.
    """
    here = gang.process_index
    gang.barrier(f"{key}/needed", timeout_s=_MEETING_TIMEOUT_S)  # all have released what they held
    mine = json.dumps([needed_bytes, limit_bytes, dict(left())])
    problems = json.loads(gang.reduce(f"{key}/left", mine, _problems, timeout_s=_MEETING_TIMEOUT_S))
    if problems:
        process, size_bytes, problem = next((found for found in problems if found[0] == here), problems[0])
        where = "this process" if process == here else f"process {process}"
        raise CheckpointError(
            f"a save in the background needs {size_bytes} bytes of host memory in {where} for a snapshot of "
            f"its part of the state, and {problem}: {_WHAT_TO_DO}"
        )


def _problems(words: list[str]) -> str:
    """Returns the first processes whose snapshots do not fit, each with its need and the reason, as JSON."""
    needs = [json.loads(word) for word in words]
    pools: dict[str, dict[int, int]] = {}  # by pool: the available bytes that each process has seen
    for process, (_, _, left) in enumerate(needs):
        for pool, left_bytes in left.items():
            pools.setdefault(pool, {})[process] = left_bytes
    problems: dict[int, str] = {}
    for process, (size_bytes, most_bytes, _) in enumerate(needs):
        if most_bytes is not None and size_bytes > most_bytes:
            problems[process] = f"host_memory_limit_bytes allows {most_bytes}"
    for seen in pools.values():
        together_bytes, left_bytes = sum(needs[process][0] for process in seen), min(seen.values())
        if together_bytes <= left_bytes:
            continue
        others = ", ".join(map(str, seen))
        alone = f"this process can still have {left_bytes}"
        shared = f"processes {others} share a machine or container, need {together_bytes} and can have {left_bytes}"
        problems |= dict.fromkeys(seen, alone if len(seen) == 1 else shared)
    told = [[process, needs[process][0], problems[process]] for process in sorted(problems)]
    return json.dumps(told[:_SHOWN])
