"""Which of the chart's alerts fire in a replay, held against what happened.

A Prometheus evaluates the chart's rules over what it scrapes from the operator's replicas, as the PodMonitor would have
it. An alert may fire while something that may cause it began before, and ended no longer ago than the rule looks back
and waits. It must fire if a Preemption says what the alert is about.

Who runs: one Prometheus in the namespaces of the cluster's control plane, from where pods are reached; ``watched``
starts and ends it, and it ends with the cluster in any case. One thread ("replicas") notes in a file which replicas
there are; it ends with ``watched``, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from demo.install import OPERATOR_NAMESPACE
from demo.snapshot import Json
from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator.signals import KNOWN_TO_GANG
from tests.chart.helm import CHART
from tests.dashboard.prometheus import direct, served
from tests.testcluster import addons, parts
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.local import LocalCluster
from tests.testcluster.shell import wait_until

#: The three that tell of a Preemption how it ended.
LOST, LATE, UNDELIVERED = "GracepointPreemptionLost", "GracepointSaveTooLate", "GracepointNoticesUndelivered"
#: These tell of processors that are too few or too busy, whatever happens to the jobs.
_OF_THE_MACHINE = frozenset({"GracepointLoopLag"})
RULES = CHART / "files" / "alerts.yaml"
#: How far those of Preemptions look back here. As far as in the chart, each would hide the next one's for an hour.
_RECENTLY = "1m"
_PART = "prometheus"
_REPLICAS, _JOB = "replicas.json", "gracepoint"
#: Of the chart's Deployment: its pods' label, and the name of the port with the metrics where no token is required.
_LABEL, _PORT_NAME = ("app.kubernetes.io/name", "gracepoint"), "health"
#: In the control plane's network, where nothing else listens there.
_PORT = 9090
#: A pause of a job's saves, as of storage that is full for some seconds, must not fall between two scrapes.
_EVERY_S = 5
#: Between two looks at the replicas.
_LOOK_S = 2.0
#: Until what a replica counts has made an alert fire, also if it is new: found, scraped twice, evaluated.
_SEEN_S = 45.0
#: So long after a cause an alert may fire beyond what its rule says: what the operator notes late, and ``_SEEN_S``.
_SLACK_S = 60.0
#: An evaluation is in the answers so long after its time.
_SETTLES_S = 2.0
_SCRAPED_S = 120.0
_ANSWERS_S = 30.0
_CLOSES_S = 60.0
#: What happened before all else.
_START = "the start"
_RANGE = re.compile(r"\[(\w+)\]")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something that happened.

    Attributes:
        name: What it is, for messages.
        begun_s, ended_s: When, in seconds since 1970.
        may: The alerts that may fire for it. None: any.
        must: Those that must.
    """

    name: str
    begun_s: float
    ended_s: float
    may: frozenset[str] | None = frozenset()
    must: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Firing:
    """An alert, and the evaluations at which it fired, in seconds since 1970.

    Attributes:
        alert: Its name.
        labels: What tells it from others of the same rule.
        at_s: The evaluations, in their order. At least one.
    """

    alert: str
    labels: Mapping[str, str]
    at_s: tuple[float, ...]


def unexpected(
    causes: Sequence[Cause], firings: Iterable[Firing], holds_s: Mapping[str, float]
) -> list[tuple[Firing, str]]:
    """Returns the alerts that fired at a time at which nothing that may cause them was near, and says so in words.

    Args:
        causes: What happened.
        firings: What fired.
        holds_s: For how long after a cause each alert may fire.
    """
    found = []
    for firing in firings:
        if firing.alert in _OF_THE_MACHINE:
            continue
        hold_s = holds_s[firing.alert]
        able = [cause for cause in causes if cause.may is None or firing.alert in cause.may]
        alone = [at for at in firing.at_s if not any(each.begun_s <= at <= each.ended_s + hold_s for each in able)]
        if alone:
            before = [cause for cause in causes if cause.begun_s <= alone[0]]
            after = max(before, key=lambda cause: cause.begun_s).name if before else _START
            labels = ", ".join(f"{name}={value}" for name, value in sorted(firing.labels.items()))
            told = f"{firing.alert}{f' ({labels})' if labels else ''} fired at {_clock(alone[0])}, after {after}"
            found.append((firing, f"{told}; nothing that may cause it was near"))
    return found


def lacking(causes: Iterable[Cause], firings: Collection[Firing]) -> list[str]:
    """Returns, in words, the alerts that had to fire for a cause and did not. All causes are over for ``_SEEN_S``."""
    return [
        f"{alert} did not fire after {cause.name}, expected by its Preemption"
        for cause in causes
        for alert in sorted(cause.must)
        if not any(
            firing.alert == alert and any(cause.begun_s <= at <= cause.ended_s + _SEEN_S for at in firing.at_s)
            for firing in firings
        )
    ]


def read_rules(path: Path = RULES) -> list[Json]:
    """Returns the groups of rules as they are evaluated: those of Preemptions look back no further than to the last."""
    groups: list[Json] = yaml.safe_load(path.read_text())
    for group in groups:
        for rule in group["rules"]:
            if rule["alert"] in (LOST, LATE, UNDELIVERED):
                rule["expr"] = _RANGE.sub(f"[{_RECENTLY}]", rule["expr"])
    return groups


def holds_s(groups: Iterable[Json]) -> dict[str, float]:
    """Returns for how long after its cause each alert may fire: its longest range, and its ``for``."""
    return {
        rule["alert"]: max((_seconds(each) for each in _RANGE.findall(rule["expr"])), default=0.0)
        + _seconds(rule.get("for", "0s"))
        + _SLACK_S
        for group in groups
        for rule in group["rules"]
    }


def of_records(records: Iterable[Json]) -> frozenset[str]:
    """Returns the alerts that Preemptions give rise to (docs/operations.md#alerts)."""
    found = set()
    for record in records:
        mode, status = record["spec"].get("mode"), record.get("status", {})
        if mode == Mode.ENFORCE and status.get("phase") in (Phase.EXPIRED, Phase.FAILED):
            found.add(LOST)
        if mode != Mode.DRILL and status.get("secondsToSpare", math.inf) <= 0:
            found.add(LATE)
        receipts = status.get("acknowledgements", {})
        # Of what the gang says itself, nobody is told, and so of what is only observed.
        told = mode != Mode.OBSERVE and record["spec"].get("signal") not in KNOWN_TO_GANG
        if told and receipts.get("received", 0) < receipts.get("expected", 0):
            found.add(UNDELIVERED)
    return frozenset(found)


class Alerts:
    """What fires, held against what happens. Use it from one thread.

    Args:
        url: Of a Prometheus with the rules.
        why_not: Why alerts are not judged. Then there is no Prometheus, and nothing is found.
        changed_s: Returns when replicas of the operator came or went last, in seconds since 1970.
    """

    def __init__(self, url: str = "", *, why_not: str = "", changed_s: Callable[[], float] = lambda: 0.0) -> None:
        self.why_not = why_not
        self._url = url
        self._changed_s = changed_s
        self._holds_s = holds_s(read_rules())
        self._since_s = time.time()
        self._causes: list[Cause] = []
        self._awaited: list[Cause] = []
        self._fired: list[Firing] = []

    def judge(self, name: str, begun_s: float, may: Iterable[str], records: Iterable[Json]) -> list[str]:
        """Notes what happened until now, and returns what is wrong with the alerts since the last look.

        Args:
            name: What happened, for messages.
            begun_s: When it began, in seconds since 1970.
            may: The alerts that may fire for it, beside those of its records.
            records: Its Preemptions.
        """
        due = of_records(records)
        # A replica takes its counts along when it goes, and what it counts before its first scrape is no increase.
        seen = self._changed_s() + _SEEN_S < begun_s
        cause = Cause(name, begun_s, time.time(), frozenset(may) | due, due & {LOST} if seen else frozenset())
        self._causes.append(cause)
        self._awaited.append(cause)
        return self.look()

    def excuse(self, name: str, begun_s: float) -> None:
        """Notes what happened until now, for which any alert may fire: it was not as expected, which is told."""
        self._causes.append(Cause(name, begun_s, time.time(), may=None))

    def look(self) -> list[str]:
        """Returns what is wrong with the alerts since the last look. What goes on after it is not told again."""
        if self.why_not:
            return []
        until_s = time.time() - _SETTLES_S
        try:
            fired = firings(self._url, self._since_s, until_s)
        except ClusterError as error:
            return [f"the alerts could not be judged: {error}"]
        self._since_s = until_s
        self._fired += fired
        found = []
        for firing, text in unexpected(self._causes, fired, self._holds_s):
            found.append(text)
            name = self._causes[-1].name if self._causes else _START
            self._causes.append(Cause(name, firing.at_s[0], time.time(), frozenset({firing.alert})))
        over = [cause for cause in self._awaited if cause.ended_s + _SEEN_S < until_s]
        self._awaited = [cause for cause in self._awaited if cause not in over]
        return found + lacking(over, self._fired)


def build(say: Callable[[str], None]) -> None:
    """Builds Prometheus unless it is there. Without Go, alerts are not judged."""
    try:
        parts.build((_PART,))
    except ClusterError as error:
        say(f"no alert is judged: {error}")


@contextlib.contextmanager
def watched(cluster: Cluster, say: Callable[[str], None]) -> Iterator[Alerts]:
    """Gives the alerts of the operator on a cluster. ``say`` hears why if they are not judged.

    Raises:
        ClusterError: Prometheus is built, and does not start or does not scrape all replicas.
    """
    if not isinstance(cluster, LocalCluster):
        why_not = "the pods of this cluster are not reached from here"
    elif parts.missing((_PART,)):
        why_not = f"{_PART} is not built; run: python -m tests.testcluster build --parts {_PART}"
    else:
        with contextlib.ExitStack() as stack:
            yield _start(cluster, stack)
        return
    say(f"alerts are not judged: {why_not}")
    yield Alerts(why_not=why_not)


def _start(cluster: LocalCluster, stack: contextlib.ExitStack) -> Alerts:
    """Starts Prometheus, and waits until it has scraped all replicas.

    Raises:
        ClusterError: It does not start, or does not scrape them.
    """
    record = cluster.record
    machine = record.sandbox(addons.CONTROL_PLANE)
    folder = record.folder / "prometheus"  # which its machine sees
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    stack.enter_context(_following_replicas(cluster, folder))
    url = stack.enter_context(prometheus(folder, f"{record.network.node_ip(0)}:{_PORT}", machine.enter))
    up = f'up{{job="{_JOB}"}}'

    def all_scraped() -> bool:
        series = _asked(url, up, time.time())
        return len(series) == _count(folder) > 0 and all(each["value"][1] == "1" for each in series)

    wait_until("Prometheus to scrape the operator", all_scraped, timeout_s=_SCRAPED_S)
    return Alerts(url, changed_s=lambda: _changed_s(folder))


@contextlib.contextmanager
def prometheus(
    folder: Path,
    address: str,
    enter: Callable[[list[str]], list[str]] = lambda argv: argv,
    every_s: int = _EVERY_S,
) -> Iterator[str]:
    """Gives the URL of a Prometheus with the chart's rules, which scrapes the replicas that ``write_replicas`` wrote.

    Args:
        folder: Where it has its files.
        address: Where it listens, with the port.
        enter: Makes of a command the one that runs it where it is to run.
        every_s: Seconds between two scrapes, and between two evaluations.
    """
    every = f"{every_s}s"
    scrapes = {
        "job_name": _JOB,
        "honor_labels": True,
        "file_sd_configs": [{"files": [_REPLICAS], "refresh_interval": every}],
    }
    settings = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [scrapes],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": read_rules()}))
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    # One that a killed replay has left answers at other paths.
    path = f"/{secrets.token_hex(8)}"
    with served(folder, address, f"--storage.tsdb.path={folder / 'data'}", path=path, enter=enter) as url:
        yield url


def write_replicas(pods: Iterable[Json], folder: Path) -> None:
    """Tells Prometheus which pods it scrapes: those of the operator that have an address and have not ended."""
    found = []
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        meta, status = pod["metadata"], pod.get("status", {})
        of_it = meta.get("labels", {}).get(_LABEL[0]) == _LABEL[1]
        if not of_it or "podIP" not in status or status.get("phase") in ("Succeeded", "Failed"):
            continue
        ports = [port for each in pod["spec"]["containers"] for port in each.get("ports", [])]
        found += [
            {
                "targets": [f"{status['podIP']}:{port['containerPort']}"],
                "labels": {"namespace": meta["namespace"], "pod": meta["name"]},
            }
            for port in ports
            if port.get("name") == _PORT_NAME
        ]
    path = folder / _REPLICAS
    text = json.dumps(found)
    if not path.exists() or path.read_text() != text:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, path)


@contextlib.contextmanager
def _following_replicas(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Keeps the file of the replicas up to date. While the API server does not answer, it stays as it is."""
    closed = threading.Event()

    def follow() -> None:
        while not closed.is_set():
            # Whatever it is: without this thread, no new replica would be scraped.
            with contextlib.suppress(Exception):
                write_replicas(cluster.listed("pods", namespace=OPERATOR_NAMESPACE), folder)
            closed.wait(_LOOK_S)

    thread = threading.Thread(target=follow, name="replicas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(_CLOSES_S)


def _changed_s(folder: Path) -> float:
    """When a replica came or went last, in seconds since 1970. Now, if none is known."""
    path = folder / _REPLICAS
    return path.stat().st_mtime if path.exists() else time.time()


def _count(folder: Path) -> int:
    """How many replicas are scraped."""
    path = folder / _REPLICAS
    return len(json.loads(path.read_text())) if path.exists() else 0


def firings(url: str, since_s: float, until_s: float) -> list[Firing]:
    """Returns what fired after one time and until another one, in seconds since 1970, as Prometheus has it.

    Raises:
        ClusterError: Prometheus does not answer.
    """
    range_s = max(1, math.ceil(until_s - since_s))
    found = []
    for series in _asked(url, f'ALERTS{{alertstate="firing"}}[{range_s}s]', until_s):
        at_s = tuple(float(at) for at, _ in series["values"] if since_s < float(at) <= until_s)
        labels = {name: value for name, value in series["metric"].items() if name not in _OF_EVERY_ALERT}
        if at_s:
            found.append(Firing(series["metric"]["alertname"], labels, at_s))
    return found


_OF_EVERY_ALERT = frozenset({"__name__", "alertname", "alertstate", "severity"})


def _asked(url: str, query: str, at_s: float) -> list[dict[str, Any]]:
    """Returns the series of a query at one time."""
    words = urllib.parse.urlencode({"query": query, "time": f"{at_s:.3f}"})
    try:
        with direct.open(f"{url}/api/v1/query?{words}", timeout=_ANSWERS_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except (OSError, ValueError) as error:
        raise ClusterError(f"Prometheus does not answer {query}: {error}") from error
    return found


def _seconds(duration: str) -> float:
    return float(sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)([smhd])", duration)))


def _clock(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%H:%M:%SZ")
