"""The operator in a large cluster: start, memory, idle cost, notices, a very large gang, the loss of a replica.

    python -m benchmarks.operator_scale [--scale 1.0] [--phases all] [--floods] [--snapshots] [--json FILE]

A real API server over a real etcd holds 5,000 nodes, 20,000 pods of 500 JobSets, 30,000 other pods and 5,000 old
Preemptions, all of realistic size, times ``--scale``. One JobSet has a fifth of the pods. Nothing runs the pods. Real
operator processes watch; clients that speak the library's protocol stand for the pods of the big JobSet and for one pod
of each other one, each with an address of its own. The phases, one after another:

1. limit: a minimal client lists the same objects, page by page;
2. start: one replica starts, then a second one;
3. idle: nothing happens for five minutes;
4. connect: all clients connect, half of them to each replica;
5. disruptions: 100 a minute, each a taint on the node of another JobSet;
6. big: a taint on a node of the big JobSet, taken back, and again after one replica was killed.

With ``--floods``, which takes root, attackers with half a core and without a token flood each port of both replicas
from 5 on, and the metrics are scraped every 15 s; see ``operator_floods``. They stand for other machines, so they get
what all others leave of the processors. The goals stay the same, but for evictions.

With ``--snapshots``, each node has a snapshot server, all policies want snapshots, and the operator asks each server
what it has and tells each client where its part goes. One server of this process answers for all.

From 5 on, pods are evicted: the webhook is asked as the API server asks it. It reads three objects at once
before it answers, so a read of a node at the same time is timed beside it. All times are of the one clock of this
machine. The CPU seconds of the operator stand beside the times, since API server, etcd and clients use the same
processors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.operator_floods import attacker, scrape
from benchmarks.operator_scale_cluster import (
    CAPACITY_BYTES,
    Certificate,
    Replica,
    filled_api_server,
    processor_s,
    snapshot_servers,
)
from benchmarks.operator_scale_evictions import Evictions
from benchmarks.operator_scale_objects import Gang, Size, gangs
from benchmarks.operator_scale_pods import Clients, Member, Signer, open_clients
from benchmarks.operator_scale_results import Limit, Measured, figures
from gracepoint_operator.cache import relister
from gracepoint_operator.decisions import policy_conditions
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.recording import connection_writer
from tests import limits
from tests.ports import held_ports

#: A sure signal that may go away again. Its deadline is the grace period.
TAINT = "aws-node-termination-handler/scheduled-maintenance"
_A_MINUTE = 100
#: How many of the callbacks that blocked a loop longest are named after each phase.
_TOLD_BLOCKED = 3
_SETTLED_S = 15.0
#: No client is connected yet: within this time, replicas have said of each gang that its pods are missing, which they
#: do once.
_JUDGED_S = policy_conditions.GRACE_S + 2 * connection_writer.EVERY_S
#: Each replica lists everything again once in this time, and does all else that it does now and then several times.
_IDLE_S = relister.EVERY_S
_CONNECT_TIMEOUT_S = 600.0
_TOLD_TIMEOUT_S = 60.0
_API = ("etcd", "kube-apiserver")
_FLOODS = {"webhooks": "handshake", "channel": "handshake", "health": "unread"}
_FLOOD = 20_000
_ATTACKERS = ("127.200.0.1", "127.200.0.2")
_ATTACKERS_SHARE = 0.5
_SCRAPE_EVERY_S = 15.0
_CAPACITY = 'gracepoint_snapshot_server_bytes{kind="capacity"}'


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of objects (%(default)s)")
    parser.add_argument("--phases", choices=("start", "all"), default="all", help="start: 1 to 3 alone (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and files there")
    parser.add_argument("--floods", action="store_true", help="flood each port from phase 5 on, and scrape the metrics")
    parser.add_argument("--snapshots", action="store_true", help="have a snapshot server on each node")
    flags = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = flags.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracepoint-scale-")))
        folder.mkdir(parents=True, exist_ok=True)
        run = _Run(stack, folder, Size.of(flags.scale), floods=flags.floods, snapshots=flags.snapshots)
        measured = run.measure(with_clients=flags.phases == "all")
    found = figures(measured)
    report.publish(found, flags.json, scale=flags.scale, floods=flags.floods, snapshots=flags.snapshots)
    return 1 if any(figure.met is False for figure in found) else 0


class _Run:
    """One run, phase by phase.

    Args:
        stack: Ends what the phases start.
        folder: For all files.
        size: How many objects there are.
        floods: Whether the ports are flooded, and the metrics scraped.
        snapshots: Whether each node has a snapshot server.
    """

    def __init__(self, stack: contextlib.ExitStack, folder: Path, size: Size, *, floods: bool, snapshots: bool) -> None:
        self._floods = floods
        self._stack = stack
        self._folder = folder
        self._gangs = gangs(size)
        self._measured = Measured(size)
        began_s = time.monotonic()
        self._server = stack.enter_context(filled_api_server(folder, size, snapshots=snapshots))
        _say(f"the API server runs, after {time.monotonic() - began_s:.0f} s")
        self._api = KubeClient.connect(str(self._server.kubeconfig))
        stack.callback(self._api.close)
        self._certificate = Certificate(folder)
        self._flags: Sequence[str] = ()
        self._snapshots = snapshots
        if snapshots:
            self._flags = stack.enter_context(snapshot_servers(folder, self._api, self._certificate))

    def measure(self, *, with_clients: bool) -> Measured:
        """Runs the phases."""
        self._limit()
        replicas = [self._start("one"), self._start("two")]
        if self._snapshots:
            self._wait_until_asked(replicas)
        time.sleep(_SETTLED_S)
        self._measured.settled_bytes = [replica.memory_bytes() for replica in replicas]
        self._measured.start_peak_bytes = max(replica.memory_bytes("VmHWM") for replica in replicas)
        time.sleep(_JUDGED_S)
        self._idle(replicas)
        if with_clients:
            self._clients(replicas)
        self._measured.most_bytes = replicas[0].memory_bytes("VmHWM")
        return self._measured

    def _clients(self, replicas: list[Replica]) -> None:
        """The phases with clients."""
        members = [Member(self._gangs[0], index) for index in range(self._gangs[0].count)]
        members += [Member(gang, 0) for gang in self._gangs[1:]]
        signer = Signer(self._folder)
        arguments = (self._folder, members, replicas, signer, self._certificate.ca)
        clients = self._stack.enter_context(open_clients(*arguments))
        self._connect(clients, len(members), replicas)
        webhooks = [replica.webhooks for replica in replicas]
        evictions = Evictions(self._certificate, self._server.kubeconfig, webhooks, self._gangs)
        with evictions.running(), self._flooded(replicas):
            self._disruptions(clients, replicas)
            self._measured.told_by_both_s = self._big(clients, replicas, "1")
            evictions.ask([replicas[0].webhooks])
            _say("one replica is killed")
            replicas[1].kill()
            killed_s = time.monotonic()
            clients.wait_until_fewer(len(members), _CONNECT_TIMEOUT_S)
            clients.wait_until_connected(len(members), _CONNECT_TIMEOUT_S)
            self._measured.reconnected_s = time.monotonic() - killed_s
            self._measured.failed_over_bytes = replicas[0].memory_bytes()
            self._measured.told_by_one_s = self._big(clients, replicas[:1], "2")
        self._measured.eviction_s = evictions.took_s
        self._measured.evictions_failed = evictions.failed
        self._measured.read_s = evictions.read_s

    @contextlib.contextmanager
    def _flooded(self, replicas: list[Replica]) -> Iterator[None]:
        """Floods the ports meanwhile, if that is wanted."""
        if not self._floods:
            yield
            return
        ends = threading.Event()

        def scraped() -> None:
            while not ends.wait(_SCRAPE_EVERY_S):
                began_s = time.monotonic()
                with contextlib.suppress(OSError):  # it is killed in the end
                    scrape(replicas[1])
                scrape(replicas[0])
                self._measured.scrape_s.append(time.monotonic() - began_s)

        with contextlib.ExitStack() as stack:
            share = stack.enter_context(limits.processor_group(_ATTACKERS_SHARE, lowest=True))
            for replica in replicas:
                for port, kind in _FLOODS.items():
                    attacker(stack, share, replica, kind, port, _FLOOD // len(replicas), _ATTACKERS)
            thread = threading.Thread(target=scraped, name="scrapes", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ends.set()
                thread.join(_SCRAPE_EVERY_S)
            for replica in replicas[:1]:
                text = scrape(replica).splitlines()
                closed = [line for line in text if "connections_closed_total{" in line and not line.endswith(" 0.0")]
                _say("closed: " + "; ".join(closed))

    def _limit(self) -> None:
        argv = [sys.executable, "-m", "benchmarks.operator_scale_limit", str(self._server.kubeconfig)]
        before_s = processor_s(*_API)
        done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=900)
        self._measured.limit = Limit(**json.loads(done.stdout), api_cpu_s=processor_s(*_API) - before_s)
        _say(f"limit: {self._measured.limit}")

    def _start(self, name: str) -> Replica:
        ports = self._stack.enter_context(held_ports(3))
        replica = Replica(name, self._folder, ports, self._server.kubeconfig, self._certificate, self._flags)
        before_s, began = processor_s(*_API), time.time()
        replica.start()
        self._stack.callback(replica.stop)
        started = self._measured.starts
        started.wall_s.append(replica.wait_until_ready())
        started.cpu_s.append(replica.cpu_s())
        started.api_cpu_s.append(processor_s(*_API) - before_s)
        started.peak_bytes.append(replica.memory_bytes("VmHWM"))
        started.blocked += replica.blocked(began)
        _say(f"{name} is ready after {started.wall_s[-1]:.1f} s, {started.cpu_s[-1]:.1f} s of CPU")
        return replica

    def _wait_until_asked(self, replicas: list[Replica]) -> None:
        """Waits until the replicas have asked each snapshot server for the first time."""
        until, all_bytes = time.monotonic() + _CONNECT_TIMEOUT_S, self._measured.size.nodes * CAPACITY_BYTES
        for replica in replicas:
            while _capacity_bytes(replica) < all_bytes:
                if time.monotonic() > until:
                    raise TimeoutError(f"not all snapshot servers were asked within {_CONNECT_TIMEOUT_S:.0f} s")
                time.sleep(1.0)

    def _idle(self, replicas: list[Replica]) -> None:
        before_s, began = [replica.cpu_s() for replica in replicas], time.time()
        time.sleep(_IDLE_S)
        used_s = [replica.cpu_s() - before for replica, before in zip(replicas, before_s, strict=True)]
        self._measured.idle = max(used_s) / _IDLE_S
        self._note_blocked(replicas, began)
        _say(f"idle: {self._measured.idle:.2%} of a core")

    def _connect(self, clients: Clients, count: int, replicas: list[Replica]) -> None:
        before_s, began = sum(replica.cpu_s() for replica in replicas), time.time()
        began_s = time.monotonic()
        self._measured.connected_s = clients.wait_until_connected(count, _CONNECT_TIMEOUT_S)
        if self._snapshots:
            placed = clients.listen(count, "placed", None, _CONNECT_TIMEOUT_S)
            self._measured.placed_s = time.monotonic() - began_s
            self._measured.unplaced = count - len({word.pod_uid for word in placed})
        self._measured.connect_cpu_s = sum(replica.cpu_s() for replica in replicas) - before_s
        time.sleep(_SETTLED_S)
        self._measured.connections = count
        self._measured.connected_bytes = [replica.memory_bytes() for replica in replicas]
        self._note_blocked(replicas, began)
        _say(f"{count} clients are connected after {self._measured.connected_s:.1f} s")

    def _disruptions(self, clients: Clients, replicas: list[Replica]) -> None:
        """100 a minute, each of another JobSet."""
        tainted, began = {}, time.time()
        before_s = [replica.cpu_s() for replica in replicas]
        victims = self._gangs[6 : 6 + _A_MINUTE]
        for number, gang in enumerate(victims):
            time.sleep(max(0.0, began + number * 60 / _A_MINUTE - time.time()))
            tainted[gang.pod_uid(0)] = time.time()
            self._taint(gang, "0")
        words = clients.listen(len(victims), "told", None, 2.0) if not victims else []
        until = time.monotonic() + _TOLD_TIMEOUT_S
        told: dict[str, float] = {}
        while len(told) < len(victims) and time.monotonic() < until:
            for word in [*words, *clients.listen(1, "told", None, 1.0)]:
                if word.pod_uid in tainted:
                    told.setdefault(word.pod_uid, word.at)
        took_s = time.time() - began
        self._measured.notice_s = [at - tainted[uid] for uid, at in told.items()]
        self._measured.missed += len(victims) - len(told)
        used_s = [replica.cpu_s() - before for replica, before in zip(replicas, before_s, strict=True)]
        self._measured.disruptions_busy = max(used_s) / took_s
        self._note_blocked(replicas, began)
        _say(f"{len(told)} of {len(victims)} disruptions were told")
        began, before_s = time.time(), [replica.cpu_s() for replica in replicas]
        time.sleep(_SETTLED_S)
        used_s = [replica.cpu_s() - before for replica, before in zip(replicas, before_s, strict=True)]
        self._measured.open_busy = max(used_s) / (time.time() - began)
        self._measured.open_gangs = len(victims)

    def _big(self, clients: Clients, replicas: list[Replica], value: str) -> list[float]:
        """Returns for each pod of the big JobSet after how many seconds it was told."""
        gang, began = self._gangs[0], time.time()
        before_s = sum(replica.cpu_s() for replica in replicas)
        self._taint(gang, value)
        words = clients.listen(gang.count, "told", gang, _TOLD_TIMEOUT_S)
        self._measured.missed += gang.count - len(words)
        _say(f"{len(words)} of {gang.count} pods of the big gang were told")
        receipts = clients.listen(len(words), "acknowledged", gang, _TOLD_TIMEOUT_S)
        self._measured.receipts_missed += len(words) - len(receipts)
        self._measured.big_cpu_s.append(sum(replica.cpu_s() for replica in replicas) - before_s)
        self._taint(gang, None)
        clients.listen(gang.count, "retracted", gang, _TOLD_TIMEOUT_S)
        time.sleep(_SETTLED_S)
        self._note_blocked(replicas, began)
        return [word.at - began for word in words]

    def _taint(self, gang: Gang, value: str | None) -> None:
        taints = [] if value is None else [{"key": TAINT, "value": value, "effect": "NoSchedule"}]
        asyncio.run(self._api.merge(objects.NODES, None, gang.node(0), {"spec": {"taints": taints}}))

    def _note_blocked(self, replicas: list[Replica], since: float) -> None:
        found = [item for replica in replicas for item in replica.blocked(since)]
        self._measured.blocked += found
        longest = sorted(found, key=lambda item: -item.took_s)[:_TOLD_BLOCKED]
        busiest = sorted(found, key=lambda item: -item.worked_s)[:_TOLD_BLOCKED]
        for item in [*longest, *(item for item in busiest if item not in longest)]:
            _say(f"  {item.thread} blocked for {item.took_s:.3f} s, {item.worked_s:.3f} s of CPU, by {item.what}")


def _capacity_bytes(replica: Replica) -> float:
    """The capacity of the snapshot servers that have answered a replica."""
    shown = (line for line in scrape(replica).splitlines() if line.startswith(_CAPACITY))
    return sum(float(line.split()[-1]) for line in shown)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
