"""How processes meet before JAX joins them: real sockets on the loopback, each process a thread of the test."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import functools
import itertools
import json
import logging
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from gracepoint.errors import AgreementError, NotJoined, SettingsError
from gracepoint.multihost import rendezvous
from gracepoint.multihost.rendezvous import Comparison, Gathering, Guest, Host, Introduction, Line, Lookup, compare
from gracepoint.wire.names import DEFAULT_NOT_JOINED_EXIT_CODE as NOT_JOINED
from tests.forked import forked
from tests.ports import held_ports, silence
from tests.waiting import until

# Servers on the loopback.
pytestmark = pytest.mark.integration

WITHIN_S = 60.0


def introduction(process_id: int, count: int = 2, attempt: int = 0, **changes: Any) -> Introduction:
    return Introduction(
        **{
            "process_id": process_id,
            "process_count": count,
            "job": "uid-1",
            "attempt": attempt,
            "pod": f"gpt-w-0-{process_id}",
            "jax": "0.10.2",
            "version": "1",
            **changes,
        }
    )


@pytest.fixture
def address() -> Iterator[str]:
    with held_ports(1) as (port,):
        yield f"127.0.0.1:{port}"


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture(autouse=True)
def _says_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SAY_EVERY_S", 0.05)


Come = Callable[..., "concurrent.futures.Future[list[Line]]"]


@pytest.fixture
def come(address: str, pool: concurrent.futures.ThreadPoolExecutor) -> Iterator[Come]:
    """Has a process come to the meeting, in a thread. Its result: its connections once all are there."""
    lines: list[Line] = []

    def gather(me: Introduction, timeout_s: float) -> list[Line]:
        if me.process_id == 0:
            found = Host(me, address, timeout_s, NOT_JOINED).gather()
        else:
            found = [Guest(me, address, timeout_s, NOT_JOINED).gather()]
        lines.extend(found)
        return found

    def begin(me: Introduction, timeout_s: float = WITHIN_S) -> concurrent.futures.Future[list[Line]]:
        return pool.submit(gather, me, timeout_s)

    yield begin
    pool.shutdown()
    for line in lines:
        line.close()


def connected(address: str) -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    host, port = rendezvous.split(address)
    found: list[socket.socket] = []

    def connects() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            found.append(socket.create_connection((host, port), timeout=WITHIN_S))
        return bool(found)

    until(connects, "process 0 to listen")
    return found[0]


def said(me: Introduction) -> bytes:
    return json.dumps(dataclasses.asdict(me)).encode() + b"\n"


@pytest.mark.parametrize("count", [2, 5])
def test_all_continue_once_all_are_there(count: int, come: Come) -> None:
    early = [come(introduction(process, count)) for process in range(1, count - 1)]
    host = come(introduction(0, count))
    last = come(introduction(count - 1, count))
    assert len(host.result(WITHIN_S)) == count - 1
    for guest in (*early, last):
        assert len(guest.result(WITHIN_S)) == 1


def test_a_thousand_processes_meet(address: str, come: Come) -> None:
    count = 1000
    host = come(introduction(0, count))
    guests = [connected(address)]
    guests[0].sendall(said(introduction(1, count)))
    assert guests[0].recv(1)  # the limit of open files is raised by now
    for process in range(2, count):
        guests.append(connected(address))
        guests[-1].sendall(said(introduction(process, count)))
    assert {line.who.process_id for line in host.result(WITHIN_S) if line.who} == set(range(1, count))
    for guest in guests:
        guest.close()


def test_a_process_of_the_attempt_before_leaves_and_its_peer_is_awaited(come: Come) -> None:
    host = come(introduction(0, attempt=3))
    straggler = come(introduction(1, attempt=2))
    error = straggler.exception(WITHIN_S)
    assert isinstance(error, NotJoined)
    assert error.code == NOT_JOINED
    assert "process 1 (gpt-w-0-1) of attempt 2 leaves" in str(error)
    assert "process 0 (gpt-w-0-0) of attempt 3 has started" in str(error)
    assert not host.done()
    own = come(introduction(1, attempt=3))
    assert [line.who for line in host.result(WITHIN_S)] == [introduction(1, attempt=3)]
    assert own.result(WITHIN_S)


def test_process_0_of_the_attempt_before_leaves_with_its_peers_when_a_newer_process_asks(
    come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    old, old_peer = come(introduction(0, 3, attempt=2)), come(introduction(1, 3, attempt=2))
    until(lambda: "it is here" in caplog.text, "the old peer to be there")
    newer = come(introduction(1, 3, attempt=3))
    for leaving in (old, old_peer):
        error = leaving.exception(WITHIN_S)
        assert isinstance(error, NotJoined), error
        assert "attempt 2" in str(error)
        assert "attempt 3" in str(error)
    assert not newer.done()
    host, last = come(introduction(0, 3, attempt=3)), come(introduction(2, 3, attempt=3))
    assert len(host.result(WITHIN_S)) == 2
    assert newer.result(WITHIN_S)
    assert last.result(WITHIN_S)


def test_another_job_at_the_same_address_is_neither_joined_nor_sent_away(
    come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    host = come(introduction(0))
    other = come(introduction(1, job="uid-2"))
    until(lambda: "still waits for its own process 0" in caplog.text, "the guest to say what it found")
    until(lambda: "has refused process 1" in caplog.text, "the host to refuse it")
    own = come(introduction(1))
    assert host.result(WITHIN_S)
    assert own.result(WITHIN_S)
    assert not other.done()
    own_host = come(introduction(0, job="uid-2"))
    assert own_host.result(WITHIN_S)
    assert other.result(WITHIN_S)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"process_count": 4}, "was told 3 processes, process 2 .* was told 4", id="processes"),
        pytest.param({"version": "2"}, "has gracepoint 1, process 2 .* has gracepoint 2", id="library"),
        pytest.param({"jax": "0.11"}, r"has jax 0\.10\.2, process 2 .* has jax 0\.11", id="jax"),
    ],
)
def test_what_cannot_train_together_is_an_error_of_all(
    changes: dict[str, Any], words: str, come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    host, peer = come(introduction(0, 3)), come(introduction(1, 3))
    until(lambda: "it is here" in caplog.text, "the peer to be there")
    for process in (come(introduction(2, 3, **changes)), host, peer):
        with pytest.raises(AgreementError, match=words):
            process.result(WITHIN_S)


@pytest.mark.parametrize(
    "bytes_sent",
    [
        pytest.param(b"", id="nothing, and closed"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="JAX's own client"),
        pytest.param(b"\x16\x03\x01\x00\xa5\x01\x00" + bytes(160), id="TLS"),
        pytest.param(b"x" * 200_000, id="a line without an end"),
        pytest.param(b'{"process_id": 1', id="half an introduction"),
        pytest.param(b"[" * 5000 + b"\n", id="brackets"),
        pytest.param(b"[1]\n", id="a list"),
        pytest.param(b"{}\n", id="no fields"),
        pytest.param(said(introduction(1)).replace(b'"uid-1"', b"7"), id="a job that is a number"),
        pytest.param(said(introduction(1)).replace(b'"process_id": 1', b'"process_id": true'), id="a truth as id"),
        pytest.param(said(introduction(1)).replace(b'"process_id": 1', b'"process_id": 2'), id="an id beyond"),
        pytest.param(said(introduction(1)).replace(b"gpt-w-0-1", b"\\n" * 9), id="lines in a name"),
        pytest.param(said(introduction(1, pod="x" * 301)), id="a long name"),
        pytest.param(said(introduction(0)), id="another process 0"),
        pytest.param(b"\xff\xfe\n", id="no UTF-8"),
    ],
)
def test_whoever_is_no_process_of_the_job_disturbs_nobody(bytes_sent: bytes, address: str, come: Come) -> None:
    host = come(introduction(0))
    with connected(address) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(bytes_sent)
    guest = come(introduction(1))
    assert [line.who for line in host.result(WITHIN_S)] == [introduction(1)]
    assert guest.result(WITHIN_S)


def test_silent_connections_take_no_place_for_long(address: str, come: Come) -> None:
    host = come(introduction(0))
    silent = [connected(address) for _ in range(200)]
    silent[0].settimeout(5.0)  # before its time to introduce itself is over
    assert silent[0].recv(1) == b""  # the oldest had to go
    guest = come(introduction(1))
    assert host.result(WITHIN_S)
    assert guest.result(WITHIN_S)
    for each in silent:
        each.close()


def test_a_silent_connection_is_closed_in_time(address: str, come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "INTRODUCTION_S", 0.05)
    host = come(introduction(0))
    with connected(address) as silent:
        assert silent.recv(1) == b""
    assert not host.done()
    guest = come(introduction(1))
    assert host.result(WITHIN_S)
    assert guest.result(WITHIN_S)


def test_jaxs_own_client_is_named(address: str, come: Come) -> None:
    host = come(introduction(0), 0.5)
    with connected(address) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        with pytest.raises(NotJoined, match="calls jax.distributed.initialize itself"):
            host.result(WITHIN_S)


def test_who_has_gone_again_is_missing_again(address: str, come: Come, caplog: pytest.LogCaptureFixture) -> None:
    host = come(introduction(0, 3))
    with connected(address) as first:
        first.sendall(said(introduction(1, 3)))
        assert first.recv(1)
    until(lambda: "process 1 (gpt-w-0-1) of attempt 0 has gone again" in caplog.text, "its end to be seen")
    assert come(introduction(2, 3), 60.0)
    assert not host.done()
    come(introduction(1, 3))
    assert len(host.result(WITHIN_S)) == 2


def test_a_pod_that_was_replaced_gives_its_place_to_the_new_one(
    address: str, come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    host = come(introduction(0, 3))
    before = come(introduction(1, 3, pod="before"))
    until(lambda: "it is here" in caplog.text, "the first pod to be there")
    after = come(introduction(1, 3, pod="after"))
    with pytest.raises(NotJoined):
        before.result(WITHIN_S)
    assert "process 1 (after) of attempt 0 has come in its place" in str(before.exception())
    come(introduction(2, 3))
    assert {line.who.pod for line in host.result(WITHIN_S) if line.who} == {"after", "gpt-w-0-2"}
    assert after.result(WITHIN_S)


def test_a_wait_without_a_limit_says_every_half_a_minute_who_is_missing(
    come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    host, guest = come(introduction(0, 4), None), come(introduction(2, 4), None)
    until(lambda: "waits for processes 1, 3; 2 of 4 are here" in caplog.text, "process 0 to say so")
    until(lambda: "it is here, and waits for processes 1, 3" in caplog.text, "the guest to say so")
    come(introduction(1, 4))
    come(introduction(3, 4))
    assert host.result(WITHIN_S)
    assert guest.result(WITHIN_S)


def test_process_0_that_comes_late_is_awaited(come: Come, caplog: pytest.LogCaptureFixture) -> None:
    guest = come(introduction(1))
    until(lambda: "refused" in caplog.text, "a first attempt to fail")
    host = come(introduction(0))
    assert guest.result(WITHIN_S)
    assert host.result(WITHIN_S)


def test_at_its_limit_each_side_leaves_and_says_for_whom_it_waited(come: Come, address: str) -> None:
    with pytest.raises(NotJoined) as alone:
        come(introduction(1), 0.2).result(WITHIN_S)
    assert f"waited 0 s for process 0 at {address}: [Errno 111] Connection refused" in str(alone.value)
    with pytest.raises(NotJoined) as host:
        come(introduction(0, 3), 0.2).result(WITHIN_S)
    assert "waited 0 s for processes 1, 2; 1 of 3 are here" in str(host.value)
    assert (alone.value.code, host.value.code) == (NOT_JOINED, NOT_JOINED)


def test_a_port_that_another_process_uses_is_waited_for(address: str, come: Come) -> None:
    with socket.create_server(rendezvous.split(address)):
        host = come(introduction(0), 0.2)
        with pytest.raises(NotJoined, match="which another process of this machine uses"):
            host.result(WITHIN_S)
        host = come(introduction(0))
    guest = come(introduction(1))
    assert host.result(WITHIN_S)
    assert guest.result(WITHIN_S)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(b"\x00\x00\x24\x04\x00", "another server answers there: JAX's coordination service", id="gRPC"),
        pytest.param(b"{}\n", "something answers there that is not process 0", id="another program"),
        pytest.param(b"", "the connection was closed at once", id="nothing"),
    ],
)
def test_another_server_at_the_address_is_named_and_process_0_awaited(
    answer: bytes, words: str, address: str, come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(rendezvous.split(address)) as server:
        guest = come(introduction(1))
        with server.accept()[0] as connection:
            connection.recv(100_000)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            until(lambda: words in caplog.text, lambda: caplog.text)
    host = come(introduction(0))
    assert host.result(WITHIN_S)
    assert guest.result(WITHIN_S)


def test_a_name_that_does_not_exist_and_a_resolver_without_an_answer_are_reported_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(number: int, *_: Any, **__: Any) -> Any:
        raise socket.gaierror(number, "as the resolver says")

    for number, words in ((socket.EAI_NONAME, "cannot be looked up: "), (socket.EAI_AGAIN, "DNS does not answer: ")):
        monkeypatch.setattr(socket, "getaddrinfo", functools.partial(fails, number))
        with pytest.raises(OSError, match=f"its name gpt-w-0-0.gpt .*{words}.*as the resolver says"):
            Lookup("gpt-w-0-0.gpt", 1)(WITHIN_S)
    with pytest.raises(OSError, match=r"cannot be looked up"):
        Lookup("x" * 70 + ".invalid", 1)(WITHIN_S)


def test_a_resolver_that_hangs_is_named_and_asked_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = [], threading.Event()

    def hangs(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments)
        answers.wait(WITHIN_S)
        return ["found"]

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    lookup = Lookup("gpt-w-0-0.gpt", 1)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="the resolver does not answer"):
            lookup(0.02)
    answers.set()
    assert lookup(WITHIN_S) == ["found"]
    assert len(asked) == 1


def test_an_address_without_a_port_is_refused() -> None:
    for wrong in ("host", "host:", ":x", "host:1x"):
        with pytest.raises(SettingsError, match="expected host:port"):
            rendezvous.split(wrong)
    assert rendezvous.split("[::1]:7") == ("::1", 7)


# Between the meeting and the end of JAX's own joining.


class Ended:
    """Notes with which code a process would have ended."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()


def met(come: Come, count: int) -> list[list[Line]]:
    coming = [come(introduction(process, count)) for process in range(count)]
    return [each.result(WITHIN_S) for each in coming]


@contextlib.contextmanager
def joined(lines: list[Line], end: Ended) -> Iterator[Gathering]:
    """A process that JAX has joined, in its ``attach``."""
    gathering = Gathering(lines, 79, end)
    with gathering.joining(WITHIN_S):
        pass
    yield gathering
    gathering.end()


def test_who_has_attached_may_end_before_the_others_have(come: Come) -> None:
    host, first, second = met(come, 3)
    ends = [Ended() for _ in range(3)]
    with joined(second, ends[2]):
        with joined(host, ends[0]), joined(first, ends[1]):
            pass
        assert not ends[2].ended.wait(0.1)
    assert [each.codes for each in ends] == [[], [], []]


@contextlib.contextmanager
def attached(come: Come, count: int) -> Iterator[list[tuple[Gathering, Ended, list[Line]]]]:
    """Processes that have attached, with their connections."""
    all_ends = [Ended() for _ in range(count)]
    with contextlib.ExitStack() as stack:
        lines = met(come, count)
        made = [stack.enter_context(joined(each, end)) for each, end in zip(lines, all_ends, strict=True)]
        for gathering in made:
            gathering.attached()
        yield list(zip(made, all_ends, lines, strict=True))


def die(lines: list[Line]) -> None:
    """As the kernel ends the connections of a process that dies."""
    for line in lines:
        line.sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("who", [0, 2])
def test_if_one_dies_later_on_the_others_know_who_and_leave_if_it_was_process_0(who: int, come: Come) -> None:
    with attached(come, 3) as processes:
        _, _, lines = processes.pop(who)
        assert [gathering.lost() for gathering, _, _ in processes] == ["", ""]
        die(lines)
        lost = {gathering.lost(WITHIN_S) for gathering, _, _ in processes}
        assert lost == {f"process {who} (gpt-w-0-{who}) of attempt 0 has died"}
        until(lambda: who or all(end.codes for _, end, _ in processes), "the others to leave before JAX aborts them")
        assert [end.codes for _, end, _ in processes] == ([[], []] if who else [[79], [79]])


def test_if_training_does_not_go_on_without_the_dead_process_all_leave(
    come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "STANDS_S", 0.2)
    goes_on = threading.Event()
    goes_on.set()
    with attached(come, 3) as processes:
        _, _, lines = processes.pop()
        for gathering, _, _ in processes:
            gathering.watch(goes_on.is_set)
        die(lines)
        assert processes[0][0].lost(WITHIN_S)
        assert not processes[0][1].ended.wait(1.5), "it may save for a preemption, or not need the other one"
        goes_on.clear()
        for _, end, _ in processes:
            assert end.ended.wait(WITHIN_S)
            assert end.codes == [79]


def test_a_connection_that_was_lost_is_forgotten_once_training_has_gone_on(
    come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "GOES_ON_S", 0.1)
    monkeypatch.setattr(rendezvous, "STANDS_S", 0.5)
    goes_on = threading.Event()
    goes_on.set()
    with attached(come, 2) as processes:
        (host, end, _), (_, _, lines) = processes
        host.watch(goes_on.is_set)
        die(lines)
        assert host.lost(WITHIN_S)
        until(lambda: not host.lost(), "it to be forgotten")
        goes_on.clear()  # an evaluation, a save, a compilation
        assert not end.ended.wait(2.0)


def test_who_begins_to_watch_after_a_loss_has_time_for_the_first_step(
    come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "STANDS_S", 3.0)
    with attached(come, 2) as processes:
        (host, end, _), (_, _, lines) = processes
        die(lines)
        assert host.lost(WITHIN_S)
        assert not end.ended.wait(3.5)
        host.watch(lambda: False)
        assert not end.ended.wait(2.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a machine is said to be lost, a connection need not be silent for long."""
    options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1, "TCP_USER_TIMEOUT": 1000}
    monkeypatch.setattr(rendezvous, "KEEPALIVE_SUSPECTED", options)
    monkeypatch.setattr(rendezvous, "STANDS_S", 0.2)


def fall_silent(lines: list[Line], others: Iterable[Gathering]) -> None:
    """As the connections of a machine that is off, which refuses no new one either. The others are told of it."""
    for line in lines:
        silence(line.sock)
    for gathering in others:
        gathering.needs_process_0 = lambda: False  # here nobody listens any more
        gathering.suspect(True)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("who", [0, 2])
def test_if_a_machine_is_said_to_be_lost_and_is_silent_all_leave_soon_once_training_has_stalled(
    who: int, come: Come
) -> None:
    has_stalled = threading.Event()
    with attached(come, 3) as processes:
        _, _, lines = processes.pop(who)
        for gathering, _, _ in processes:
            gathering.watch(lambda: False, has_stalled.is_set)
        fall_silent(lines, (gathering for gathering, _, _ in processes))
        lost = {gathering.lost(WITHIN_S) for gathering, _, _ in processes}
        assert lost == {f"process {who} (gpt-w-0-{who}) of attempt 0 has died"}
        assert not any(end.ended.wait(1.5) for _, end, _ in processes), "it may be a long step beside an outage"
        has_stalled.set()
        for _, end, _ in processes:
            assert end.ended.wait(WITHIN_S)
            assert end.codes == [79]


@pytest.mark.usefixtures("quick")
def test_training_that_may_not_have_stalled_is_waited_for_no_longer_than_jax_waits(
    come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "EARLY_S", 1.0)
    with attached(come, 2) as processes:
        (_, _, lines), (guest, end, _) = processes
        guest.watch(lambda: False, lambda: False)
        fall_silent(lines, [guest])
        assert end.ended.wait(WITHIN_S)


@pytest.mark.usefixtures("quick")
def test_training_that_goes_on_beside_an_outage_ends_nobody(come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GOES_ON_S", 0.1)
    with attached(come, 2) as processes:
        (_, _, lines), (guest, end, _) = processes
        guest.watch(lambda: True)
        fall_silent(lines, [guest])
        assert guest.lost(WITHIN_S)
        until(lambda: not guest.lost(), "it to be forgotten")
        assert end.codes == []


@pytest.mark.usefixtures("quick")
def test_after_an_outage_that_was_taken_for_a_lost_machine_training_has_as_long_as_ever_to_go_on(
    come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "EARLY_S", 0.0)
    asked = threading.Semaphore(0)

    def goes_on() -> bool:
        asked.release()
        return False

    with attached(come, 2) as processes:
        (_, _, lines), (guest, end, _) = processes
        fall_silent(lines, [guest])
        assert guest.lost(WITHIN_S)
        guest.suspect(False)  # the node is back
        guest.watch(goes_on, lambda: True)
        for _ in range(4):  # one look a second, so that ``STANDS_S`` is over
            assert asked.acquire(timeout=WITHIN_S)
        assert end.codes == []
        monkeypatch.setattr(rendezvous, "EARLY_FOR_NOTHING_S", 0.0)
        assert end.ended.wait(WITHIN_S), "else JAX would end it"


@pytest.mark.usefixtures("quick")
def test_whoever_lives_is_not_lost_though_a_machine_is_said_to_be(come: Come) -> None:
    with attached(come, 3) as processes:
        for gathering, _, _ in processes:
            gathering.watch(lambda: False)
            gathering.suspect(True)
        assert not any(gathering.lost(2.0) for gathering, _, _ in processes)
        assert [end.codes for _, end, _ in processes] == [[], [], []]


def test_connections_may_be_silent_for_long_unless_a_machine_is_said_to_be_lost(come: Come) -> None:
    with attached(come, 2) as processes:
        (host, _, (line,)), _ = processes

        def patience_s() -> float:
            return line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000

        until(lambda: patience_s() == 90, "all to have attached")
        host.suspect(True)
        until(lambda: patience_s() == 10, "the connection to be given up sooner")
        host.suspect(False)
        until(lambda: patience_s() == 90, "that to be taken back")


def test_a_quiet_connection_carries_a_message(come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ALIVE_S", 0.05)
    heard = threading.Event()
    receive = Line.receive

    def spy(line: Line) -> list[dict[str, Any]] | None:
        messages = receive(line)
        if any("alive" in message for message in messages or ()):
            heard.set()
        return messages

    monkeypatch.setattr(Line, "receive", spy)
    with attached(come, 2):
        assert heard.wait(WITHIN_S)


def test_a_message_to_a_silent_machine_does_not_put_off_its_loss(come: Come, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives a connection up by what was sent last, if that was not acknowledged."""
    options = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 60, "TCP_USER_TIMEOUT": 60_000}
    monkeypatch.setattr(rendezvous, "KEEPALIVE_LATER", options)
    monkeypatch.setattr(rendezvous, "ALIVE_S", 1.5)
    with attached(come, 2) as processes:
        (_, _, lines), (_, _, (line,)) = processes
        both = (line, *lines)
        until(lambda: all(each.joined and not unacknowledged_bytes(each) for each in both), "all to have attached")
        monkeypatch.setattr(lines[0], "send", lambda **_: None)
        silence(lines[0].sock)
        for number in range(1, 5):
            until(lambda: unanswered(line) >= number, f"question {number} of the kernel")  # noqa: B023 - called at once
            assert unacknowledged_bytes(line) == 0


def unanswered(line: Line) -> int:
    """How often the kernel has asked the other end for a sign of life since the last one."""
    return line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[3]


def unacknowledged_bytes(line: Line) -> int:
    """How many bytes the other end has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(line.sock, termios.TIOCOUTQ, bytes(4)))[0])


def test_who_needs_process_0_no_more_lives_on_when_it_ends(come: Come) -> None:
    with attached(come, 2) as processes:
        (_, _, lines), (guest, end, _) = processes
        guest.needs_process_0 = lambda: False  # jax.distributed.shutdown(), or JAX's service is elsewhere
        die(lines)
        assert guest.lost(WITHIN_S)
        assert not end.ended.wait(1.0)


def test_a_forked_child_does_not_keep_the_watch_alive(come: Come) -> None:
    with attached(come, 2) as processes:
        (_, _, lines), (guest, end, _) = processes

        def ends_while_the_child_lives() -> None:
            guest.end()
            die(lines)
            assert not end.ended.wait(1.0)

        forked(lambda: None, meanwhile=ends_while_the_child_lives)


@pytest.mark.parametrize("who", [0, 2])
def test_who_says_that_it_leaves_has_not_died(who: int, come: Come) -> None:
    with attached(come, 3) as processes:
        left, _, lines = processes.pop(who)
        left.leaving()
        die(lines)
        assert [gathering.lost(0.2) for gathering, _, _ in processes] == ["", ""]


def test_who_dies_while_others_attach_is_known_to_those_that_have_attached(come: Come) -> None:
    lines, ends = met(come, 3), [Ended() for _ in range(3)]
    with joined(lines[0], ends[0]) as host, joined(lines[1], ends[1]) as guest:
        guest.attached()
        (line,) = (each for each in lines[0] if each.who is not None and each.who.process_id == 1)
        until(lambda: line.joined, "process 0 to know that process 1 has attached")
        die(lines[1])
        assert host.lost(WITHIN_S) == "process 1 (gpt-w-0-1) of attempt 0 has died"
    assert ends[0].codes == []


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("is_joined", [False, True], ids=["before JAX has joined", "in attach"])
def test_if_one_dies_the_others_leave_and_name_it(
    is_joined: bool, who: int, come: Come, caplog: pytest.LogCaptureFixture
) -> None:
    lines = met(come, 3)
    ends = {index: Ended() for index in range(3) if index != who}
    with contextlib.ExitStack() as stack:
        for index, end in ends.items():
            gathering = Gathering(lines[index], 79, end)
            stack.callback(gathering.end)
            block = contextlib.ExitStack()
            block.enter_context(gathering.joining(WITHIN_S))
            (block.close if is_joined else functools.partial(stack.push, block))()
        for line in lines[who]:
            line.close()
        for end in ends.values():
            assert end.ended.wait(WITHIN_S)
    assert [end.codes for end in ends.values()] == [[79], [79]]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(messages) == 2
    before = "it had attached" if is_joined else "JAX had joined all processes"
    for message in messages:
        assert f"process {who} (gpt-w-0-{who}) of attempt 0 died before {before}" in message


def test_where_jax_does_not_join_in_time_the_process_leaves_before_jax_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    end = Ended()
    gathering = Gathering([], 79, end)
    with gathering.joining(0.05):
        assert end.ended.wait(WITHIN_S)
    gathering.end()
    assert end.codes == [79]
    assert "JAX has not joined them in time" in caplog.text


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    gathering = Gathering([], 79, Ended())
    with pytest.raises(ZeroDivisionError), gathering.joining(WITHIN_S):
        raise ZeroDivisionError
    with joined([], Ended()):
        pass
    until(lambda: not set(threading.enumerate()) - before, "the thread to end")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Comparison.FITS),
        ({"pod": "another"}, Comparison.FITS),
        ({"attempt": 1}, Comparison.FIRST_IS_OLD),
        ({"attempt": 1, "version": "2"}, Comparison.FIRST_IS_OLD),
        ({"job": "uid-2", "attempt": 1}, Comparison.OTHER_JOB),
        ({"job": None}, Comparison.OTHER_JOB),
        ({"version": "2"}, Comparison.DIFFERS),
        ({"jax": "2"}, Comparison.DIFFERS),
        ({"process_count": 3}, Comparison.DIFFERS),
    ],
)
def test_both_sides_come_to_the_same_verdict(changes: dict[str, Any], verdict: Comparison) -> None:
    first, second = introduction(0), introduction(1, **changes)
    assert compare(first, second) is verdict
    mirrored = Comparison.SECOND_IS_OLD if verdict is Comparison.FIRST_IS_OLD else verdict
    assert compare(second, first) is mirrored


def test_an_introduction_of_a_newer_version_with_more_fields_is_read() -> None:
    message = {**dataclasses.asdict(introduction(1)), "of a newer version": 1}
    assert Introduction.read(message) == introduction(1)


def test_process_0_is_looked_for_less_often_the_longer_it_is_awaited() -> None:
    looks, next_s = [0.0], rendezvous.pauses()
    while looks[-1] < 7200:
        looks.append(looks[-1] + next_s(looks[-1]))
    gaps = [(late - early, late) for early, late in itertools.pairwise(looks)]
    assert all(gap <= max(0.1, late / 20) + 1e-9 for gap, late in gaps)
    assert max(gap for gap, late in gaps if late < 600) == pytest.approx(1.0)
    assert max(gap for gap, _ in gaps) == pytest.approx(5.0)
    assert len([look for look in looks if look <= 0.2]) >= 5
    assert len([look for look in looks if look < 600]) < 720  # thousands, with 0.1 s


def test_where_ipv6_is_switched_off_process_0_listens_with_ipv4(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def without_ipv6(where: tuple[str, int], *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "no IPv6 here")
        return create(where, family=family, **options)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    with rendezvous.listen(f":{rendezvous.split(address)[1]}") as listener:
        assert listener.family == socket.AF_INET
