"""The metrics that the operator shows, as a scrape reads them."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gracepoint_operator.observability.metrics import Metrics


def families(metrics: Metrics) -> list[Metric]:
    """Returns the families, without those with the time at which each counter was made, which the library adds."""
    found = text_string_to_metric_families(metrics.text().decode())
    return [family for family in found if not family.name.endswith("_created")]
