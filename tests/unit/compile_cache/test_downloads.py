"""Programs on their way from the store: what happens if the system starts no thread for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage.storage_path import storage_path
from gracepoint.compile_cache.downloads import ProgramDownloads
from tests.unit.checkpoint.fakes.thread_limit import allow_threads


def test_a_program_that_no_thread_could_read_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"program")
    downloads = ProgramDownloads(20.0)
    began_s = time.monotonic()
    with monkeypatch.context() as patch:
        allow_threads(patch, 0, name="gracepoint: reads a program")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                downloads.read(storage_path(tmp_path) / "a")
    assert downloads.read(storage_path(tmp_path) / "a") == b"program"
    assert time.monotonic() - began_s < 10.0
