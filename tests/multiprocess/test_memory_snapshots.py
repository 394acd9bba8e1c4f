"""A gang that dies without notice comes back from the memory of nodes: real processes, servers, an object store.

In the place of the operator stands a server that does nothing but say where snapshots go.

The short form of the evacuation is part of ``make test``: next to nothing is sent, and nothing hurries. In ``make
evacuations``, 100 times, each process has 300 MiB, storage takes 10 MB/s from it (of fewer, it takes as long), and
SIGKILL comes after 8.0 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gracepoint.receivers.mailbox import NODE_LOST
from gracepoint.wire.frames import SnapshotPlacement
from gracepoint.wire.messages import Phase, Report, Resumption, SnapshotReport, Subscription
from gracepoint.wire.names import Env
from tests.elastic_training import GLOBAL_BATCH, floats_at, order
from tests.multiprocess import snapshots_process
from tests.multiprocess.launcher import Processes, said
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Fault, How, Rule
from tests.object_stores.servers import Server
from tests.unit.receivers.fakes.server import OperatorServer, notice
from tests.unit.snapshots.fakes.servers import MIB, NAME, ServedByProcess, shown

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("snapshots_process.py")
PACE_S = 0.3
#: More than the gang gets to before it is killed.
ENDLESS = 150
#: More than survivors take to leave that know of a lost node, and less than they take without that.
SOON_S = 85.0
EVACUATIONS = int(os.environ.get("EVACUATIONS", "1"))
MIB_EACH = int(os.environ.get("EVACUATION_MIB", "0"))
NOTICE_S = float(os.environ.get("EVACUATION_NOTICE_S", "60"))
AWAY = Rule(Fault(How.ANSWER, status=503))
_LATE = 1 << 40


class Cluster:
    """Nodes with a snapshot server each, and what says which of them hold a process's part: its own and the next one.

    Args:
        folder: For the files of the servers and of the pods.
        nodes: How many nodes there are.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder = folder
        self._until_it_ends = contextlib.ExitStack()
        self.operator = self._until_it_ends.enter_context(OperatorServer())
        self.servers: dict[str, ServedByProcess] = {}
        for node in range(nodes):
            (home := folder / f"node-{node}").mkdir()
            server = ServedByProcess(home, "--capacity-bytes", str((64 + 8 * MIB_EACH) * MIB))
            self._until_it_ends.callback(server.close)
            server.certify(self.operator.authority)
            self.servers[f"node-{node}"] = server

    def close(self) -> None:
        self._until_it_ends.close()

    @contextlib.contextmanager
    def start(
        self, count: int, attempt: int, directory: str, steps: int, *, every: int = 1, saves_every: int = 0
    ) -> Iterator[Processes]:
        """Starts the gang of an attempt, and says to each process where its part goes.

        ``every`` is the steps from one snapshot to the next, and ``saves_every`` those from one save to storage.
        """
        environments = [
            {
                **self.operator.environment(index, count, self._folder),
                Env.RESTART_ATTEMPT: str(attempt),
                Env.SNAPSHOT_EVERY_STEPS: str(every),
                Env.SAVE_EVERY_STEPS: str(saves_every),
            }
            for index in range(count)
        ]
        before = len(self.operator.streams)
        arguments = [directory, str(steps), str(PACE_S), str(MIB_EACH)]
        with Processes.start(SCRIPT, count, arguments=arguments, environments=environments, devices=1) as processes:
            self.operator.wait_until(lambda: len(self.operator.streams) >= before + count)
            for stream in self.operator.streams[before:]:
                assert stream.who.takes_snapshots
                stream.send_frame(self._placement(stream.who, attempt))
            yield processes

    def doom(self, count: int, node: str, remaining_s: float, cause: str = "SpotTermination") -> None:
        """Notifies the newest gang that a node goes away. Its processes are named no other servers."""
        for stream in self.operator.streams[-count:]:
            stream.send_frame(notice(stream, nodes=[node], remaining_s=remaining_s, cause=cause))

    def _placement(self, who: Subscription, attempt: int) -> SnapshotPlacement:
        names = list(self.servers)
        addresses = {name: f"127.0.0.1:{server.port}" for name, server in self.servers.items()}
        own = [names[(who.process_index + further) % len(names)] for further in range(2)]
        return SnapshotPlacement(
            pod_uid=who.pod_uid,
            session=who.session,
            capability=shown("jobset-uid", namespace="default", attempt=attempt, until=_LATE),
            server_name=NAME,
            write_to={name: addresses[name] for name in own},
            read_from=addresses,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, 4)
    yield made
    made.close()


def newest(processes: Processes, line: str) -> int:
    """The newest step of which a process has said that."""
    steps = [step for process in processes for step in re.findall(line, process.output, re.MULTILINE)]
    return max(map(int, steps), default=0)


def newest_safe(processes: Processes) -> int:
    return newest(processes, r"is safe step=(\d+)")


def newest_passed(processes: Processes) -> int:
    return newest(processes, r"^took \[(\d+),")


def wait_until_passed(processes: Processes, step: int) -> None:
    until_s = time.monotonic() + 90
    while newest_passed(processes) < step:
        assert time.monotonic() < until_s, processes.output()
        assert all(process.running for process in processes), processes.output()
        time.sleep(0.01)


def wait_until_safe(processes: Processes, step: int) -> None:
    until_s = time.monotonic() + 90
    while newest_safe(processes) < step:
        assert time.monotonic() < until_s, processes.output()
        assert all(process.running for process in processes), processes.output()
        time.sleep(0.01)


def kill_at(processes: Processes, step: int) -> tuple[int, int]:
    """Kills all processes at once when a step is safe. Returns the newest that was safe then, and the newest passed."""
    wait_until_safe(processes, step)
    for process in processes:
        process.signal(signal.SIGKILL)
    processes.wait(timeout_s=60)
    return newest_safe(processes), newest_passed(processes)


def ended(processes: Processes, steps: int, source: str = "memory") -> int:
    """Returns the step that was restored, once training has ended, bit for bit as one that nothing has stopped."""
    results = processes.wait(timeout_s=150)
    assert [result.code for result in results] == [0] * len(results), processes.output()
    for result in results:
        floats, counts = said(result, "bits")[0]
        assert np.array_equal(np.asarray(floats, np.uint32), floats_at(steps).view(np.uint32))
        used = Counter({record: number for record, number in enumerate(counts) if number})
        assert used == Counter(order()[: steps * GLOBAL_BATCH].tolist())
        assert said(result, "from") == [source], result.output
    (restored,) = {said(result, "restored")[0][0] for result in results}
    return int(restored)


def test_gang_killed_without_notice_comes_back_smaller_from_memory_while_the_storage_is_away(
    s3: Server, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultProxy(s3.url)
    bucket = s3.bucket(url=proxy.url)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    directory = f"{bucket.uri}/steps"
    with cluster.start(4, 0, directory, ENDLESS) as processes:
        safe, passed = kill_at(processes, 5)
    with proxy.rules(AWAY), cluster.start(3, 1, directory, passed + 3) as processes:
        proxy.reset()
        assert safe <= ended(processes, passed + 3) <= passed
        assert {each.asked.method for each in proxy.exchanges if each.status != AWAY.fault.status} == set()
    resumption = cluster.operator.messages(Resumption)[-1]
    assert (resumption.from_memory, resumption.training) == (True, True)
    assert max(report.safe_step or 0 for report in cluster.operator.messages(SnapshotReport)) > 0
    proxy.close()


@pytest.mark.timeout(480)
@pytest.mark.parametrize("number", range(EVACUATIONS))
def test_gang_whose_storage_is_too_slow_for_the_notice_loses_no_step_though_a_node_goes(
    cluster: Cluster, tmp_path: Path, number: int
) -> None:
    (directory := tmp_path / "steps").mkdir()
    # Of earlier saves: it would take far too long.
    speed = 2 * snapshots_process.storage_speed(MIB_EACH) if MIB_EACH else 0.01
    measured = {"version": 1, "processes": 2, "bytes_per_s": {"streamed": [speed], "snapshot": [speed]}}
    (directory / ".gracepoint-throughput").write_text(json.dumps(measured))
    with cluster.start(2, 0, str(directory), ENDLESS, every=3 if MIB_EACH else 1000) as processes:
        wait_until_passed(processes, 8)
        while MIB_EACH and not newest_safe(processes):  # then it is known how fast the servers take it
            time.sleep(0.1)
        cluster.doom(2, "node-1", NOTICE_S)
        kill_s = time.monotonic() + NOTICE_S
        while any(process.running for process in processes) and time.monotonic() < kill_s:
            time.sleep(0.01)
        for process in processes:
            process.signal(signal.SIGKILL)
        results = processes.wait(timeout_s=60)
        assert [result.code for result in results] == [77, 77], processes.output()
        passed = newest_passed(processes)
    end = cluster.operator.messages(Report)[-1]
    assert (end.phase, end.choice, end.steps_lost) == (Phase.EVACUATED, "Evacuate", 0)
    assert end.message.startswith(f"step {end.step} is safe in snapshot servers (2 copies), ")
    assert end.seconds_to_spare > 0
    print(f"evacuation {number}: step {end.step}, {end.bytes} bytes, {end.message}, {end.stages}", flush=True)
    assert not [path for path in directory.iterdir() if path.name.isdecimal()]
    cluster.servers.pop("node-1").close()
    with cluster.start(2, 1, str(directory), passed + 3, saves_every=1000) as processes:
        assert ended(processes, passed + 3) == end.step == passed
    (saved,) = [path for path in directory.iterdir() if path.name.isdecimal()]
    assert int(saved.name) == passed + 1  # at once, beside the training
    for server in cluster.servers.values():
        server.close()
    with cluster.start(2, 2, str(directory), passed + 3) as processes:
        assert ended(processes, passed + 3, source="storage") == passed + 1


def test_gang_comes_back_though_the_server_of_a_node_died_with_it(cluster: Cluster, tmp_path: Path) -> None:
    directory = str(tmp_path / "steps")
    with cluster.start(3, 0, directory, ENDLESS) as processes:
        safe, passed = kill_at(processes, 4)
    cluster.servers.pop("node-1").close()
    with cluster.start(3, 1, directory, passed + 3) as processes:
        assert safe <= ended(processes, passed + 3) <= passed


def test_survivors_leave_soon_once_the_node_of_process_0_is_known_to_be_lost_and_all_come_back_from_memory(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The notice cannot be put on the bell, which was in process 0, and its deadline is far away."""
    directory = str(tmp_path / "steps")
    with cluster.start(3, 0, directory, ENDLESS) as processes:
        wait_until_safe(processes, 4)
        processes[0].signal(signal.SIGUSR2)
        processes[0].wait_for_line("silent")
        cluster.servers.pop("node-0").close()
        cluster.doom(3, "node-0", 300.0, cause=NODE_LOST)
        survivors = [processes[index].wait(SOON_S) for index in (1, 2)]
        assert [survivor.code for survivor in survivors] == [79, 79], processes.output()
        assert all("has died, and training does not go on" in survivor.output for survivor in survivors)
        processes[0].signal(signal.SIGKILL)
        safe, passed = newest_safe(processes), newest_passed(processes)
    with cluster.start(3, 1, directory, passed + 3) as processes:
        assert safe <= ended(processes, passed + 3) <= passed
