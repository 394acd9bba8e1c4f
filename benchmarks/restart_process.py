"""One process of ``benchmarks.restart``: the example's trainer, which says what it took to its first step.

restart_process.py ADDRESS PROCESS BEGAN_UNIX_S FLAGS...
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import jax

from gracepoint.session.session import Session

TRAIN = Path(__file__).parents[1] / "examples" / "transformer" / "train.py"


def main(address: str, process: str, began_unix_s: str, *flags: str) -> None:
    jax.distributed.initialize(address, 2, int(process))
    step = Session.step
    told = False

    def step_and_tell(self: Session, number: int, state: Any) -> None:
        nonlocal told
        step(self, number, state)
        if not told:
            told = True
            programs = self._programs.programs
            taken = {"cpu_s": time.process_time(), "wall_s": time.time() - float(began_unix_s)}
            print("told", json.dumps({"step": number, "compiled": programs.compiled, **taken}), flush=True)

    Session.step = step_and_tell  # type: ignore[assignment, method-assign]
    sys.path.insert(0, str(TRAIN.parent))
    sys.argv = [str(TRAIN), *flags]
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
