"""What only the machine under a local cluster can do to a trainer: stop or kill its process without a word."""

from __future__ import annotations

import contextlib

import psutil
import pytest

from demo.training import TrainingRun
from gracepoint.wire.names import Env


def trainer_process(run: TrainingRun, pod: str) -> psutil.Process:
    """The process of a trainer, as this machine sees it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(Env.POD_NAME) == pod and process.environ().get(Env.NAMESPACE) == run.namespace:
                return process
    pytest.skip(f"the trainers' processes are not on this machine (looked for the one of pod {pod})")
