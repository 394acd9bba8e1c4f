"""``python -m tests.testcluster.matrix``: the core tests on other versions of Kubernetes and JobSet than usual.

Each row builds its parts, runs its tests in processes of their own, and ends with a line for the table in
``docs/install.md``. A row that fails does not keep the others from running.

Processes: one ``pytest`` at a time, to its end or its time limit. Threads: none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.testcluster import cache, parts
from tests.testcluster.api import ClusterError
from tests.testcluster.shell import say

_LIMIT_S = 3600.0
#: What a lone API server of that version can show: CRDs, admission policies, watches, records, the command line.
_API = ("tests/api_server", "-m", "not newest and not controllers")
#: What every workload gets, on a whole cluster: notices, hold, resume bit for bit, restarts, record, suspension. And
#: what counts as a restart.
_CLUSTER = (
    *("tests/cluster/test_workloads.py", "tests/cluster/test_contract.py", "tests/restart_budget"),
    *("-m", "(cluster or long) and not controllers"),
)


@dataclass(frozen=True)
class MatrixRow:
    """A combination of versions, and what is run on it.

    Attributes:
        name: What it is called on the command line.
        kubernetes: The version of Kubernetes: the end of the folder's name under ``parts/``. Empty: the usual one.
        jobset: The same for JobSet.
        alone: Whether it is about an API server alone.
    """

    name: str
    kubernetes: str
    jobset: str
    alone: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """What chooses these versions."""
        what = "TESTCLUSTER_API_SERVER" if self.alone else "TESTCLUSTER_KUBERNETES"
        chosen = {what: self.kubernetes, "TESTCLUSTER_JOBSET": self.jobset}
        return {name: value for name, value in chosen.items() if value}

    @property
    def tests(self) -> tuple[str, ...]:
        """Arguments of pytest."""
        return _API if self.alone else _CLUSTER

    @property
    def version(self) -> str:
        """The version of Kubernetes."""
        name = f"kubernetes-{self.kubernetes}" if self.alone and self.kubernetes else "kubernetes"
        return parts.part(name).version

    def build(self) -> None:
        """Builds what is missing."""
        if self.alone:
            parts.build(("etcd", "kubernetes", "helm", f"kubernetes-{self.kubernetes}"))
        else:
            parts.build()


ROWS = (
    MatrixRow("oldest-api", parts.OLDEST_KUBERNETES, "", alone=True),
    MatrixRow("newest-api", parts.NEWEST_KUBERNETES, parts.NEWEST_JOBSET, alone=True),
    MatrixRow("newest-jobset", "", parts.NEWEST_JOBSET),
    MatrixRow("oldest", parts.OLDEST_KUBERNETES, ""),
    MatrixRow("newest", parts.NEWEST_KUBERNETES, "0.12"),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the rows; returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.testcluster.matrix", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which rows: {', '.join(row.name for row in ROWS)} (all of them)")
    names = parser.parse_args(arguments).names
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of {', '.join(row.name for row in ROWS)}")
    lines = [_run(row) for row in ROWS if not names or row.name in names]
    print("\n".join(["| row | Kubernetes | JobSet | result |", "|---|---|---|---|", *lines]))
    return 0 if all(line.endswith("passed |") for line in lines) else 1


def _run(row: MatrixRow) -> str:
    os.environ.update(row.environment)
    try:
        versions = f"{row.version} | {parts.part('jobset').version}"
        say(f"{row.name}: Kubernetes {versions.replace(' | ', ', JobSet ')}")
        result = _result(row)
    except ClusterError as error:
        versions, result = f"{row.kubernetes} | {row.jobset}", f"not built: {str(error).splitlines()[0]}"
    finally:
        for name in row.environment:
            del os.environ[name]
    return f"| {row.name} | {versions} | {result} |"


def _result(row: MatrixRow) -> str:
    began_s = time.monotonic()
    row.build()
    say(f"{row.name}: built after {time.monotonic() - began_s:.0f} s")
    argv = [sys.executable, "-m", "pytest", "-n", "0", "-v", *row.tests]
    done = subprocess.run(argv, cwd=cache.REPOSITORY, timeout=_LIMIT_S, check=False)
    return "passed" if done.returncode == 0 else f"failed (exit status {done.returncode})"


if __name__ == "__main__":
    sys.exit(main())
