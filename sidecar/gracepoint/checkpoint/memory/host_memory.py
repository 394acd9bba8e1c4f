"""How much memory snapshots may take: what the machine has, and what containers leave of it.

Linux kills a container that goes over its limit without a word, so it is asked before memory is reserved. What the
page cache holds counts as used in a container, and is given up on demand: it can be had. Processes of the job that
share a machine or a container share what it has, so they look together.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping

from gracepoint.errors import CheckpointError, GracepointError
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

# For the other processes to come to where memory is taken: as long as their first step may take them longer.
_MEETING_TIMEOUT_S = 900.0

_WHAT_TO_DO = (
    "give the container more memory, or raise the limit, or spread the state over more processes, or save without a "
    "copy (no periodic saves)"
)


@contextlib.contextmanager
def telling(gang: ProcessGroup, key: str) -> Iterator[None]:
    """Tells the other processes, who wait or will for ``key``, of any error that leaves the block."""
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
    """Makes sure that snapshots may be taken: in all processes, or in none. Collective.

    Args:
        needed_bytes: Of host memory, in this process.
        limit_bytes: The setting, of each process; None: no limit.
        gang: The processes.
        key: Below which they meet.
        left: As ``left_by_pool``; asked when all have let go of what they had.

    Raises:
        CheckpointError: They may not; says what to do.
        BarrierError: Another process did not come in time, or has failed.
    """
    here = gang.process_index
    words = gang.gather(f"{key}/needed", json.dumps([needed_bytes, limit_bytes]), timeout_s=_MEETING_TIMEOUT_S)
    needs = [json.loads(word) for word in words]
    found = gang.gather(f"{key}/left", json.dumps(dict(left())), timeout_s=_MEETING_TIMEOUT_S)
    pools: dict[str, dict[int, int]] = {}  # what each process has seen to be left
    for process, word in enumerate(found):
        for pool, left_bytes in json.loads(word).items():
            pools.setdefault(pool, {})[process] = left_bytes
    problems: dict[int, str] = {}
    for process, (size_bytes, most_bytes) in enumerate(needs):
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
    if problems:
        process = here if here in problems else min(problems)
        where = "this process" if process == here else f"process {process}"
        raise CheckpointError(
            f"a save in the background needs {needs[process][0]} bytes of host memory in {where} for a snapshot of "
            f"its part of the state, and {problems[process]}: {_WHAT_TO_DO}"
        )
