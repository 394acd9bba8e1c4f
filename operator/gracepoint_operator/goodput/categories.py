"""What the time of a workload can go into, and sums of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Category(StrEnum):
    """What the time of a workload goes into. At any moment it is exactly one of these."""

    TRAINING = "training"  # steps whose results were kept
    SAVING = "saving"  # training was stopped by a save: periodic, at a preemption, or at a drill
    RECOMPUTATION = "recomputation"  # steps whose results were lost, so that they had to be computed again
    LEAVING = "leaving"  # from the end of training until the last process has ended
    WAITING = "waiting"  # there are no pods: the workload is queued, suspended, or about to be created again
    SCHEDULING = "scheduling"  # pods exist, and some are not bound to a node
    IMAGE = "image"  # all pods are bound, and some containers do not run: images, volumes, init containers
    JOIN = "join"  # all containers run, and the processes have not all joined: imports, and waiting for each other
    RESTORE = "restore"  # the processes have joined, and the state is not there
    COMPILE = "compile"  # the state is there, and the first step is not done
    UNKNOWN = "unknown"  # containers run, and no process has said what it does


#: The parts of a restart, in their order.
RESTART = (
    Category.LEAVING,
    Category.WAITING,
    Category.SCHEDULING,
    Category.IMAGE,
    Category.JOIN,
    Category.RESTORE,
    Category.COMPILE,
)
#: While these last, processes run, so that they can be disrupted.
RUNNING = (
    Category.TRAINING,
    Category.SAVING,
    Category.RECOMPUTATION,
    Category.JOIN,
    Category.RESTORE,
    Category.COMPILE,
    Category.UNKNOWN,
)

#: Milliseconds by category. A category without an entry has none.
Spent = Mapping[Category, int]


def added(one: Spent, other: Spent) -> Spent:
    """Returns the sums by category."""
    sums = {category: one.get(category, 0) + other.get(category, 0) for category in Category}
    return {category: sum_ms for category, sum_ms in sums.items() if sum_ms}


def total_ms(spent: Spent, categories: tuple[Category, ...] = tuple(Category)) -> int:
    """Returns the milliseconds of some categories together."""
    return sum(spent.get(category, 0) for category in categories)
