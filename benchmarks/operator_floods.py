"""The operator while others in the cluster, who have no token, flood each of its ports with connections.

    python -m benchmarks.operator_floods [--connections 20000] [--seconds 10] [--only KIND PORT] [--json FILE]

A real API server asks a real operator process about evictions, through its webhook, all the time. The operator has as
much memory as the chart gives it, in a control group, and is killed beyond that. In each phase an attacker in another
process, with half a core and at another address, floods one port in one way: see ``operator_floods_attacker``. It takes
root.

Told are, for each port, the slowest answers and the most memory of all its phases. Before the first phase of each port
nobody floods anything, for comparison: the goal of 0.3 s is for a machine without other work.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import yaml

from benchmarks import report
from benchmarks.notice_results import percentile
from benchmarks.operator_floods_attacker import KINDS
from benchmarks.operator_scale_cluster import Certificate, Replica, filled_api_server
from benchmarks.operator_scale_objects import Size, unrelated_pods
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, path_of
from tests import limits
from tests.ports import held_ports
from tests.testcluster.api_server import ApiServer

_ROOT = Path(__file__).parents[1]
_WEBHOOK = "gracepoint-floods"
_SHARE = 0.5
_ATTACKERS = 2
_EVICTION_S = 0.3
_EVERY_S = 0.05
_LOOK_S = 0.1
_STOP_S = 20.0
_ANSWERS_S = 30.0
_MIB = 1 << 20
PORTS = ("webhooks", "channel", "health")


def memory_limit_bytes() -> int:
    """What the chart gives a replica."""
    values = yaml.safe_load((_ROOT / "charts" / "gracepoint" / "values.yaml").read_text())
    text = values["resources"]["limits"]["memory"]
    if not text.endswith("Mi"):
        raise ValueError(f"resources.limits.memory: found {text!r}, expected MiB")
    return int(text.removesuffix("Mi")) * _MIB


class Evictions:
    """Evicts pods by the API server, which asks the operator.

    Args:
        server: The API server.
        pods: Namespace and name of each.

    Attributes:
        took_s: How long each answer took.
        unasked: What the API server said where it could not ask the operator.
    """

    def __init__(self, server: ApiServer, pods: Sequence[tuple[str, str]]) -> None:
        self._client = kubernetes.config.new_client_from_config(str(server.kubeconfig), persist_config=False)
        self._pods = pods
        self._ends = threading.Event()
        self.took_s: list[float] = []
        self.unasked: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="evictions", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join(_STOP_S)

    def taken(self) -> tuple[list[float], list[str]]:
        """What there is since the last call."""
        found = self.took_s, self.unasked
        self.took_s, self.unasked = [], []
        return found

    def _run(self) -> None:
        number = 0
        while not self._ends.wait(_EVERY_S):
            self._evict(*self._pods[number % len(self._pods)])
            number += 1

    def _evict(self, namespace: str, pod: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"namespace": namespace, "name": pod}}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        began_s = time.monotonic()
        try:
            self._client.call_api(
                path, "POST", body=body, auth_settings=["BearerToken"], response_type="object", _request_timeout=30
            )
        except kubernetes.client.ApiException as error:
            if error.status != 429 or "webhook" not in str(error.body):
                self.unasked.append(f"{error.status} {error.body}"[:300])
        self.took_s.append(time.monotonic() - began_s)


@dataclasses.dataclass
class Phase:
    """What was seen in one phase.

    Attributes:
        kind, port: How which port was flooded. An empty kind: nothing was.
        took_s: How long each eviction took.
        unasked: Evictions of which the operator was not asked.
        bytes: The most memory of the operator.
        attack: What the attackers say.
        cpu: Share of a core that the operator used.
        blocked_s: How long a callback blocked a loop at most.
    """

    kind: str
    port: str
    took_s: list[float]
    unasked: list[str]
    bytes: int
    attack: dict[str, int]
    cpu: float
    blocked_s: float


class Floods:
    """An operator that is flooded, in the limits of the chart.

    Args:
        stack: Ends what runs.
        folder: For all files.
        server: The API server.
        pods: Namespace and name of the pods that are evicted all the time.
    """

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, server: ApiServer, pods: Sequence[tuple[str, str]]
    ) -> None:
        self._stack = stack
        certificate = Certificate(folder)
        ports = stack.enter_context(held_ports(3))
        memory = stack.enter_context(limits.memory_group(memory_limit_bytes()))
        self.replica = Replica("one", folder, ports, server.kubeconfig, certificate)
        self.replica.start()
        stack.callback(self.replica.stop)
        memory.write_text(str(self.replica.pid))
        self.replica.wait_until_ready()
        server.create(_webhook(self.replica, certificate, sorted({namespace for namespace, _ in pods})))
        stack.callback(server.kubectl, "delete", "validatingwebhookconfiguration", _WEBHOOK)
        self._share = stack.enter_context(limits.processor_group(_SHARE))
        self.evictions = Evictions(server, pods)
        stack.enter_context(self.evictions.running())

    def flood(
        self, kind: str, port: str, connections: int, seconds: float, addresses: Sequence[str], *, answers: int = 1
    ) -> Phase:
        """Floods a port for some time, and until there are so many answers. An empty kind: nothing is flooded."""
        self.evictions.taken()
        attackers = [
            attacker(self._stack, self._share, self.replica, kind, port, connections // _ATTACKERS, addresses)
            for _ in range(_ATTACKERS if kind else 0)
        ]
        began, cpu_s, most = time.time(), self.replica.cpu_s(), 0
        try:
            while time.time() < began + seconds or len(self.evictions.took_s) < answers:
                if time.time() > began + seconds + _ANSWERS_S:
                    break
                time.sleep(_LOOK_S)
                most = max(most, self.replica.memory_bytes())
            cpu = (self.replica.cpu_s() - cpu_s) / (time.time() - began)
            took_s, unasked = self.evictions.taken()
        finally:
            said = [json.loads(one.communicate(timeout=_STOP_S)[0] or "{}") for one in attackers]
        attack = {key: sum(one.get(key, 0) for one in said) for key in ("opened", "closed", "most")}
        blocked = max((item.took_s for item in self.replica.blocked(began)), default=0.0)
        return Phase(kind, port, took_s, unasked, most, attack, cpu, blocked)

    def scrape(self) -> str:
        """The metrics."""
        return scrape(self.replica)


def attacker(
    stack: contextlib.ExitStack,
    share: Path,
    replica: Replica,
    kind: str,
    port: str,
    count: int,
    addresses: Sequence[str],
) -> subprocess.Popen[str]:
    """Starts an attacker, which ends when its standard input does.

    Args:
        stack: Ends it at the latest.
        share: See ``limits.processor_group``.
        replica: What it attacks.
        kind: One of ``KINDS``.
        port: One of ``PORTS``.
        count: How many connections it keeps.
        addresses: Where it connects from.
    """
    number = {"webhooks": replica.webhooks, "channel": replica.https, "health": replica.health}[port]
    tls = "plain" if port == "health" else "tls"
    argv = [sys.executable, "-m", "benchmarks.operator_floods_attacker", kind, str(number), tls, str(count)]
    child = subprocess.Popen([*argv, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    stack.callback(child.kill)
    share.write_text(str(child.pid))
    return child


def scrape(replica: Replica) -> str:
    """The metrics of a replica."""
    with urllib.request.urlopen(f"http://127.0.0.1:{replica.health}/metrics", timeout=_STOP_S) as answer:
        return str(answer.read().decode())


def _webhook(replica: Replica, certificate: Certificate, namespaces: Sequence[str]) -> dict[str, Any]:
    """The chart's webhook of evictions, at the process's port, for these namespaces."""
    url = f"https://localhost:{replica.webhooks}{path_of(PATH_EVICTIONS, certificate.webhook_token)}"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": _WEBHOOK},
        "webhooks": [
            {
                "name": "evictions.gracepoint.dev",
                "clientConfig": {"url": url, "caBundle": base64.b64encode(certificate.ca.encode()).decode()},
                "rules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]}
                ],
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(namespaces)}
                    ]
                },
                "failurePolicy": "Fail",  # an eviction of which the operator is not asked is told
                "timeoutSeconds": 10,
                "admissionReviewVersions": ["v1"],
                "sideEffects": "NoneOnDryRun",
            }
        ],
    }


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--connections", type=int, default=20_000, help="of an attacker (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a phase (%(default)s)")
    parser.add_argument("--scale", type=float, default=0.1, help="of the cluster: see operator_scale (%(default)s)")
    parser.add_argument("--only", nargs=2, metavar=("KIND", "PORT"), action="append", help="one flood; may be repeated")
    parser.add_argument("--addresses", type=int, default=1, help="from which the attacker connects (%(default)s)")
    parser.add_argument("--same-address", action="store_true", help="the attacker has the API server's address")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and files there")
    flags = parser.parse_args()
    floods = flags.only or [(kind, port) for port in PORTS for kind in KINDS]
    addresses = [f"127.0.{2 + number // 250}.{1 + number % 250}" for number in range(flags.addresses)]
    if flags.same_address:
        addresses = ["127.0.0.1"]
    with contextlib.ExitStack() as stack:
        folder = flags.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracepoint-floods-")))
        folder.mkdir(parents=True, exist_ok=True)
        size = Size.of(flags.scale)
        server = stack.enter_context(filled_api_server(folder, size))
        # They train nothing, so nothing follows from their evictions.
        run = Floods(stack, folder, server, unrelated_pods(size))
        phases: list[Phase] = []
        for kind, port in floods:
            if all(phase.port != port for phase in phases):
                phases.append(run.flood("", port, 0, flags.seconds, ()))
                _say(phases[-1])
            phases.append(run.flood(kind, port, flags.connections, flags.seconds, addresses))
            _say(phases[-1])
        run.scrape()
    found = figures(phases)
    report.publish(found, flags.json, connections=flags.connections, seconds=flags.seconds)
    return 1 if any(figure.met is False for figure in found) else 0


def _say(phase: Phase) -> None:
    took = phase.took_s or [float("inf")]
    print(
        f"{phase.port:9}{phase.kind:14}{len(phase.took_s):4} answers: p50 {percentile(took, 50):.3f}"
        f" p99 {percentile(took, 99):.3f} max {max(took):.3f} s, unasked {len(phase.unasked)},"
        f" {phase.bytes / _MIB:.0f} MiB, {phase.cpu:.0%} of a core, blocked {phase.blocked_s:.3f} s, {phase.attack}",
        file=sys.stderr,
        flush=True,
    )
    for why in phase.unasked[:2]:
        print(f"   {why}", file=sys.stderr)


def figures(phases: Sequence[Phase]) -> list[report.Figure]:
    """In the order of the table."""
    found = []
    quiet = [phase for phase in phases if not phase.kind]
    floods = {f"flood of {port}": [one for one in phases if one.kind and one.port == port] for port in PORTS}
    for name, some in {"no flood": quiet, **floods}.items():
        if not some:
            continue
        took_s = [one.took_s or [math.inf] for one in some]
        found += [
            report.Figure(f"{name}: evictions, p50", max(percentile(one, 50) or 0.0 for one in took_s), "s"),
            report.Figure(
                f"{name}: evictions, p99", max(percentile(one, 99) or 0.0 for one in took_s), "s", _EVICTION_S
            ),
            report.Figure(f"{name}: evictions that were not asked about", sum(len(p.unasked) for p in some), "", 0),
            report.Figure(f"{name}: memory", max(p.bytes for p in some) / _MIB, "MiB", memory_limit_bytes() / _MIB),
        ]
    return found


if __name__ == "__main__":
    sys.exit(main())
