"""Alerts fire for what may cause them, and for a lost Preemption they must. By intervals, and by a real Prometheus."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ports import held_ports
from tests.replay import alerts
from tests.replay.alerts import LATE, LOST, UNDELIVERED, Alerts, Cause, Firing
from tests.replay.kinds import KINDS
from tests.testcluster import parts
from tests.waiting import until

WAITS_S = {LOST: 960.0, "GracepointDown": 360.0, "GracepointLoopLag": 960.0}
DRAIN = Cause("fault 1, drain", 100.0, 130.0)
OFF = Cause("fault 2, node-off", 200.0, 260.0, frozenset({LOST}))
BROKEN = Cause("fault 3, drill", 300.0, 330.0, None)


def firing(*at_s: float, alert: str = LOST) -> Firing:
    return Firing(alert, {"cause": "NodeLost"}, at_s)


@pytest.mark.parametrize(
    ("causes", "fired", "found"),
    [
        pytest.param([OFF], firing(210.0, 260.0, 1220.0), None, id="from its begin until the rule looks back no more"),
        pytest.param([OFF], firing(210.0, 1221.0), "fired at 00:20:21Z, after fault 2, node-off;", id="longer"),
        pytest.param([OFF], firing(199.0, 210.0), "fired at 00:03:19Z, after the start;", id="before it"),
        pytest.param([DRAIN], firing(110.0), "(cause=NodeLost) fired at 00:01:50Z, after fault 1", id="of no alert"),
        pytest.param([OFF], firing(210.0, alert="GracepointDown"), "GracepointDown", id="of another alert"),
        pytest.param([DRAIN, OFF, DRAIN], firing(210.0), None, id="while it goes on, another fault comes"),
        pytest.param([DRAIN, BROKEN], firing(310.0, alert="GracepointDown"), None, id="anything, of what went wrong"),
        pytest.param([], firing(1.0, alert="GracepointLoopLag"), None, id="processors that are busy are no fault's"),
    ],
)
def test_an_alert_may_fire_while_a_fault_that_may_cause_it_is_near(
    causes: list[Cause], fired: Firing, found: str | None
) -> None:
    texts = [text for _, text in alerts.unexpected(causes, [fired], WAITS_S)]
    assert len(texts) == (found is not None)
    assert not texts or str(found) in texts[0]


def test_a_fault_whose_preemption_was_lost_must_have_its_alert() -> None:
    lost = Cause("fault 4, node-off", 400.0, 460.0, frozenset({LOST}), frozenset({LOST}))
    assert alerts.lacking([lost, DRAIN], [firing(470.0)]) == []
    for other in ([], [firing(399.0)], [firing(470.0, alert="GracepointDown")], [firing(600.0)]):
        assert alerts.lacking([lost], other) == [f"{LOST} did not fire after {lost.name}, expected by its Preemption"]


ONE_OF_TWO = {"expected": 2, "received": 1}
OWN_WORD = "SIGTERM, as the gang reports"


def record(mode: str = "Enforce", phase: str = "Committed", **status: Any) -> dict[str, Any]:
    return {"spec": {"mode": mode}, "status": {"phase": phase, **status}}


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        pytest.param(record(secondsToSpare=3.0, acknowledgements={"expected": 2, "received": 2}), set(), id="saved"),
        pytest.param({"spec": {"mode": "Enforce"}}, set(), id="it has no status yet"),
        pytest.param(record(phase="Failed"), {LOST}, id="nothing was saved"),
        pytest.param(record(phase="Expired"), {LOST}, id="no end was reported"),
        pytest.param(record("Drill", "Failed", secondsToSpare=-3.0), set(), id="a drill"),
        pytest.param(record("Observe", "Expired"), set(), id="nobody was told"),
        pytest.param(record(secondsToSpare=-0.5), {LATE}, id="late"),
        pytest.param(record(acknowledgements=ONE_OF_TWO), {UNDELIVERED}, id="one had no notice"),
        pytest.param(
            {"spec": {"mode": "Enforce", "signal": OWN_WORD}, "status": {"acknowledgements": ONE_OF_TWO}},
            set(),
            id="the gang said it itself",
        ),
    ],
)
def test_preemptions_say_which_alerts_fire(of: dict[str, Any], expected: set[str]) -> None:
    assert alerts.of_records([record(), of]) == expected


def test_an_alert_may_fire_for_as_long_as_its_rule_looks_back_and_waits(tmp_path: Path) -> None:
    path = tmp_path / "alerts.yaml"
    path.write_text(
        """
        - name: gracepoint
          rules:
            - {alert: A, expr: 'sum(increase(a[1h])) > sum(rate(b[5m]))'}
            - {alert: B, expr: 'max(b) > 0', for: 10m}
            - {alert: C, expr: 'rate(c[15m]) > 0', for: 1m30s}
        """
    )
    hold = alerts.holds_s(alerts.read_rules(path))
    slack_s = hold["A"] - 3600
    assert hold == {"A": 3600 + slack_s, "B": 600 + slack_s, "C": 990 + slack_s}
    assert 0 < slack_s <= 120


def test_a_preemption_does_not_hide_the_alerts_of_the_next_ones() -> None:
    hold = alerts.holds_s(alerts.read_rules())
    assert {hold[LOST], hold[LATE], hold[UNDELIVERED]} == {120.0}


def test_kinds_name_alerts_of_the_chart() -> None:
    assert set().union(*(kind.alerts for kind in KINDS.values())) <= alerts.holds_s(alerts.read_rules()).keys()
    assert KINDS["drain"].alerts == set()
    assert KINDS["storage-full"].alerts == {"GracepointSavesFail"}
    assert KINDS["node-off"].alerts == {LOST, LATE, UNDELIVERED}, "its record may end anyhow, and come late"
    assert KINDS["operator-killed-in-notice"].alerts == {UNDELIVERED}


def pod(name: str, phase: str = "Running", *, port: int = 8080, part_of: str = "gracepoint", **status: str) -> Any:
    return {
        "metadata": {"name": name, "namespace": "gp", "labels": {"app.kubernetes.io/name": part_of}},
        "spec": {
            "containers": [
                {"ports": [{"name": "https", "containerPort": 8443}, {"name": "health", "containerPort": port}]}
            ]
        },
        "status": {"phase": phase, **status},
    }


def test_replicas_are_scraped_that_have_an_address_and_have_not_ended(tmp_path: Path) -> None:
    every = [
        pod("gp-b", podIP="10.0.0.2"),
        pod("gp-a", podIP="10.0.0.1"),
        pod("gp-c", "Failed", podIP="10.0.0.3"),
        pod("gp-d", "Pending"),
        pod("other", podIP="10.0.0.5", part_of="gracepoint-snapshots"),
    ]
    alerts.write_replicas(every, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.read_text() == (
        '[{"targets": ["10.0.0.1:8080"], "labels": {"namespace": "gp", "pod": "gp-a"}}, '
        '{"targets": ["10.0.0.2:8080"], "labels": {"namespace": "gp", "pod": "gp-b"}}]'
    )
    before = path.stat()
    alerts.write_replicas(reversed(every), tmp_path)
    assert path.stat() == before, "its time says when replicas came or went"


def test_where_alerts_are_not_judged_nothing_is_found() -> None:
    none = Alerts(why_not="prometheus is not built")
    assert none.judge("fault 1, drain", 100.0, (), [record(phase="Failed")]) == []
    assert none.look() == []


def test_a_prometheus_that_does_not_answer_is_told() -> None:
    with held_ports(1) as (port,):
        (told,) = Alerts(f"http://127.0.0.1:{port}").judge("fault 1, drain", time.time(), (), [])
    assert "the alerts could not be judged: Prometheus does not answer" in told


@pytest.fixture
def metrics() -> Iterator[tuple[dict[str, float], int]]:
    """What a replica shows, by series, and the port where it shows it."""
    shown: dict[str, float] = {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _shows(shown))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield shown, server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def _shows(shown: Mapping[str, float]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = "".join(f"{series} {value}\n" for series, value in shown.copy().items()).encode()  # type: ignore[attr-defined]
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@pytest.mark.promtool
def test_prometheus_says_what_fires_and_what_does_not(metrics: tuple[dict[str, float], int], tmp_path: Path) -> None:
    if parts.missing(("prometheus",)):
        pytest.skip("not built: prometheus; run: make test-alerts")
    shown, scraped = metrics
    lost = 'gracepoint_preemption_phases_total{phase="Expired",mode="Enforce",cause="NodeLost",namespace="team"}'
    shown |= {"gracepoint_subscriptions_open": 2.0, "gracepoint_stalled_workloads": 1.0, lost: 0.0}
    alerts.write_replicas([pod("gp-a", port=scraped, podIP="127.0.0.1")], tmp_path)
    begun_s = time.time()
    with held_ports(1) as (port,), alerts.prometheus(tmp_path, f"127.0.0.1:{port}", every_s=1) as url:
        strict, lenient = Alerts(url), Alerts(url)

        def fire(alert: str) -> bool:
            return alert in {each.alert for each in alerts.firings(url, begun_s, time.time() - 3)}

        until(lambda: fire("GracepointTrainingStalled"), "a stalled gang to make its alert fire")
        assert not fire(LOST)
        shown[lost] = 1.0
        until(lambda: fire(LOST), "a lost Preemption to make its alert fire")
        told = strict.judge("fault 1, drain", begun_s, (), [])
        assert [text.partition(" fired at ")[0] for text in sorted(told)] == [
            f"{LOST} (cause=NodeLost)",
            "GracepointTrainingStalled",
        ]
        assert all("after fault 1, drain; nothing that may cause it was near" in text for text in told)
        assert lenient.judge("fault 1", begun_s, ("GracepointTrainingStalled",), [record(phase="Expired")]) == []
        assert strict.look() == [], "what goes on is told once"
