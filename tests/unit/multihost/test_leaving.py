"""How processes leave a start that fails: in what order, how soon, and with which exit code."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest

from gracepoint.multihost import distributed
from gracepoint.multihost.distributed import JobAttempt, Place
from gracepoint.multihost.rendezvous import Gathering, Introduction, Line, leaving_on_sigterm, listen


def test_process_0_leaves_when_the_others_have_left() -> None:
    lines, others = [], []
    for process in (1, 2):
        mine, other = socket.socketpair()
        line = Line(mine, 0.0)
        line.who = Introduction(process, 3, "uid", 0, f"pod-{process}", "jax")
        lines.append(line)
        others.append(other)
    codes: list[int] = []
    gathering = Gathering(lines, 79, codes.append)
    with gathering.joining(30):
        pass
    others[0].close()
    time.sleep(0.3)
    assert codes == [], "process 2 is there, and JAX would abort it"
    others[1].close()
    gathering.end()
    time.sleep(0.3)
    assert codes == [79]


def test_a_peer_that_acknowledges_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        Line(sock, 0.0)
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


def test_a_service_that_does_not_come_ends_by_the_watch_and_not_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, float] = {}

    def wait(address: str, *, timeout_s: float) -> None:
        seen["s"] = timeout_s
        raise KeyboardInterrupt

    monkeypatch.setattr(distributed, "_gathered", lambda *_: Gathering([], 79))
    monkeypatch.setattr(distributed, "wait_for_coordinator", wait)
    with pytest.raises(KeyboardInterrupt):
        distributed.join_cluster(
            Place("127.0.0.1:1", 2, 1), JobAttempt("uid", 0, "pod", 79), wait_s=None, initialization_timeout=300
        )
    assert seen["s"] > 300


def test_a_sigterm_ends_a_joined_process_at_once() -> None:
    codes: list[Any] = []
    with leaving_on_sigterm(79, leave=codes.append):
        os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [79]


def test_a_port_that_is_used_on_ipv6_alone_is_used() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6) as other, pytest.raises(OSError, match="in use"):
        listen(f":{other.getsockname()[1]}").close()
