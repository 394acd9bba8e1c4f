"""The alerts, judged by Prometheus's own promtool: its check of the rules, and series for which each fires or not."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.chart.helm import CHART
from tests.chart.objects import Json
from tests.testcluster import parts

pytestmark = pytest.mark.promtool

_TIMEOUT_S = 60
_MINUTES = 60
_DAY_S = 86_400
#: Two replicas, as Prometheus labels what it scrapes.
_A, _B = 'pod="gp-a",instance="10.0.0.1:8080"', 'pod="gp-b",instance="10.0.0.2:8080"'


class Case(NamedTuple):
    """Series for which an alert stays quiet, and others for which it fires. One value a minute, for an hour.

    Attributes:
        quiet, fires: Values by series.
        after: The minute at which it fires at the latest.
        labels: Those of the alert, beside its severity.
        value: What the summary shows as the value.
    """

    quiet: Mapping[str, str]
    fires: Mapping[str, str]
    after: int
    labels: Mapping[str, str] = {}
    value: str = ""


def counter(
    name: str, labels: str = "", quiet: str = "0x60", fires: str = "0x20 1x39"
) -> tuple[dict[str, str], dict[str, str]]:
    """The same series, counting nothing and counting something."""
    series = f"{name}{{{_A}{',' + labels if labels else ''}}}"
    return {series: quiet}, {series: fires}


LAG = "gracepoint_loop_lag_seconds_bucket"
PHASES = "gracepoint_preemption_phases_total"
EXPIRY = f'gracepoint_certificate_expiry_timestamp_seconds{{{_A},certificate="server"}}'

CASES: dict[str, Case] = {
    "GracepointPreemptionLost": Case(
        {f'{PHASES}{{{_A},phase="Expired",cause="Drain",mode="{mode}"}}': "0x20 1x39" for mode in ("Observe", "Drill")},
        {f'{PHASES}{{{_A},phase="Expired",cause="Drain",mode="Enforce"}}': "0x20 1x39"},
        22,
        {"cause": "Drain"},
    ),
    "GracepointSaveTooLate": Case(*counter("gracepoint_spare_seconds_bucket", 'le="0.0"'), 22),
    "GracepointNoticesUndelivered": Case(*counter("gracepoint_notices_undelivered_total"), 22),
    "GracepointPodsNotConnected": Case(
        {f"gracepoint_pods_not_connected{{{_A}}}": "0x10 3x3 0x47"},  # for less than five minutes
        {f"gracepoint_pods_not_connected{{{_A}}}": "0x10 3x50"},
        17,
        value="3",
    ),
    "GracepointPolicyMissing": Case(
        {f"gracepoint_workloads_without_policy{{{_A}}}": "0x10 2x6 0x44"},  # for less than ten minutes
        {f"gracepoint_workloads_without_policy{{{_A}}}": "0x10 2x50"},
        22,
        value="2",
    ),
    "GracepointDown": Case(
        {f"gracepoint_subscriptions_open{{{_A}}}": "_x50 0x10", f"gracepoint_subscriptions_open{{{_B}}}": "0x60"},
        {f"gracepoint_subscriptions_open{{{_A}}}": "0x10 _x50"},
        22,
    ),
    "GracepointCanarySilent": Case(
        {f"gracepoint_canary_age_seconds{{{_A}}}": "10x60"},
        {f"gracepoint_canary_age_seconds{{{_A}}}": "10x5 30+60x54", f"gracepoint_canary_age_seconds{{{_B}}}": "5x60"},
        10,
        {"pod": "gp-a", "instance": "10.0.0.1:8080"},
    ),
    "GracepointWatchStale": Case(
        {f'gracepoint_watch_age_seconds{{{_A},kind="nodes"}}': "25x60"},
        {f'gracepoint_watch_age_seconds{{{_A},kind="nodes"}}': "25x5 100+60x54"},
        10,
        {"kind": "nodes"},
    ),
    "GracepointWatchRestarts": Case(
        *counter("gracepoint_watch_restarts_total", 'thread="watch required"', "0x20 2x39", "0x20 1+1x39"),
        27,
        {"thread": "watch required"},
    ),
    "GracepointLoopLag": Case(
        {f'{LAG}{{{_A},loop="channel",le="{le}"}}': "0+240x60" for le in ("0.1", "0.25", "0.5", "+Inf")},
        {f'{LAG}{{{_A},loop="channel",le="{le}"}}': f"0+{rate}x60" for le, rate in (("0.25", 200), ("0.5", 240))}
        | {f'{LAG}{{{_A},loop="channel",le="+Inf"}}': "0+240x60"},
        20,
        {"pod": "gp-a", "loop": "channel"},
    ),
    "GracepointObjectsLeftOut": Case(
        {f'gracepoint_objects_left_out{{{_A},kind="pods",extent="part"}}': "0x60"},
        {f'gracepoint_objects_left_out{{{_A},kind="pods",extent="part"}}': "0x5 2x55"},
        17,
        {"kind": "pods", "extent": "part"},
        value="2",
    ),
    "GracepointNotRecorded": Case(
        {f"gracepoint_preemptions_unrecorded{{{_A}}}": "0x60"},
        {f"gracepoint_preemptions_unrecorded{{{_A}}}": "0x5 4x55"},
        12,
        value="4",
    ),
    "GracepointWritesFailing": Case(*counter("gracepoint_status_write_failures_total"), 22),
    "GracepointCertificateExpires": Case(
        {EXPIRY: f"{20 * _DAY_S}x60"},
        {EXPIRY: f"{14 * _DAY_S}x60"},
        60,
        {"certificate": "server"},
        value="13d 23h 0m 0s",
    ),
    "GracepointCertificateExpiresSoon": Case(
        {EXPIRY: f"{3 * _DAY_S}x60"}, {EXPIRY: f"{2 * _DAY_S}x60"}, 60, {"certificate": "server"}, "1d 23h 0m 0s"
    ),
    "GracepointSnapshotsNotSafe": Case(
        {f'gracepoint_snapshots_unsafe_workloads{{{_A},reason="SnapshotsLate"}}': "0x10 3x12 0x38"},  # too short
        {f'gracepoint_snapshots_unsafe_workloads{{{_A},reason="SnapshotsLate"}}': "0x10 3x50"},
        27,
        {"reason": "SnapshotsLate"},
        value="3",
    ),
    "GracepointSnapshotServersNotReady": Case(
        {f'gracepoint_snapshot_servers{{{_A},state="{state}"}}': "2x60" for state in ("ready", "ending")},
        {f'gracepoint_snapshot_servers{{{each},state="not_ready"}}': "0x10 2x50" for each in (_A, _B)},
        27,
        value="2",
    ),
    "GracepointTrustNotKept": Case(
        # An outage of the API server of some seconds counts several times, and no more after it.
        *counter("gracepoint_trust_failures_total", 'what="secret"', "0x20 8x39", "0x5 0+1x54"),
        30,
        {"what": "secret"},
    ),
    "GracepointPodsRefused": Case(
        {f'gracepoint_channel_requests_refused_total{{{_A},reason="not_ready"}}': "0+60x60"},
        {f'gracepoint_channel_requests_refused_total{{{_A},reason="bad_token"}}': "0+60x60"},
        40,
        {"reason": "bad_token"},
    ),
    "GracepointTrainingStalled": Case(
        {f"gracepoint_stalled_workloads{{{_A}}}": "0x60"},
        {f"gracepoint_stalled_workloads{{{_A}}}": "0x5 2x55"},
        30,
        value="2",
    ),
    "GracepointGangWaits": Case(
        {f'gracepoint_waiting_seconds{{{_A},kind="Node"}}': "0+60x14 0x45"},
        {f'gracepoint_waiting_seconds{{{_A},kind="Node"}}': "0+60x60"},
        17,
        {"kind": "Node"},
        value="17m 0s",
    ),
    "GracepointSavesFail": Case(
        {f'gracepoint_troubled_workloads{{{_A},kind="Saves"}}': "0x60"},
        {f'gracepoint_troubled_workloads{{{_A},kind="Saves"}}': "0x5 2x55"},
        7,
        value="2",
    ),
    "GracepointDeletionsFail": Case(
        {f'gracepoint_troubled_workloads{{{_A},kind="Deletions"}}': "0x5 1x10 0x45"},  # for less than 15 minutes
        {f'gracepoint_troubled_workloads{{{_A},kind="Deletions"}}': "0x5 1x55"},
        22,
        value="1",
    ),
    "GracepointConnectionsCrowded": Case(
        {f'gracepoint_channel_connections_closed_total{{{_A},reason="too_slow"}}': "0+9x60"},
        {f'gracepoint_channel_connections_closed_total{{{_A},reason="crowded"}}': "0x20 1x39"},
        22,
        {"reason": "crowded"},
    ),
}


@pytest.fixture(scope="module")
def promtool() -> Path:
    if missing := parts.missing(("prometheus",)):
        pytest.skip(f"not built: {missing[0].name}; run: make test-alerts")
    return parts.program("promtool")


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules as the file that Prometheus reads."""
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": yaml.safe_load((CHART / "files/alerts.yaml").read_text())}))
    return path


def run(promtool: Path, *arguments: str | Path) -> str:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_the_rules(promtool: Path, rules: Path) -> None:
    assert f"{len(CASES)} rules found" in run(promtool, "check", "rules", "--lint-fatal", rules)


def test_every_alert_fires_for_what_it_is_about_and_for_nothing_else(promtool: Path, rules: Path) -> None:
    known = {rule["alert"]: rule for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]}
    assert known.keys() == CASES.keys()
    tests = [_test(known[name], case, fires=fires) for name, case in CASES.items() for fires in (False, True)]
    path = rules.with_name("tests.yaml")
    path.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in run(promtool, "test", "rules", path)


def _test(rule: Json, case: Case, *, fires: bool) -> Json:
    series = case.fires if fires else case.quiet
    alert = {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": {name: _filled(text, case) for name, text in rule["annotations"].items()},
    }
    at = [case.after] if fires else range(1, _MINUTES)
    return {
        "name": f"{rule['alert']} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": [alert] if fires else []}
            for minute in at
        ],
    }


def _filled(text: str, case: Case) -> str:
    """An annotation as Prometheus fills it in."""
    for name, value in case.labels.items():
        text = text.replace(f"{{{{ $labels.{name} }}}}", value)
    return text.replace("{{ $value }}", case.value).replace("{{ $value | humanizeDuration }}", case.value)
