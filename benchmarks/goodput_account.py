"""Holds the operator's account of a job's time against a wall clock, over many disruptions.

    python -m benchmarks.goodput_account [--disruptions 100] [--seed N] [--jobs 4] [--json FILE]

The operator is the real one, with its server over TLS. The processes are real, but do not compute: they pass their time
by sleeping, and send the library's own messages over the library's own channel. The API server is in memory; this
program does what controllers and kubelets do, and a kubelet looks at its containers once a second, as real ones do. The
wall clock: when this program creates and binds pods, when the kernel starts and ends processes, and when these passed
each stage and each step. Training and saving are one category. Ends with 1 if a category differs by more than 1 percent
of the whole time.

Disruptions: a taint; a kill without notice; a node that is lost, after which the other process hangs; and a taint with
the operator killed before the save and started after the exit.

Threads: one for each container, which does the kubelet's work for it and ends with its process. The operator's server
has its own. Several jobs run in processes of their own, each with its own operator.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import trustme

from benchmarks.goodput_trainer import Orders
from demo.records import Step
from gracepoint_operator.channel.connections import ConnectionLimits
from gracepoint_operator.controller import Controller
from gracepoint_operator.goodput import stored
from gracepoint_operator.kube import kinds
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.server import Server
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.workloads.jobset import JOBSETS
from tests.soak import account, report, trainer
from tests.testcluster.api_server import free_ports
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, Body, Clock

KINDS = ("taint", "kill", "node lost", "operator killed")
_WAIT_S = 120.0
_LOOK_S = 0.02


class Job:
    """One job with its operator.

    Args:
        folder: For what the processes write.
        seed: Decides everything.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._api = MemoryApi(Clock(time.time()))
        self._authority = trustme.CA()
        self._tls = folder / "tls"
        self._tls.mkdir()
        issued = self._authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(str(self._tls / "tls.key"))
        issued.cert_chain_pems[0].write_to_path(str(self._tls / "tls.crt"))
        self._authority.cert_pem.write_to_path(str(self._tls / "ca.crt"))
        (self._port,) = free_ports(1)
        self._server: Server | None = None
        self._core: Controller | None = None  # None while the operator is down
        self._lock = threading.Lock()  # guards the API server's objects while several threads write
        self._pods: list[account.PodTimes] = []
        self._words: dict[str, list[account.Word]] = {}

    def run(self, disruptions: int) -> tuple[list[tuple[str, float, float]], float]:
        """Returns both accounts, and the seconds that the job ran."""
        self._api.add(kinds.NAMESPACES, objects.namespace())
        self._api.add(kinds.POLICIES, objects.policy(exitBreaker={"savedExits": 0}))
        jobset = objects.jobset()
        since_s = time.time()
        jobset["metadata"]["creationTimestamp"] = objects.stamp(since_s)
        self._put(JOBSETS, jobset)
        self._start_operator()
        chances: list[str] = []
        for number in range(disruptions):
            chances = chances or self._chance.sample(KINDS, len(KINDS))
            self._live(number, chances.pop())
        time.sleep(2.0)  # the last account is written
        (body,) = self._api.of(kinds.POLICIES)
        entry = (CheckpointPolicy.of(body).status.goodput or [])[0]
        self._stop_operator()
        end_s = time.time()
        ledger = stored.read(entry)
        theirs = {category.value: ms / 1000 for category, ms in ledger.spent(round(end_s * 1000)).items()}
        steps = [json.loads(line) for line in (self._folder / "steps.jsonl").read_text().splitlines()]
        done = [Step(process=0, attempt=0, step=s["step"], loss="", batch="", unix_s=s["unix_s"]) for s in steps]
        words = account.read_words(self._folder)
        for pod, said in self._words.items():
            words[pod] = [*said, *words.get(pod, [])]
        since_s = ledger.since_ms / 1000
        lives = account.lives(self._pods, words, done, end_s=end_s)
        return account.compared(account.spent(lives, since_s=since_s, end_s=end_s), theirs), end_s - since_s

    def _start_operator(self) -> None:
        metrics = Metrics()
        core = Controller(self._api, metrics, time.time, "replica-a", write_interval_s=0.2)
        self._server = Server(
            core,
            self._api,
            metrics,
            Certificates(self._tls, overlap_s=86400.0),
            webhook_token="x" * 40,
            service_url="https://localhost",
            https_port=self._port,
            webhook_port=0,
            health_port=0,
            host="localhost",
            limits=ConnectionLimits(),
            canary=False,
        )
        self._server.start(lambda: None)
        _until(lambda: core.ready, "the operator to know the cluster")
        self._core = core

    def _stop_operator(self) -> None:
        assert self._server is not None
        self._core = None
        self._server.stop()

    def _live(self, life: int, kind: str) -> None:
        """One start of the gang, until a disruption has ended it."""
        chance = self._chance
        time.sleep(chance.uniform(0.5, 3.0))
        self._put(JOBSETS, {**objects.jobset(restarts=life), "metadata": self._api.of(JOBSETS)[0]["metadata"]})
        self._put(kinds.JOBS, objects.job(attempt=life))
        for name in ("node-1", "node-2"):
            self._put(kinds.NODES, _node(name, life))
        containers = [_Container(self, index, life) for index in (0, 1)]
        try:
            self._go_through(life, kind, containers)
        except BaseException:
            for container in containers:
                container.kill()
            raise

    def _go_through(self, life: int, kind: str, containers: list[_Container]) -> None:
        chance = self._chance
        for container in containers:
            container.create()
        for container in containers:
            time.sleep(chance.uniform(0.1, 1.5))
            container.bind()
        orders = self._orders(life)
        for container in containers:
            time.sleep(chance.uniform(0.2, 1.5))
            container.start(orders)
        words = self._folder / f"words.{containers[0].name}.jsonl"
        _until(lambda: words.exists() and "resumed" in words.read_text(), "the restore")
        time.sleep(chance.uniform(4.0, 14.0))
        self._disrupt(kind, containers, words)
        for container in containers:
            container.join()
        if kind == "operator killed":
            self._start_operator()
        for container in containers:
            container.delete()
        for body in self._api.of(kinds.PREEMPTIONS):
            self._put(kinds.PREEMPTIONS, body)

    def _disrupt(self, kind: str, containers: list[_Container], words: Path) -> None:
        chance, (first, second) = self._chance, containers
        if kind in ("taint", "operator killed"):
            self._put(kinds.NODES, _node("node-1", first.life, taints=[objects.taint()]))
            if kind == "operator killed":
                _until(lambda: "noticed" in words.read_text(), "the notice")
                self._stop_operator()
            return
        if kind == "node lost":
            first.lose_node()
        first.kill()
        time.sleep(chance.uniform(3.0, 8.0) if kind == "node lost" else chance.uniform(0.05, 1.0))
        second.kill()

    def _orders(self, life: int) -> Orders:
        saved: dict[str, Any] = {"step": 0, "note": None}
        if (checkpoint := self._folder / "checkpoint").exists():
            saved = json.loads(checkpoint.read_text())
        chance = self._chance
        return Orders(
            parent=os.getpid(),
            folder=str(self._folder),
            settings={},
            index=0,
            life=life,
            restored=saved["step"],
            note=saved["note"],
            join_s=chance.uniform(0.5, 2.0),
            restore_s=chance.uniform(0.3, 2.0),
            compile_s=chance.uniform(0.3, 3.0),
            pace_s=chance.uniform(0.03, 0.1),
            save_s=chance.uniform(0.1, 0.8),
            exit_s=chance.uniform(0.2, 2.0),
        )

    def _put(self, kind: kinds.Kind, body: Body) -> None:
        with self._lock:
            made = self._api.add(kind, body)
        if (core := self._core) is not None:
            core.feed(kind, "MODIFIED", made)

    def _remove(self, kind: kinds.Kind, body: Body) -> None:
        with self._lock:
            self._api.remove(kind, body)
        if (core := self._core) is not None:
            core.feed(kind, "DELETED", body)


class _Container:
    """A pod with its process. Its thread does the kubelet's work for it."""

    def __init__(self, job: Job, index: int, life: int) -> None:
        self._job = job
        self._index = index
        self.life = life
        self.name = f"train-workers-0-{index}-{life}xyz"
        self._ended_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = False
        self._phase_s = job._chance.uniform(0.0, 1.0)  # when in each second its kubelet looks

    def create(self) -> None:
        self._created_s = time.time()
        body = objects.pod(self._index, attempt=self.life, on="", created_at=self._created_s, phase="Pending")
        body["spec"]["nodeName"] = ""
        self._body = body
        self._job._put(kinds.PODS, body)

    def bind(self) -> None:
        self._bound_s = time.time()
        self._body["spec"]["nodeName"] = f"node-{self._index + 1}"
        self._body["status"]["conditions"] = [objects.condition("PodScheduled", at=self._bound_s)]
        self._job._put(kinds.PODS, self._body)

    def start(self, orders: Orders) -> None:
        job, uid = self._job, self._body["metadata"]["uid"]
        token = job._folder / f"token.{self.name}"
        token.write_text(self.name)
        job._api.bind_token(self.name, NAMESPACE, uid)
        settings = {
            "namespace": NAMESPACE,
            "pod_name": self.name,
            "pod_uid": uid,
            "jobset_name": "train",
            "jobset_uid": JOBSET_UID,
            "restart_attempt": self.life,
            "operator_url": f"https://localhost:{job._port}",
            "ca_certificate": job._authority.cert_pem.bytes().decode(),
            "token_file": str(token),
        }
        own: dict[str, Any] = {**orders.__dict__, "settings": settings, "index": self._index}
        argv: list[str] = [sys.executable, "-m", "benchmarks.goodput_trainer", json.dumps(own)]
        with (job._folder / f"stderr.{self.name}").open("wb") as errors:
            self._process = subprocess.Popen(argv, stderr=errors)
        self._started_s = time.time()
        job._words[self.name] = [account.Word(self._started_s, trainer.BEGAN)]
        self._thread = threading.Thread(target=self._look_after, name=f"kubelet of {self.name}")
        self._thread.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def lose_node(self) -> None:
        self._lost = True
        self._job._remove(kinds.NODES, _node(f"node-{self._index + 1}", self.life))

    def join(self) -> None:
        """Waits until the kubelet has written the end of the process."""
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive(), f"waited {_WAIT_S:.0f} s for the end of {self.name}"
        times = (self._created_s, self._bound_s, self._ended_s)
        self._job._pods.append(account.PodTimes(self.name, self.life, self._index, *times))

    def delete(self) -> None:
        self._job._remove(kinds.PODS, self._body)

    def _look_after(self) -> None:
        ended = threading.Thread(target=self._wait, name=f"end of {self.name}")
        ended.start()
        state: Body = {"running": {"startedAt": objects.stamp(self._started_s)}}
        self._write("Running", state)
        ended.join()
        assert self._ended_s is not None
        assert self._process is not None
        if not self._lost:
            times = {"startedAt": objects.stamp(self._started_s), "finishedAt": objects.stamp(self._ended_s)}
            self._write("Failed", {"terminated": {**times, "exitCode": self._process.returncode}})

    def _write(self, phase: str, state: Body) -> None:
        """Writes what the kubelet finds when it looks next."""
        time.sleep((self._phase_s - time.time()) % 1.0)
        time.sleep(0.05)
        self._body["status"] |= {"phase": phase, "containerStatuses": [{"state": state}]}
        self._job._put(kinds.PODS, self._body)

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._ended_s = time.time()


def _node(name: str, life: int, **fields: Any) -> Body:
    """A node; another one of the same name in each life."""
    body = objects.node(name, **fields)
    body["metadata"]["uid"] = f"uid-{name}-{life}"
    return body


def _until(holds: Any, what: str) -> None:
    give_up_s = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"waited {_WAIT_S:.0f} s for {what}")
        time.sleep(_LOOK_S)


def _measured(seed: int, disruptions: int) -> tuple[list[tuple[str, float, float]], float]:
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        return Job(Path(folder), seed).run(disruptions)


def main() -> int:
    """Returns 1 if the accounts differ too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disruptions", type=int, default=100, help="of all jobs together (%(default)s)")
    parser.add_argument("--jobs", type=int, default=4, help="how many run at the same time (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="what is done when (default: any)")
    parser.add_argument("--json", type=Path, default=None, help="write the figures into this file")
    flags = parser.parse_args()
    seed = secrets.randbelow(10**6) if flags.seed is None else flags.seed
    each = -(-flags.disruptions // flags.jobs)
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(flags.jobs, mp_context=spawning) as pool:
        results = list(pool.map(_measured, range(seed, seed + flags.jobs), [each] * flags.jobs))
    rows = [
        (category, sum(rows[n][1] for rows, _ in results), sum(rows[n][2] for rows, _ in results))
        for n, (category, _, _) in enumerate(results[0][0])
    ]
    print(f"seed {seed}, {flags.jobs} jobs, {each * flags.jobs} disruptions")
    print(report.account_table(rows))
    if flags.json is not None:
        flags.json.write_text(json.dumps({"seed": seed, "disruptions": each * flags.jobs, "rows": rows}, indent=2))
    problems = report.unlike(rows)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
