"""The processes of the tests: which exit code is whose."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.nursery import Nursery


@pytest.fixture
def other_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The nursery process's end of the channel, which the test plays."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, theirs.dup() as kept, monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", lambda *_: (ours, theirs))
        patch.setattr(subprocess, "Popen", lambda *_, **__: None)
        yield kept


def test_a_process_with_the_number_of_an_ended_one_runs(other_end: socket.socket, tmp_path: Path) -> None:
    def tell(**packet: Any) -> None:
        other_end.send(json.dumps(packet).encode())

    nursery = Nursery({})
    tell(started=7)
    first = nursery.fork(tmp_path, [], {}, tmp_path)
    tell(ended=7, code=77)
    assert first.poll() == 77
    tell(started=7)
    second = nursery.fork(tmp_path, [], {}, tmp_path)
    assert second.poll() is None
    tell(ended=7, code=0)
    assert second.poll() == 0
    assert first.poll() == 77
