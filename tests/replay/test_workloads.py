"""What is around the jobs of a workload, and that the checks of files see a bucket as they see a directory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import jax.numpy as jnp
import pytest

from demo.snapshot import Pod
from demo.training import TrainingRun
from gracepoint.checkpoint import CheckpointManager
from gracepoint.checkpoint.format.layout import MANIFEST, Claim, Layout
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.steps.object_steps import FREE_S
from gracepoint.checkpoint.steps.retention import OVERTAKEN_KEPT_S
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.objects.http import close_idle_connections
from gracepoint.errors import SaveFailed
from tests.cluster import machine
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Fault, How, Rule
from tests.object_stores.servers import why_not
from tests.replay import checks, kinds, trace, workloads
from tests.replay.kinds import KINDS, Scene
from tests.replay.workloads import WORKLOADS
from tests.testcluster.api import ClusterError
from tests.waiting import until

KEEP_LAST = workloads.KEEP_LAST
BUCKET, RUN = "bucket", "run"
#: Another one than servers have by default, as the address that pods reach.
ADDRESS = "127.0.0.2"
PATIENCE_S = 60.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A store whose bucket is a folder of the test's, with the variables of its clients in the environment."""
    if reason := why_not():
        pytest.skip(f"no object stores on this machine: {reason}")
    (tmp_path / BUCKET).mkdir()
    with workloads.opened(tmp_path, ADDRESS) as (server, proxy):
        assert proxy.url.startswith(f"http://{ADDRESS}:")
        for name, value in server.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy
        close_idle_connections()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the checkpoints of a run are files: those of its directory, or of its bucket."""
    return tmp_path / BUCKET / RUN


@pytest.fixture(params=["directory", "bucket"])
def root(request: pytest.FixtureRequest, folder: Path) -> str:
    """Where the library saves to."""
    if request.param == "directory":
        return str(folder)
    request.getfixturevalue("store")
    return f"s3://{BUCKET}/{RUN}"


def save(root: str, *steps: int) -> None:
    with CheckpointManager(root, keep_last=KEEP_LAST) as manager:
        for step in steps:
            manager.save(step, {"w": jnp.full(8, float(step)), "count": step})
        manager.wait_until_finished()


def grow_old(folder: Path) -> None:
    old_s = time.time() - OVERTAKEN_KEPT_S - 1
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (old_s, old_s))


def test_the_checks_of_files_see_the_steps_that_are_kept(root: str, folder: Path) -> None:
    lacking = ["no complete checkpoint"]
    assert (checks.complete_steps(folder), checks.files(folder, KEEP_LAST)) == ([], lacking)
    folder.mkdir(parents=True)  # as of a job that was just created
    assert (checks.complete_steps(folder), checks.files(folder, KEEP_LAST)) == ([], lacking)
    save(root, 1, 2, 3)
    assert checks.complete_steps(folder) == [2, 3]
    assert checks.files(folder, KEEP_LAST) == []
    assert checks.files(folder, 1) == ["2 checkpoints, expected at most 1: steps [2, 3]"]
    (folder / "lost").write_text("")
    assert checks.files(folder, KEEP_LAST) == ["file lost"]


def test_a_save_that_was_cut_off_is_no_step_and_may_be_there_for_a_while(
    root: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*arguments: object, **keywords: object) -> bool:
        raise OSError("the process dies here")

    save(root, 1)
    way = type(commit.of(Layout(storage_path(root))))
    with monkeypatch.context() as patch:
        patch.setattr(way, "finalize", dies)
        with pytest.raises(SaveFailed, match="dies here"):
            save(root, 2)
    (cut,) = folder.glob("2.gracepoint-tmp.*")
    assert checks.complete_steps(folder) == [1]
    assert checks.files(folder, KEEP_LAST) == []
    grow_old(cut)
    found = checks.files(folder, KEEP_LAST)
    assert found
    assert all(text.startswith(f"file {cut.name}/") for text in found)
    shutil.rmtree(cut)
    alone = ["step 2, which is not complete, and of no save that was cut off"]
    assert checks.files(folder, KEEP_LAST) == (alone if way is ManifestCommit else [])


def test_a_step_of_a_bucket_that_is_being_deleted_is_not_complete(store: FaultProxy, folder: Path) -> None:
    root = f"s3://{BUCKET}/{RUN}"
    save(root, 1, 2)
    paths = Layout(storage_path(root))
    trash = paths.trash(1, "job-1-b", 1)
    commit.of(paths).discard(paths.step(1), trash)
    left = [f"file {trash.name}/deletes", "step 1, which is not complete, and of no save that was cut off"]
    assert checks.complete_steps(folder) == [2]
    assert checks.files(folder, KEEP_LAST) == left
    # A process has begun to delete it, and was killed.
    place = paths.step(1) / MANIFEST
    claim = Claim.from_bytes(place.read_bytes(), str(place))
    for ago_s, found in ((FREE_S / 2, []), (FREE_S + 1, left)):
        place.put(dataclasses.replace(claim, swept_ns=int((time.time() - ago_s) * 1e9)).to_bytes())
        assert checks.complete_steps(folder) == [2]
        assert checks.files(folder, KEEP_LAST) == found
    save(root, 3)
    assert checks.complete_steps(folder) == [2, 3]
    assert checks.files(folder, KEEP_LAST) == []


def test_a_save_that_the_store_refuses_is_complete_when_it_answers_again(store: FaultProxy, folder: Path) -> None:
    root = f"s3://{BUCKET}/{RUN}"
    save(root, 1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with store.rules(Rule(Fault(How.ANSWER, 503))):
            before = store.number
            saved = pool.submit(save, root, 2)
            until(lambda: store.number > before + 2, "requests that are refused")
            assert checks.complete_steps(folder) == [1]
        saved.result(PATIENCE_S)
    assert checks.complete_steps(folder) == [1, 2]
    assert {each.status for each in store.exchanges if each.fault is How.ANSWER} == {503}
    save(root, 3)
    assert checks.complete_steps(folder) == [2, 3]
    assert checks.files(folder, KEEP_LAST) == []


class SavingRun:
    """Stands for a run of a cluster: a thread saves one step after another to the bucket, and deletes old ones."""

    def __init__(self, folder: Path, root: str) -> None:
        self.name = RUN
        self.checkpoints = folder
        self.saved = 0
        self._root = root
        self._ended = threading.Event()

    def train(self) -> None:
        with CheckpointManager(self._root, keep_last=KEEP_LAST) as manager:
            for step in itertools.count(1):
                manager.save(step, {"w": jnp.full(8, float(step))})
                manager.wait_until_finished()
                self.saved = step
                if self._ended.wait(0.5):
                    return

    def end(self) -> None:
        self._ended.set()


def scene(run: SavingRun, store: FaultProxy) -> Scene:
    pod = Pod(name="a", node="n", phase="Running", attempt=0, process=0, exit_code=None)
    return Scene(cast(TrainingRun, run), (pod,), pod, ("n",), {}, "", {"a"}, 0.0, store)


@pytest.mark.parametrize(("kind", "how"), [("storage-503", How.ANSWER), ("storage-cut-off", How.REFUSE)])
def test_a_store_that_refuses_is_over_as_a_fault_when_a_later_save_is_complete(
    store: FaultProxy, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: How
) -> None:
    monkeypatch.setattr(kinds, "AWAY_S", 1.0)
    run = SavingRun(folder, f"s3://{BUCKET}/{RUN}")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        trained = pool.submit(run.train)
        try:
            until(lambda: run.saved > 0, "a first save")
            with KINDS[kind].happens(scene(run, store)):
                before = checks.complete_steps(folder)
            assert checks.complete_steps(folder)[-1] > before[0]
        finally:
            run.end()
        trained.result(PATIENCE_S)
    assert how in {each.fault for each in store.exchanges}
    assert checks.files(folder, KEEP_LAST) == []


@pytest.mark.parametrize(
    ("method", "key"), [("", ""), ("GET", "7"), ("PUT", ".gracepoint-lease")], ids=["nothing", "reads", "lease"]
)
def test_a_store_that_refused_no_part_of_a_step_has_refused_no_save(
    store: FaultProxy, folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, key: str
) -> None:
    monkeypatch.setattr(kinds, "AWAY_S", 0.1)
    ended = threading.Event()

    def ask() -> None:
        while method and not ended.is_set():
            with contextlib.closing(http.client.HTTPConnection(urlsplit(store.url).netloc)) as connection:
                connection.request(method, f"/{BUCKET}/{RUN}/{key}")
                connection.getresponse().read()

    happens = KINDS["storage-503"].happens(scene(SavingRun(folder, ""), store))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            with pytest.raises(ClusterError, match="waited .* for the store to refuse a PUT of a step"), happens:
                pass
        finally:
            ended.set()
        asked.result(PATIENCE_S)
    assert bool(method) == any(each.fault is How.ANSWER for each in store.exchanges)


def test_a_workload_differs_in_what_is_created() -> None:
    found = {}
    for workload in WORKLOADS.values():
        body: dict[str, Any] = {"metadata": {"labels": {"own": "label"}}}
        pods: dict[str, Any] = {"spec": {"containers": [{"name": "trainer"}]}}
        workload.change(body)
        workload.change_pods(pods)
        found[workload.name] = (set(body["metadata"]["labels"]) - {"own"}, "envFrom" in pods["spec"]["containers"][0])
    assert found == {
        trace.JOBSET: (set(), False),
        trace.JOB: (set(), False),
        trace.BUCKET: (set(), True),
        trace.KEPT: (set(), False),
        trace.QUEUED: ({"kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"}, False),
    }


def test_each_kind_is_done_to_workloads_that_there_are() -> None:
    named = {workload for kind in KINDS.values() for workload in kind.workloads}
    assert named == WORKLOADS.keys() == {workload for workload, _ in trace.SIZES}


def test_a_workload_saves_as_often_as_its_policy_says() -> None:
    for workload in WORKLOADS.values():
        spec: dict[str, dict[str, object]] = {"checkpoint": {}}
        workloads.POLICIES.get(workload.policy, workloads.POLICIES["storage"])(spec)
        memory = spec["checkpoint"].get("memory")
        steps = memory["everySteps"] if isinstance(memory, dict) else spec["checkpoint"]["everySteps"]
        assert workload.interval_steps == steps, workload.name


def test_processes_that_are_killed_at_once_are_found_before_one_of_them_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, killed = {"a", "b"}, []

    class Process:
        def __init__(self, pod: str) -> None:
            self.pod = pod

        def kill(self) -> None:
            killed.append(self.pod)
            there.clear()  # the others end once they miss it

    def trainer_process(run: TrainingRun, pod: str) -> Process:
        assert pod in there, f"{pod} has ended by itself"
        return Process(pod)

    monkeypatch.setattr(machine, "trainer_process", trainer_process)
    one = scene(SavingRun(folder, ""), cast(FaultProxy, None))
    two = dataclasses.replace(one.pod, name="b", process=1)
    with KINDS["all-processes-killed"].happens(dataclasses.replace(one, pods=(one.pod, two))):
        assert killed == ["a", "b"]
