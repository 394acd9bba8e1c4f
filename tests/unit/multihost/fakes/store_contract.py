"""What every key-value store must do: the same assertions for the in-memory one and for JAX's own.

``check`` runs against a store in one process; the multi-process test runs it in real JAX processes.
"""

from __future__ import annotations

import threading
import time

import pytest

from gracepoint.multihost import KeyExists, KeyTimeout, KeyValueStore


def check(store: KeyValueStore, root: str) -> None:
    """Raises AssertionError where ``store`` does not behave; ``root`` keeps its keys apart from others'."""
    assert store.try_get(f"{root}/a") is None
    store.set(f"{root}/a", "1")
    assert store.try_get(f"{root}/a") == "1"
    assert store.get(f"{root}/a", timeout_s=5) == "1"

    # A key is written once.
    with pytest.raises(KeyExists):
        store.set(f"{root}/a", "2")
    assert store.try_get(f"{root}/a") == "1"

    # An empty value is a value.
    store.set(f"{root}/empty", "")
    assert store.try_get(f"{root}/empty") == ""

    # Counters begin at nothing.
    assert [store.increment(f"{root}/count") for _ in range(3)] == [1, 2, 3]

    # A folder is what lies below its name and a slash, not what begins like it. The name itself may be a key too:
    # it is not listed, and goes with the folder.
    for key in ("folder", "folderol/x", "folder/x", "folder/y/z"):
        store.set(f"{root}/{key}", key)
    assert store.list(f"{root}/folder") == {"x": "folder/x", "y/z": "folder/y/z"}
    assert store.list(f"{root}/nothing") == {}
    store.delete_folder(f"{root}/folder")
    assert store.list(f"{root}/folder") == {}
    assert store.try_get(f"{root}/folder") is None
    assert store.try_get(f"{root}/folderol/x") == "folderol/x"
    store.delete_folder(f"{root}/nothing")

    # A wait ends with the set, or with its time.
    later = threading.Timer(0.1, store.set, (f"{root}/later", "now"))
    later.start()
    assert store.get(f"{root}/later", timeout_s=30) == "now"
    later.join()
    started = time.monotonic()
    with pytest.raises(KeyTimeout, match="never"):
        store.get(f"{root}/never", timeout_s=0.2)
    assert 0.15 < time.monotonic() - started < 5
