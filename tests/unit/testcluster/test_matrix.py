"""The matrix of versions: each row chooses versions that are there, for all programs or for the API server alone."""

from __future__ import annotations

import pytest

from tests.testcluster import parts
from tests.testcluster.matrix import ROWS, MatrixRow


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_chooses_versions_that_can_be_built(row: MatrixRow, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    assert row.version.startswith(f"v{row.kubernetes}.") or not row.kubernetes
    assert parts.part("jobset").version.startswith(f"v0.{row.jobset[2:]}") or not row.jobset
    usual = parts.part("kubernetes").version
    assert (usual == row.version) is (not row.alone), "the other programs are of the usual version"


@pytest.mark.parametrize("version", [parts.OLDEST_KUBERNETES, parts.NEWEST_KUBERNETES])
def test_other_version_is_one_build_for_both_kinds_of_rows(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = parts.part(f"kubernetes-{version}").built
    monkeypatch.setenv("TESTCLUSTER_KUBERNETES", version)
    assert parts.part("kubernetes").built == alone
