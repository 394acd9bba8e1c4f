"""What the panels of the dashboard show of six recorded hours, by the queries that Grafana would send to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboard.panels import legend, panels, points, query
from tests.dashboard.prometheus import prometheus
from tests.testcluster import parts

pytestmark = pytest.mark.promtool

TARGETS = [
    pytest.param(panel, target, id=f"{panel['title']} {target['refId']}")
    for panel in panels()
    for target in panel["targets"]
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if parts.missing(("prometheus",)):
        pytest.skip("not built: prometheus; run: make test-alerts")
    with prometheus(tmp_path_factory.mktemp("prometheus")) as made:
        yield made


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_every_query_returns_values_and_each_series_has_a_name(
    url: str, panel: dict[str, Any], target: dict[str, Any]
) -> None:
    found = query(url, target["expr"])
    assert any(points(series) for series in found), "the panel would be empty"
    if panel["type"] == "stat":
        assert len(found) == 1
    else:
        names = [legend(target, series) for series in found]
        assert all(names)
        assert len(set(names)) == len(names), "two lines have the same name"
