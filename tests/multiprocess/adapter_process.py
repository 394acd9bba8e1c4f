"""Runs an example of ``examples/adapters``, and tells its losses: ``adapter_process.py NAME FOLDER STEPS PREEMPT_AT``.

With a step to be preempted at, the process group gets a SIGTERM then. Without one (0), the rest is done, and then
all of it once more from the beginning in another folder, to compare with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"


def recorder(file: Path, preempt_at: int) -> Callable[[int, float], None]:
    def report(step: int, loss: float) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps([step, loss.hex()]) + "\n")
        if step == preempt_at:
            os.killpg(0, signal.SIGTERM)

    return report


if __name__ == "__main__":
    name, folder, steps, preempt_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    sys.path.insert(0, str(EXAMPLES))
    example = __import__(name)
    example.main(str(folder / "run"), steps, recorder(folder / "run.jsonl", preempt_at))
    example.main(str(folder / "reference"), steps, recorder(folder / "reference.jsonl", 0))
