"""How soon the pods of a gang are told: from a taint on a node to a notice in every mailbox, and to its receipt.

    python -m benchmarks.notice [--counts 100 1000] [--notices 5] [--cluster NOTICES] [--json FILE]

A real API server over a real etcd holds a JobSet of so many pods, as objects; a real operator process watches it; as
many of the library's own subscribers, in a few processes, connect with tokens that the API server has bound to
the pods. Again and again a Node object is tainted, everybody is told, and the taint is taken off, which retracts the
notice. All times count from just before the request that puts the taint, by the one clock of this machine. Each
receipt costs its client a new connection, as one that idled since the start would have been closed. Before that a
gang of two pods that train in the test cluster is told, with --cluster 0 it is not.

Processes: API server, etcd, operator, four of clients; all end with their count. Threads: one that reads each
process of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import trustme

from benchmarks import notice_cluster, notice_gang, report
from benchmarks.clients import start_client
from benchmarks.notice_api import api_server, process
from benchmarks.notice_results import Measured, figures
from gracepoint_operator.kube.client import KubeClient
from tests.ports import held_ports
from tests.testcluster.shell import log_tail, wait_until

_CLIENT_PROCESSES = 4
_CONNECT_TIMEOUT_S = 400.0
_TOLD_TIMEOUT_S = 60.0
_SETTLED_S = 3.0  # what subscribing, or the notice before, cost is over


class Word(NamedTuple):
    """What a client said: it was ``told`` of a preemption, has ``acknowledged`` it, or saw it ``retracted``.

    ``remaining_s``: what the notice said, as the operator wrote it.
    """

    what: str
    pod: str
    preemption: str
    at: float
    remaining_s: float = 0.0


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--counts", type=int, nargs="*", default=[100, 1000], help="subscribers (%(default)s)")
    parser.add_argument("--notices", type=int, default=5, help="for each count (%(default)s)")
    parser.add_argument("--cluster", type=int, default=20, help="for a gang of two pods of a cluster (%(default)s)")
    flags = parser.parse_args()
    told: list[report.Figure] = []
    if flags.cluster:
        told += notice_cluster.measure(flags.cluster)
    for count in flags.counts:
        print(f"{count} subscribers", flush=True)
        told += figures(count, measure(count, flags.notices))
    report.publish(told, flags.json)
    return 1 if any(figure.met is False for figure in told) else 0


def measure(count: int, notices: int) -> Measured:
    """So many subscribers, told so often."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracepoint-notice-")))
        kubeconfig = stack.enter_context(api_server(folder))
        api = KubeClient.connect(str(kubeconfig))
        stack.callback(api.close)
        tokens = folder / "tokens"
        tokens.mkdir()
        gang = asyncio.run(notice_gang.make(api, count, tokens))
        operator, url, ca = stack.enter_context(_operator(folder, kubeconfig))
        bare_bytes = operator.memory_info().rss
        used_s = _cpu_s(operator)
        began = time.monotonic()
        words = stack.enter_context(_clients(folder, gang, url, ca))
        connected_s = time.monotonic() - began
        time.sleep(_SETTLED_S)
        subscribed = (operator.memory_info().rss, _cpu_s(operator) - used_s)
        measured = Measured(bare_bytes, *subscribed, connected_s)
        for number in range(notices):
            used_s = _cpu_s(operator)
            asyncio.run(_notice(api, words, measured, count, number))
            measured.cpu_s.append(_cpu_s(operator) - used_s)
            measured.peak_bytes = max(measured.peak_bytes, operator.memory_info().rss)
        return measured


async def _notice(api: KubeClient, words: queue.Queue[Word], measured: Measured, count: int, number: int) -> None:
    """Taints, waits for all to be told and to acknowledge, untaints, waits for all to be told of that too."""
    node = number % max(count // 8, 1)
    tainted_at = time.time()
    await notice_gang.taint(api, node, str(number))
    heard = await asyncio.to_thread(_listen, words, {"told": count, "acknowledged": count})
    told = [word for word in heard if word.what == "told"]
    deadlines = {name: await notice_gang.deadline_at(api, name) for name in {word.preemption for word in told}}
    measured.sent_s += [deadlines[word.preemption] - word.remaining_s - tainted_at for word in told]
    measured.told_s += [word.at - tainted_at for word in told]
    measured.acknowledged_s += [word.at - tainted_at for word in heard if word.what == "acknowledged"]
    measured.missed += 2 * count - len(heard)
    await notice_gang.taint(api, node, None)
    await asyncio.to_thread(_listen, words, {"retracted": count})
    await asyncio.sleep(_SETTLED_S)


def _listen(words: queue.Queue[Word], wanted: dict[str, int]) -> list[Word]:
    """The words that come until there are as many as wanted, of each kind, or time is over."""
    heard: list[Word] = []
    missing = dict(wanted)
    until = time.monotonic() + _TOLD_TIMEOUT_S
    while any(missing.values()) and time.monotonic() < until:
        with contextlib.suppress(queue.Empty):
            word = words.get(timeout=max(until - time.monotonic(), 0.0))
            if missing.get(word.what, 0) > 0:
                missing[word.what] -= 1
                heard.append(word)
    return heard


@contextlib.contextmanager
def _operator(folder: Path, kubeconfig: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """One replica; gives its process, its address and the CA of its certificate."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")  # with an ECDSA key, as the chart makes it
    tls = folder / "tls"
    tls.mkdir()
    certificate.private_key_pem.write_to_path(str(tls / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(tls / "tls.crt"))
    authority.cert_pem.write_to_path(str(tls / "ca.crt"))
    webhook_token = folder / "webhook-token"
    webhook_token.write_text(secrets.token_hex())
    log = folder / "operator.log"
    with held_ports(3) as (https, webhooks, health):
        url = f"https://localhost:{https}"
        argv: list[str | Path] = [
            *(sys.executable, "-m", "gracepoint_operator", f"--kubeconfig={kubeconfig}", f"--tls-directory={tls}"),
            *(f"--service-url={url}", f"--https-port={https}", f"--health-port={health}", "--replica=benchmark"),
            *(f"--webhook-token={webhook_token}", f"--webhook-port={webhooks}"),
        ]
        with process(argv, log) as child:
            wait_until(
                "the operator",
                lambda: child.poll() is None and " ready nodes=" in log.read_text(),
                timeout_s=60,
                hint=lambda: log_tail(log),
            )
            yield psutil.Process(child.pid), url, authority.cert_pem.bytes().decode()


@contextlib.contextmanager
def _clients(folder: Path, gang: Sequence[notice_gang.Member], url: str, ca: str) -> Iterator[queue.Queue[Word]]:
    """The library's subscribers of all pods, once all are connected; gives what they say."""
    words: queue.Queue[Word] = queue.Queue()
    connected = threading.Semaphore(0)
    running: list[subprocess.Popen[str]] = []
    log = folder / "clients.log"
    try:
        for part in range(_CLIENT_PROCESSES):
            members = [
                {
                    **dataclasses.asdict(member),
                    "settings": {**member.settings, "operator_url": url, "ca_certificate": ca},
                }
                for member in gang[part::_CLIENT_PROCESSES]
            ]
            child = start_client("benchmarks.notice_clients", members, folder / f"clients-{part}.json", log)
            running.append(child)
            threading.Thread(target=_read, args=(child, words, connected), daemon=True).start()
        for _ in running:
            if not connected.acquire(timeout=_CONNECT_TIMEOUT_S):
                raise TimeoutError(f"clients not connected after {_CONNECT_TIMEOUT_S:.0f} s{log_tail(log)}")
            if any(child.poll() is not None for child in running):
                raise RuntimeError(f"a process of clients ended before all were connected{log_tail(log)}")
        yield words
    finally:
        for child in running:
            child.kill()
            child.wait()


def _read(child: subprocess.Popen[str], words: queue.Queue[Word], connected: threading.Semaphore) -> None:
    """Reads one process of clients to its end."""
    assert child.stdout is not None
    for line in child.stdout:
        what, *rest = line.split()
        if what == "connected":
            connected.release()
        else:
            pod, preemption, *numbers = rest
            words.put(Word(what, pod, preemption, *map(float, numbers)))
    child.wait()
    connected.release()  # it ended: nobody needs to wait for it


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
