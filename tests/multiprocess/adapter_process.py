"""Runs an example of ``examples/adapters``, and tells its losses: ``adapter_process.py NAME FOLDER STEPS PREEMPT_AT``.

With a step to be preempted at, the process group gets a SIGTERM then. Without one (0), the rest is done, and then
all of it once more from the beginning in another folder, to compare with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gracepoint.session import session as session_module

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
_NOTICED_S = 60.0
#: Without it, training could be over before the thread that agrees with others on a step has a turn.
_STEP_S = 0.05


def recorder(file: Path, preempt_at: int) -> Callable[[int, float], None]:
    def report(step: int, loss: float) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps([step, loss.hex()]) + "\n")
        if step == preempt_at:
            os.killpg(0, signal.SIGTERM)
            _wait_until_noticed()
        elif 0 < preempt_at < step:
            time.sleep(_STEP_S)

    return report


def _wait_until_noticed() -> None:
    until_s = time.monotonic() + _NOTICED_S
    while session_module._open is None or not session_module._open._coordinator.noticed:
        assert time.monotonic() < until_s, f"no session knew of the SIGTERM within {_NOTICED_S} s"
        time.sleep(0.01)


if __name__ == "__main__":
    name, folder, steps, preempt_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    sys.path.insert(0, str(EXAMPLES))
    example = __import__(name)
    example.main(str(folder / "run"), steps, recorder(folder / "run.jsonl", preempt_at))
    example.main(str(folder / "reference"), steps, recorder(folder / "reference.jsonl", 0))
