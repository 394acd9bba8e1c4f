"""Calls several functions at once, each of which mostly waits for the store.

The calling thread and additional threads each take the next function. The additional threads end with the call. They
are daemons: if the store hangs, the process can still exit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from gracepoint.checkpoint.storage import time_limit


def run(acts: Sequence[Callable[[], object]], *, threads: int) -> None:
    """Calls all of ``acts``. After an error no more of them are called. Raises it when those that run have ended."""
    numbers = itertools.count()  # each call takes one number, in any thread
    errors: list[BaseException] = []
    limit = time_limit.current()

    def help_() -> None:
        with time_limit.ended_by(limit):
            work()

    def work() -> None:
        while not errors and (number := next(numbers)) < len(acts):
            try:
                acts[number]()
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                errors.append(error)

    helpers = []
    for number in range(1, min(len(acts), threads)):
        helper = threading.Thread(target=help_, name=f"gracepoint: requests {number}", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the system has no more threads: the others do the work
            break
        helpers.append(helper)
    work()
    # Each helper ends with the function that it runs. A request of a function ends with its timeout or with the limit.
    # A call to a file system ends when the kernel returns: it has no other bound, in this thread either.
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
