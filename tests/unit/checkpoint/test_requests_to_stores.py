"""What saves and restores cost in requests to a store, as ``docs/storage.md`` says, and that nothing else is asked."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from gracepoint.checkpoint.format.layout import MANIFEST
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.objects.object_store import ObjectPath
from gracepoint.checkpoint.storage.storage_path import Value
from gracepoint.process_group import ProcessGroup
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Exchange
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import engine, in_gang, save, small_state

pytestmark = pytest.mark.usefixtures("unhedged")

PATIENCE_S = 60.0
IDLE_S = 1.0
#: An object with values of an array.
CHUNK = re.compile(r"/default/\w+/[\d.]+($|\?)")
SMALL = re.compile(rf"{MANIFEST}$|_METADATA$|_sharding$|process_0\.json$|\.gracepoint-reading")
#: What names the objects that a restore of step 3 asks for before it reads values.
NAMES = (
    *(f"/{step}/{MANIFEST}" for step in (1, 2, 3)),
    "/3/default/_METADATA",
    "/3/default/_sharding",
    "/3/host_state/process_0",
    "/.gracepoint-reading.3.",
)


def of(exchanges: Sequence[Exchange], kind: str) -> list[str]:
    return [unquote(each.asked.target) for each in exchanges if each.asked.kind == kind]


@pytest.mark.parametrize("count", [1, 2])
def test_a_save_costs_what_the_docs_say(far: Bucket, store_proxy: FaultProxy, count: int) -> None:
    root, saves = f"{far.uri}/run", list[list[Exchange]]()

    def run(gang: ProcessGroup) -> None:
        checkpointer = engine(root, gang)
        for step in (5, 6):
            if gang.process_index == 0:
                store_proxy.reset()
            gang.barrier(f"begin {step}", timeout_s=PATIENCE_S)
            save(checkpointer, step, small_state())
            gang.barrier(f"end {step}", timeout_s=PATIENCE_S)
            if gang.process_index == 0:
                saves.append(list(store_proxy.exchanges))
            gang.barrier(f"counted {step}", timeout_s=PATIENCE_S)
        checkpointer.close(PATIENCE_S)

    in_gang(count, run)
    for number, exchanges in enumerate(saves):
        stored = [entry.key for entry in storage_path(f"{root}/{5 + number}").entries()]
        files = len(stored) - 3  # the manifest and Orbax's marks
        assert len(set(of(exchanges, "write"))) == files + count + 1 + 1 + 2
        assert len(of(exchanges, "read")) <= count + 1
        assert len(of(exchanges, "list")) <= (3 if number == 0 else 2) * count + 1
        assert {each.asked.kind for each in exchanges} == {"write", "read", "list"}


def test_a_restore_costs_what_the_docs_say(far: Bucket, store_proxy: FaultProxy) -> None:
    root, steps = f"{far.uri}/run", (1, 2, 3)
    first = engine(root)
    for step in steps:
        save(first, step, small_state(step))
    first.close(PATIENCE_S)
    assert store_proxy.exchanges  # which waits for those that are under way
    store_proxy.reset()
    second = engine(root, attempt="job-1-b")
    assert second.restore(small_state(), timeout_s=PATIENCE_S) is not None
    second.close(PATIENCE_S)
    chunks = [target for target in of(store_proxy.exchanges, "read") if "/3/default/" in target and ".z" not in target]
    assert len(set(chunks)) == len(chunks) > 0
    of_the_step = len(chunks) + 2  # the manifest and the host state
    assert len(store_proxy.exchanges) - of_the_step <= 12 + 4 * len(steps)


def test_a_restore_asks_little_before_it_reads_values(far: Bucket, store_proxy: FaultProxy) -> None:
    root, steps = f"{far.uri}/run", (1, 2, 3)
    first = engine(root)
    for step in steps:
        save(first, step, small_state(step), {"seen": step})
    first.close(PATIENCE_S)
    second = engine(root, attempt="job-1-b")
    assert store_proxy.exchanges  # which waits for those that are under way
    store_proxy.reset()
    assert second.restore(small_state(), timeout_s=PATIENCE_S) is not None
    second.close(PATIENCE_S)
    asked = sorted((each.asked for each in store_proxy.exchanges), key=lambda each: each.number)
    before = list(itertools.takewhile(lambda each: not CHUNK.search(unquote(each.target)), asked))
    found = [f"{each.kind} {name}" for each in before for name in NAMES if name in unquote(each.target)]
    assert set(found) == {*(f"read {name}" for name in NAMES[:-1]), f"write {NAMES[-1]}"}
    assert len(found) <= len(NAMES) + 2  # the step's manifest is read again with its other files, and the note
    assert [each.kind for each in before].count("list") <= 1
    assert len(before) == len(found) + [each.kind for each in before].count("list")


def test_small_files_of_a_step_are_read_at_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"{bucket.uri}/run"
    first = engine(root)
    save(first, 3, small_state(), {"seen": 3})
    first.close(PATIENCE_S)
    second = engine(root, attempt="job-1-b")
    all_begun, begun = threading.Barrier(5), list[str]()

    def meet(key: str, what: str) -> None:
        if SMALL.search(key) and what not in begun:
            begun.append(what)
            if what != f"{MANIFEST} 1":  # which is read when the directory is looked at
                all_begun.wait(PATIENCE_S)

    def slow_read(self: ObjectPath) -> Value:
        meet(self.key, f"{MANIFEST} {1 + (f'{MANIFEST} 1' in begun)}" if self.name == MANIFEST else self.key)
        return read(self)

    def slow_touch(self: ObjectPath) -> None:
        meet(self.key, self.key)
        touch(self)

    read, touch = ObjectPath.read, ObjectPath.touch
    monkeypatch.setattr(ObjectPath, "read", slow_read)
    monkeypatch.setattr(ObjectPath, "touch", slow_touch)
    assert second.restore(small_state(), timeout_s=PATIENCE_S) is not None
    assert len(begun) == 1 + all_begun.parties
    second.close(PATIENCE_S)


def test_files_of_a_tree_are_looked_at_by_one_list(far: Bucket, store_proxy: FaultProxy) -> None:
    root = f"{far.uri}/run"
    first = engine(root, options=WriteOptions(use_ocdbt=True))
    save(first, 3, small_state())
    first.close(PATIENCE_S)
    second = engine(root, attempt="job-1-b")
    assert store_proxy.exchanges
    store_proxy.reset()
    assert second.restore(small_state(), timeout_s=PATIENCE_S, tidy=False) is not None
    second.close(PATIENCE_S)
    assert not [target for target in of(store_proxy.exchanges, "stat") if "/3/default/" in target]
    assert len([target for target in of(store_proxy.exchanges, "list") if "/3/default/" in target]) <= 1


def test_every_listing_names_the_prefix_of_the_directory(far: Bucket, store_proxy: FaultProxy) -> None:
    root: Any = f"{far.uri}/some/run"
    checkpointer = engine(root)
    checkpointer.access.claim("job-0", timeout_s=PATIENCE_S)
    for step in range(3):
        checkpointer.save_in_background(step, small_state(), {})
    checkpointer.close(PATIENCE_S)
    engine(root, attempt="job-1-b").restore(small_state(), timeout_s=PATIENCE_S)
    prefixes = {parse_qs(urlsplit(each).query)["prefix"][0] for each in of(store_proxy.exchanges, "list")}
    assert prefixes
    assert all(prefix.startswith("some/run/") for prefix in prefixes)


def test_nothing_is_asked_between_saves(far: Bucket, store_proxy: FaultProxy) -> None:
    checkpointer = engine(f"{far.uri}/run")
    save(checkpointer, 1, small_state())
    asked = store_proxy.number
    time.sleep(IDLE_S)
    assert store_proxy.number == asked
    checkpointer.close(PATIENCE_S)
