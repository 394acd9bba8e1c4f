"""The short form of the soak: each way to disrupt a job once, in a random order (``make test-soak``)."""

from __future__ import annotations

import secrets

import pytest

from tests import testcluster
from tests.soak import whole
from tests.soak.kinds import KINDS
from tests.soak.plan import plan
from tests.soak.report import rendered

#: With the cluster, the comparison and the removal, the whole test takes about ten minutes.
_MINUTES = 7.0


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_job_survives_each_kind_of_disruption_in_a_row() -> None:
    if reason := testcluster.why_not():
        pytest.skip(f"no cluster on this machine: {reason}")
    seed = secrets.randbelow(10**6)
    found = whole.run(plan(seed, len(KINDS), list(KINDS)), seed=seed, say=print, minutes=_MINUTES)
    assert found.outcomes
    assert not found.problems, f"seed {seed}\n{rendered(found)}"
