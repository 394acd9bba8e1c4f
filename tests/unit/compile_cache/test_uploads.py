"""Programs on their way to the store: what happens if the system starts no thread for them."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from pathlib import Path

import pytest

from gracepoint import threads
from gracepoint.checkpoint.storage.storage_path import storage_path
from gracepoint.compile_cache.uploads import ProgramUploads
from tests.interrupts import interrupt_at
from tests.unit.checkpoint.fakes.thread_limit import allow_threads

THREAD = "gracepoint: keeps programs"


def test_programs_without_a_thread_do_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    allow_threads(monkeypatch, 0, name=THREAD)
    uploads = ProgramUploads(lambda written_bytes: None)
    uploads.add(storage_path(tmp_path) / "a", 1, lambda: b"a")
    began_s = time.monotonic()
    uploads.close(30.0)
    assert time.monotonic() - began_s < 5.0
    assert uploads.written == 0
    assert "compiled programs not written in time count=1" in caplog.text


def test_a_later_thread_writes_what_no_thread_could(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = ProgramUploads(lambda written_bytes: None)
    with monkeypatch.context() as patch:
        allow_threads(patch, 0, name=THREAD)
        uploads.add(storage_path(tmp_path) / "a", 1, lambda: b"a")
    uploads.add(storage_path(tmp_path) / "b", 1, lambda: b"b")
    uploads.close(30.0)
    assert uploads.written == 2
    assert [(tmp_path / name).read_bytes() for name in "ab"] == [b"a", b"b"]


def test_the_end_writes_what_no_thread_could(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = ProgramUploads(lambda written_bytes: None)
    with monkeypatch.context() as patch:
        allow_threads(patch, 0, name=THREAD)
        uploads.add(storage_path(tmp_path) / "a", 1, lambda: b"a")
    uploads.close(30.0)
    assert (tmp_path / "a").read_bytes() == b"a"


def test_wherever_an_addition_is_interrupted_later_programs_are_written(tmp_path: Path) -> None:
    for number in itertools.count():
        uploads, folder = ProgramUploads(lambda written_bytes: None), tmp_path / str(number)
        adding = [functools.partial(uploads.add, storage_path(folder) / name, 1, lambda: b"x") for name in "abcdefgh"]
        reached = [interrupt_at(add, number, [threads]) for add in adding]
        uploads.add(storage_path(folder) / "last", 1, lambda: b"x")
        began_s = time.monotonic()
        uploads.close(30.0)
        assert time.monotonic() - began_s < 15.0, f"bytecode {number}"
        assert (folder / "last").exists(), f"bytecode {number}"
        if not any(reached):
            break
    assert number > 20
