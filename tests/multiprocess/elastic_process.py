"""Trains on records of which each must be used once: ``elastic_process.py DIRECTORY STEPS``.

Prints what ``elastic_training`` tells: the records that this process takes in each step, and what is restored.
"""

from __future__ import annotations

import logging
import sys

import gracepoint
from tests import elastic_training
from tests.multiprocess.launcher import here, say

_PACE_S = 0.02


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    directory, steps = sys.argv[1], int(sys.argv[2])
    here().initialize_jax()
    elastic_training.train(gracepoint.attach(directory, grace_period_s=20.0), steps, _PACE_S, say)


if __name__ == "__main__":
    main()
