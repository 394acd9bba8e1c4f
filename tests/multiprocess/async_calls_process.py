"""One process of a job whose calls run in a worker; run by test_async_calls.py. Argument: a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.multiprocess.launcher import here

STEPS = 60


def main() -> None:
    place = here()
    place.initialize_jax()
    from gracepoint.async_calls import AsyncCallFailed, AsyncCallsQueue, AsyncRequest
    from tests.unit.async_calls.fakes import functions

    folder, index = Path(sys.argv[1]), place.process_index
    queue, answers = AsyncCallsQueue(persistent=True), list[list[int]]()
    for step in range(STEPS):
        if step % 20 == 0:
            target = str(folder / f"{step} of {index}")
            queue.schedule_async_request(AsyncRequest(functions.write, (target, "saved"), []))
        answers.append(queue.maybe_finalize_async_calls())
    answers.append(queue.maybe_finalize_async_calls(blocking=True))
    print("answers", answers)
    queue.schedule_async_request(AsyncRequest(functions.fail if index else None, ("full disk",) if index else (), []))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except AsyncCallFailed as failed:
        print("failed in", sorted(failed.failures))
    queue.close()


main()
