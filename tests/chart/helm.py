"""The helm that this machine has, for the chart's tests and for what is generated from the chart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.testcluster.parts import program

CHART = Path(__file__).parents[2] / "charts" / "gracepoint"
#: Built without its Makefile, helm believes in a very old Kubernetes. The oldest that the chart takes.
OLDEST_KUBERNETES = "1.30.0"


def helm_program() -> str:
    """The one that the variable HELM names, else the one on the PATH, else that of the test cluster's parts.

    Raises:
        ClusterError: There is none.
    """
    return os.environ.get("HELM") or shutil.which("helm") or str(program("helm"))
