"""A gang that is killed again and again without notice loses at most one interval each time, and ends bit for bit.

Each time one process is killed first, at a random instant, and the others a little later, as a JobSet deletes the pods
that are left. Where a server dies, too, it is that of the same node, at the same instant; another one takes its place.
The short forms are part of ``make test``; ``make snapshot-kills`` has 500 kills of processes with 64 MiB each, and 50
with servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.launcher import Processes
from tests.multiprocess.snapshot_kills_process import PLACEMENT
from tests.unit.snapshots.fakes.servers import NAME, ServedByProcess, shown

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("snapshot_kills_process.py")
KILLS = int(os.environ.get("SNAPSHOT_KILLS", "3"))
SERVER_KILLS = int(os.environ.get("SNAPSHOT_SERVER_KILLS", "2"))
MIB = int(os.environ.get("SNAPSHOT_KILLS_MIB", "1"))
#: A kill comes within so many seconds of the training's begin.
WITHIN_S = 1.0
PROCESSES = 4
_ENDLESS = 1 << 30
_LATE = 1 << 40


class NodesToKill:
    """A server for each node. Each process writes to that of its node and to the next one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._until_it_ends = contextlib.ExitStack()
        self.servers = [self._start() for _ in range(PROCESSES)]

    def _start(self) -> ServedByProcess:
        self._started += 1
        own = self._folder / f"server-{self._started}"
        own.mkdir()
        server = ServedByProcess(own, "--capacity-bytes", str((16 * MIB + 16) << 20))
        self._until_it_ends.callback(server.close)
        return server

    def kill_server(self, node: int) -> None:
        self.servers[node].process.kill()

    def replace_server(self, node: int) -> None:
        self.servers[node].close()
        self.servers[node] = self._start()

    def environment(self, index: int, attempt: int) -> dict[str, str]:
        at = [(f"node-{node}", f"127.0.0.1:{server.port}") for node, server in enumerate(self.servers)]
        placement = {
            "capability": shown(attempt=attempt, until=_LATE),
            "server_name": NAME,
            "authorities": "".join(server.authority.cert_pem.bytes().decode() for server in self.servers),
            "write": [at[index % PROCESSES], at[(index + 1) % PROCESSES]],
            "read": at,
        }
        return {PLACEMENT: json.dumps(placement)}

    def close(self) -> None:
        self._until_it_ends.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NodesToKill]:
    made = NodesToKill(tmp_path)
    yield made
    made.close()


def started(nodes: NodesToKill, root: Path, attempt: int, steps: int, count: int = PROCESSES) -> Processes:
    return Processes.start(
        SCRIPT,
        count,
        arguments=[str(root), f"job-{attempt}", str(steps), str(MIB * PROCESSES)],
        environments=[nodes.environment(index, attempt) for index in range(count)],
        devices=1,
    )


def numbers(processes: Processes, word: str) -> list[int]:
    return [int(number) for each in processes for number in re.findall(rf"^{word} (-?\d+)$", each.output, re.M)]


def kill(processes: Processes, nodes: NodesToKill, chance: random.Random, *, with_server: bool) -> int:
    """Kills all processes, one of them first. Returns the newest step that any of them had passed."""
    for process in processes:
        begun = int(process.wait_for_line("restored", timeout_s=120).rpartition(" ")[2])
        # Once the second step is passed, the first is safe in as many servers as there are.
        process.wait_for_line(f"passed {begun + 2}", timeout_s=120)
    time.sleep(chance.uniform(0, WITHIN_S))
    first = chance.randrange(PROCESSES)
    processes[first].signal(signal.SIGKILL)
    if with_server:
        nodes.kill_server(first)
    time.sleep(chance.uniform(0, 0.2))
    for process in processes:
        process.signal(signal.SIGKILL)
    processes.wait(timeout_s=60)
    assert not [line for each in processes for line in re.findall(r".*(?:torn|skipped).*", each.output)]
    if with_server:
        nodes.replace_server(first)
    return max(numbers(processes, "passed"))


@pytest.mark.timeout(60 + 40 * max(KILLS, SERVER_KILLS))
@pytest.mark.parametrize(
    ("kills", "with_server"), [pytest.param(KILLS, False, id="gang"), pytest.param(SERVER_KILLS, True, id="and server")]
)
def test_no_kill_costs_more_than_one_interval_and_no_bit_is_wrong(
    tmp_path: Path, nodes: NodesToKill, kills: int, with_server: bool
) -> None:
    chance = random.Random(20)
    passed, lost = -1, []
    for attempt in range(1, kills + 1):
        with started(nodes, tmp_path / "steps", attempt, _ENDLESS) as processes:
            now_passed = kill(processes, nodes, chance, with_server=with_server)
            restored = numbers(processes, "restored")
        print(f"kill {attempt}: step {restored[0]} was restored, {now_passed} is passed", flush=True)
        assert restored == [restored[0]] * PROCESSES, "the processes restored different steps"
        assert passed - 1 <= restored[0] <= passed, f"kill {attempt}: {passed} was passed, {restored[0]} is restored"
        lost.append(passed - restored[0])
        passed = now_passed
    with started(nodes, tmp_path / "steps", kills + 1, passed + 2) as processes:
        results = processes.wait(timeout_s=120)
        assert [result.code for result in results] == [0] * PROCESSES, processes.output()
        restored = numbers(processes, "restored")
        assert passed - 1 <= restored[0] <= passed
    print(f"kills={kills} lost_steps={sum(lost)} lost_at_most={max(lost)} torn=0 steps={passed + 2}")


@pytest.mark.timeout(180)
def test_four_become_three_after_a_node_and_its_server_died(tmp_path: Path, nodes: NodesToKill) -> None:
    chance = random.Random(1)
    with started(nodes, tmp_path / "steps", 1, _ENDLESS) as processes:
        passed = kill(processes, nodes, chance, with_server=True)
    with started(nodes, tmp_path / "steps", 2, passed + 2, count=3) as processes:
        results = processes.wait(timeout_s=120)
        assert [result.code for result in results] == [0] * 3, processes.output()
        assert passed - 1 <= numbers(processes, "restored")[0] <= passed
