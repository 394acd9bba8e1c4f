"""What a forked child does with what it has inherited: it forgets it, and uses nothing of its parent's.

A child of ``os.fork``, such as a data loader's worker, has copies of all objects of its parent, and none of its
threads. It shares the parent's connections and file locks, and a lock that another thread held at the fork stays held
in the child for ever. So in the child an object drops what the parent still uses (``forget_in_child``), without a word
to the other side. What a child may never do, such as a save of its parent's, raises (``check_not_forked``).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from gracepoint import machine
from gracepoint.errors import ForkedChild

logger = logging.getLogger(__name__)

T = TypeVar("T")
_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def forget_in_child(owner: T, forget: Callable[[T], object]) -> None:
    """Has each child that is forked from now on call ``forget(owner)`` at once, if ``owner`` still exists.

    ``forget`` must take no lock: a thread of the parent may have held it.
    """
    _owners[owner] = forget


def is_forked(pid: int) -> bool:
    """Returns whether this process is not ``pid``, but was forked from it."""
    return machine.process_id() != pid


def check_not_forked(pid: int, what: str) -> None:
    """Raises ForkedChild if this process is not ``pid``, which made ``what``."""
    if is_forked(pid):
        raise ForkedChild(
            f"{what} belongs to process {pid}, and this is process {machine.process_id()}, which was forked from it: a "
            "forked child has none of its parent's threads, and would write beside it. Use it in the process that made "
            "it; in the child, make another"
        )


def _forget() -> None:
    for owner, forget in list(_owners.items()):
        try:
            forget(owner)
        except Exception as error:  # noqa: BLE001 - the child goes on, and the others are forgotten
            logger.debug("a forked child keeps something of its parent's: %r", error)


os.register_at_fork(after_in_child=_forget)
