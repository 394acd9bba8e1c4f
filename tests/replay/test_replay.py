"""The short form of the replay: nine kinds of faults on a JobSet and a Job (``make test-replay``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import testcluster
from tests.replay import report, results, trace
from tests.replay.__main__ import run
from tests.replay.kinds import KINDS
from tests.testcluster import parts
from tests.testcluster.providers import CONTEXT_VARIABLE

# Notices of a minute or more, so that a busy machine has time. Where the operator hears every end, its account is held
# to a percent.
ON_JOBSET = ("aws-spot", "pod-deleted", "process-0-killed", "suspended", "drain", "metadata", "out-of-memory")
ON_JOB = ("operator-killed-before-notice", "process-1-killed")


@pytest.mark.replay
@pytest.mark.timeout(3600)
def test_jobs_go_on_after_nine_kinds_of_faults(tmp_path: Path) -> None:
    if os.environ.get(CONTEXT_VARIABLE):
        pytest.skip(f"it disturbs all nodes of a cluster of its own, and not of {CONTEXT_VARIABLE}")
    if reason := testcluster.why_not():
        pytest.skip(f"no cluster on this machine: {reason}")
    faults = [
        trace.Fault(7, number, job, workload, kind, 15, number % 2)
        for number, (job, workload, kind) in enumerate(
            [
                *((1, trace.JOBSET, kind) for kind in ON_JOBSET),
                *((2, trace.JOB, kind) for kind in ON_JOB),
            ],
            1,
        )
    ]
    assert all(fault.workload in KINDS[fault.kind].workloads for fault in faults)
    run(faults, say=print, folder=tmp_path)
    found = results.read(tmp_path / results.FILE.name)
    ends = results.read_ends(tmp_path / results.ENDS.name)
    assert report.problems(found, ends) == [], report.rendered(found, ends)
    assert [result.fault for result in found] == [fault.fault for fault in faults]
    assert len(ends) == 2
    if not parts.missing(("prometheus",)):
        assert {result.alerts for result in found} == {""}, "its alerts are judged"
