"""The alerts and the dashboard that the chart brings: what they ask for exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from gracepoint_operator.metrics import Metrics
from tests.chart.conftest import Helm, Render
from tests.chart.helm import CHART
from tests.chart.objects import Json, of_kind, one

ALERTS: list[Json] = [
    rule for group in yaml.safe_load((CHART / "files/alerts.yaml").read_text()) for rule in group["rules"]
]
DASHBOARD: Json = json.loads((CHART / "files/dashboard.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def panels() -> Iterator[Json]:
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            yield panel


def exported(*, accounts: bool = True) -> dict[str, set[str]]:
    """The series of the operator: name -> labels, without those that the scrape adds."""
    found: dict[str, set[str]] = {}
    for family in Metrics(accounts=accounts).families():
        kind = family.type
        names = {
            "counter": [f"{family.name}_total"],
            "gauge": [family.name],
            "histogram": [f"{family.name}_{part}" for part in ("bucket", "sum", "count")],
        }[kind]
        found |= {name: {"le"} if name.endswith("_bucket") else set() for name in names}
    return found


def checked(expression: str) -> set[str]:
    """Parses an expression. Returns the names of the metrics that it asks for."""
    plain = expression.replace("$__rate_interval", "5m")
    promql_parser.parse(plain)
    return set(re.findall(r"\bgracepoint_\w+", plain))


EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in ALERTS),
    *(pytest.param(t["expr"], id=f"{p['title']} {t['refId']}") for p in panels() for t in p["targets"]),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_is_promql_about_metrics_that_are_exported(expression: str) -> None:
    names = checked(expression)
    assert names
    assert names <= exported().keys()


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for panel in panels() for target in panel["targets"] for name in checked(target["expr"])}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}


def test_what_is_only_observed_is_not_shown_as_a_loss() -> None:
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    found = [expression for expression in expressions if "gracepoint_preemption_phases_total" in expression]
    assert found
    assert all('mode!="Observe"' in expression for expression in found)


def test_the_panels_of_the_dashboard_neither_overlap_nor_leave_its_width() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def unit_of(panel: Json, target: Json) -> str:
    config = panel["fieldConfig"]
    own = [
        o["properties"]
        for o in config["overrides"]
        if o["matcher"] == {"id": "byFrameRefID", "options": target["refId"]}
    ]
    units = [each["value"] for properties in own for each in properties if each["id"] == "unit"]
    return str((units or [config["defaults"]["unit"]])[0])


@pytest.mark.parametrize(
    ("panel", "target"),
    [pytest.param(p, t, id=f"{p['title']} {t['refId']}") for p in panels() for t in p["targets"]],
)
def test_every_line_has_the_unit_of_what_it_shows(panel: Json, target: Json) -> None:
    expression = target["expr"]
    if " / scalar(" in expression:
        expected = {"percentunit"}
    elif "histogram_quantile" in expression or re.search(r"_seconds\b(?!_)", expression):
        expected = {"s"}
    elif "rate(" in expression:
        expected = {"reqps", "cps"}
    else:
        expected = {"short"}
    assert unit_of(panel, target) in expected


def test_a_value_that_stands_alone_between_gaps_is_drawn() -> None:
    """Quantiles have no value while nothing happens. Points that are never shown leave such a value out."""
    graphs = [panel for panel in panels() if panel["type"] == "timeseries"]
    assert {panel["fieldConfig"]["defaults"]["custom"]["showPoints"] for panel in graphs} == {"auto"}


@pytest.mark.parametrize(
    ("title", "alert_names"),
    [
        ("Connected pods", []),
        ("Pods not connected", ["GracepointPodsNotConnected"]),
        ("Oldest watch", ["GracepointWatchStale"]),
        ("Canary", ["GracepointCanarySilent"]),
        ("Certificate expires in", ["GracepointCertificateExpiresSoon", "GracepointCertificateExpires"]),
        ("Not recorded", ["GracepointNotRecorded"]),
    ],
)
def test_a_number_changes_its_colour_where_its_alerts_fire(title: str, alert_names: list[str]) -> None:
    """A number without thresholds of its own is red above 80 in Grafana, whatever it counts."""
    (panel,) = [panel for panel in panels() if (panel["type"], panel["title"]) == ("stat", title)]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[0]["value"] is None
    ends = [re.search(r"[<>] ([\d.]+)( \* 86400)?$", r["expr"]) for n in alert_names for r in ALERTS if r["alert"] == n]
    values = [float(end[1]) * (86400 if end[2] else 1) for end in ends if end]
    # The counts are whole numbers, so more than 0 is 1.
    assert [float(step["value"]) for step in steps[1:]] == [value or 1.0 for value in values]
    assert ("red" if values and values[0] > 86400 else "green") == steps[0]["color"]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_every_alert_says_what_to_do_and_where_that_is_written(rule: Json) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    said = rule["annotations"]
    assert said.keys() == {"summary", "description", "runbook_url"}
    assert len(re.findall(r"[.]( |$)", said["description"])) >= 2, "what it means, and what to do"
    page, _, anchor = said["runbook_url"].partition("#")
    assert PAGE.parents[1] / page == PAGE
    headings = re.findall(r"^#+ (.+)$", PAGE.read_text(), re.M)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    assert anchor == rule["alert"].lower()


def test_alerts_lead_to_where_the_pages_are_served(render: Render) -> None:
    place = "https://docs.example.com/operations.html"
    rendered = render("prometheusRule.enabled=true", f"prometheusRule.runbookUrl={place}")
    for rule in ALERTS:
        found = alert(rendered, rule["alert"])
        assert found is not None
        assert found["annotations"]["runbook_url"] == f"{place}#{rule['alert'].lower()}"


def test_the_page_of_alerts_names_no_other() -> None:
    named = set(re.findall(r"^### (Gracepoint\w+)$", PAGE.read_text(), re.M))
    assert named == {rule["alert"] for rule in ALERTS}


def test_alerts_and_dashboard_are_installed_if_asked_for(render: Render) -> None:
    assert not of_kind(render(), "PrometheusRule")
    rules = one(render("prometheusRule.enabled=true", "prometheusRule.labels.release=p"), "PrometheusRule")
    assert rules["metadata"]["labels"]["release"] == "p"
    assert [rule for group in rules["spec"]["groups"] for rule in group["rules"]] == ALERTS
    found = of_kind(render("dashboard.enabled=true"), "ConfigMap")
    (made,) = [o for o in found if "dashboard" in o["metadata"]["name"]]
    assert json.loads(made["data"]["gracepoint.json"]) == DASHBOARD
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_alerts_and_dashboard_ask_for_no_account_that_is_switched_off(render: Render) -> None:
    rendered = render("prometheusRule.enabled=true", "dashboard.enabled=true", "metrics.accounts=false")
    rules = [rule for group in one(rendered, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    (made,) = [o for o in of_kind(rendered, "ConfigMap") if "dashboard" in o["metadata"]["name"]]
    shown = [panel for panel in json.loads(made["data"]["gracepoint.json"])["panels"] if panel["type"] != "row"]
    asked = [rule["expr"] for rule in rules] + [t["expr"] for panel in shown for t in panel["targets"]]
    without = exported(accounts=False)
    assert {name for expression in asked for name in checked(expression)} <= without.keys()
    gone = [p for p in panels() if any(checked(t["expr"]) - without.keys() for t in p["targets"])]
    assert gone
    assert len(shown) + len(gone) == len(list(panels()))


def alert(rendered: list[Json], name: str) -> Json | None:
    rules = [rule for group in one(rendered, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    return next((rule for rule in rules if rule["alert"] == name), None)


def test_the_threshold_of_every_alert_can_be_set(render: Render) -> None:
    rules = [rule for rule in ALERTS if rule["alert"] != "GracepointDown"]
    settings = [f"prometheusRule.alerts.{rule['alert']}.threshold=7.5" for rule in rules]
    rendered = render("prometheusRule.enabled=true", *settings)
    for rule in rules:
        found = alert(rendered, rule["alert"])
        assert found is not None
        assert re.search(r"[<>] 7\.5( \* 86400)?$", found["expr"]), found["expr"]
        promql_parser.parse(found["expr"])
        assert {**found, "expr": rule["expr"]} == rule


def test_an_alert_can_be_left_out_or_made_slower(render: Render) -> None:
    place = "prometheusRule.alerts"
    rendered = render(
        "prometheusRule.enabled=true",
        f"{place}.GracepointSaveTooLate.enabled=false",
        f"{place}.GracepointLoopLag.for=30m",
        f"{place}.GracepointLoopLag.severity=info",
    )
    assert alert(rendered, "GracepointSaveTooLate") is None
    lag = alert(rendered, "GracepointLoopLag")
    assert lag is not None
    assert (lag["for"], lag["labels"]["severity"]) == ("30m", "info")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("GracepointLopLag.threshold=1", "there is no alert of this name"),
        ("GracepointLoopLag.treshold=1", "treshold"),
        ("GracepointDown.threshold=1", "this alert has no threshold"),
    ],
)
def test_a_change_of_no_alert_is_refused(template: Helm, setting: str, said: str) -> None:
    done = template("--set", "prometheusRule.enabled=true", "--set", f"prometheusRule.alerts.{setting}")
    assert done.returncode != 0
    assert said in done.stderr
