"""Runs in the trainer's container, in the place of the example: the same training, on storage that takes its time.

Nothing of the step that ``STUCK_STEP`` names is written until it is chosen what a preemption does; then it goes on,
slowly. Lies beside ``slow_storage.py`` in a folder that the container mounts.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

from gracepoint.preemption.reporter import EpochProgress

EXAMPLE = "/app"
#: The state has about a megabyte.
_THEN_BYTES_PER_S = 500e3


def main() -> None:
    """Trains as the flags say."""
    storage = importlib.import_module("slow_storage").SlowStorage(setattr)
    storage.only = f"/{os.environ['STUCK_STEP']}.gracepoint-tmp"
    storage.bytes_per_s = 0.0
    chose = EpochProgress.chose

    def chose_and_go_on(progress: EpochProgress, plan: Any) -> None:
        chose(progress, plan)
        storage.bytes_per_s = _THEN_BYTES_PER_S

    EpochProgress.chose = chose_and_go_on  # type: ignore[method-assign,assignment]
    sys.path.insert(0, EXAMPLE)
    runpy.run_path(f"{EXAMPLE}/train.py", run_name="__main__")


if __name__ == "__main__":
    main()
