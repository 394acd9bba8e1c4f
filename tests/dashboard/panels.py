"""The panels of the chart's dashboard, and what their queries return."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.dashboard import recording

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "charts/gracepoint/files/dashboard.json").read_text()
)
#: Between two points of a panel: six hours are some 700 pixels wide.
STEP_S = 30
#: As Grafana computes it: at least four scrapes, and one more than a step.
RATE_S = max(STEP_S + recording.SCRAPE_S, 4 * recording.SCRAPE_S)
_TIMEOUT_S = 60


def panels() -> Iterator[dict[str, Any]]:
    """Those with queries."""
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            yield panel


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """The series that a query of a panel returns for the time of the recording.

    Args:
        url: Prometheus.
        expression: The query as it stands in the dashboard.
    """
    form = {
        "query": expression.replace("$__rate_interval", f"{RATE_S}s"),
        "start": recording.BEGIN_S,
        "end": recording.END_S,
        "step": STEP_S,
    }
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(form)}"
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def legend(target: dict[str, Any], series: dict[str, Any]) -> str:
    """The series's name in the legend, as Grafana fills in the format."""
    labels = series["metric"]
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), target.get("legendFormat", ""))


def points(series: dict[str, Any]) -> list[float]:
    """The values that are numbers."""
    return [value for _, text in series["values"] if not math.isnan(value := float(text))]
