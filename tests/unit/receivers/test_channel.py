"""The channel's library side against a real TLS server: what is sent, taken, refused, and tried again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import SingleProcess
from gracepoint.receivers import ChannelError, Disruption, Mailbox, OperatorConnection, OperatorSubscriber, Sender
from gracepoint.receivers import operator as operator_receiver
from gracepoint.receivers.operator import Operator, receipt_after_s
from gracepoint.settings import Settings
from gracepoint.wire.frames import Ping, Retraction, SnapshotPlacement, Trust
from gracepoint.wire.messages import (
    Acknowledgement,
    Forecast,
    Mode,
    Resumption,
    SaveEvery,
    SnapshotReport,
    Spent,
    Subscription,
    Trouble,
    TroubleKind,
)
from gracepoint.wire.names import PATH_ACKNOWLEDGE, PATH_FORECAST, PATH_RESUMPTION, PATH_SUBSCRIBE
from tests.forked import forked
from tests.unit.receivers.fakes.heard import Heard
from tests.unit.receivers.fakes.server import WHO, OperatorServer, notice
from tests.waiting import until

pytestmark = pytest.mark.integration

RECEIPT = Acknowledgement(pod_uid="pod-uid-0", session="session-0", preemption="gpt-1", process_index=0)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


@pytest.fixture
def channel(server: OperatorServer, token: Path) -> Iterator[Callable[[], OperatorConnection]]:
    made: list[OperatorConnection] = []

    def make() -> OperatorConnection:
        made.append(OperatorConnection(server.url, server.ca_certificate, str(token)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def sender(channel: Callable[[], OperatorConnection]) -> Iterator[Sender]:
    sender = Sender(channel(), time.monotonic)
    yield sender
    sender.close()


class Listener:
    """A subscriber with what came of it."""

    def __init__(self, channel: OperatorConnection, who: Subscription = WHO) -> None:
        self.heard = Heard()
        self.receipts: list[Acknowledgement] = []
        self.subscriber = OperatorSubscriber(channel, who, self.heard, self.receipts.append)


@pytest.fixture
def listener(channel: Callable[[], OperatorConnection]) -> Iterator[Listener]:
    listener = Listener(channel())
    yield listener
    listener.subscriber.close()


def test_a_subscription_says_who_listens_and_shows_the_token(listener: Listener, server: OperatorServer) -> None:
    stream = server.wait_for_stream()
    assert stream.who == WHO
    assert stream.token == "first"
    assert listener.subscriber.wait_until_connected(30)


def test_a_notice_is_posted_and_acknowledged(listener: Listener, server: OperatorServer) -> None:
    stream = server.wait_for_stream()
    stream.send_frame(notice(stream, remaining_s=12.5))
    (post,) = listener.heard.wait_for_posts()
    assert post == Disruption(
        preemption="gpt-1",
        cause="SpotTermination",
        signal="taint cloud.google.com/impending-node-termination",
        remaining_s=12.5,
        nodes=("node-1",),
    )
    assert listener.receipts == [RECEIPT]


def test_a_notice_is_acknowledged_though_the_other_processes_cannot_be_notified(
    listener: Listener, server: OperatorServer
) -> None:
    listener.heard.stuck.set()
    stream = server.wait_for_stream()
    stream.send_frame(notice(stream))
    listener.heard.wait_for_posts()
    assert listener.receipts == [RECEIPT]
    listener.heard.free()


def test_what_is_not_for_this_session_is_neither_posted_nor_acknowledged(
    listener: Listener, server: OperatorServer, caplog: pytest.LogCaptureFixture
) -> None:
    stream = server.wait_for_stream()
    stream.send_frame(notice(stream, session="another"))
    stream.send_frame(notice(stream, pod_uid="another"))
    stream.send_frame(notice(stream, mode=Mode.OBSERVE))
    stream.send_frame(Retraction(preemption="gpt-1", pod_uid=WHO.pod_uid, session=WHO.session, reason="taint removed"))
    stream.send_frame(notice(stream, preemption="gpt-2"))  # the one that is
    assert [p.preemption for p in listener.heard.wait_for_posts()] == ["gpt-2"]
    assert caplog.text.count("ignored a message for another session") == 2


def test_a_drill_is_posted_as_one_and_a_retraction_is_handed_on(listener: Listener, server: OperatorServer) -> None:
    stream = server.wait_for_stream()
    stream.send_frame(notice(stream, preemption="drill-1", mode=Mode.DRILL))
    stream.send_frame(
        Retraction(preemption="drill-1", pod_uid=WHO.pod_uid, session=WHO.session, reason="taint removed")
    )
    assert [(p.preemption, p.drill) for p in listener.heard.wait_for_posts()] == [("drill-1", True)]
    assert listener.heard.wait_for_retraction() == "drill-1"


def test_a_frame_that_cannot_be_read_costs_only_itself(listener: Listener, server: OperatorServer) -> None:
    stream = server.wait_for_stream()
    stream.send("nonsense\n")
    stream.send('{"type":"from the future","version":1}\n')
    line = notice(stream).to_json() + "\n"
    stream.send(line[:20])  # frames need not come in one piece
    stream.send(line[20:])
    assert len(listener.heard.wait_for_posts()) == 1
    assert len(server.streams) == 1


def test_a_stream_that_ends_is_opened_again_with_a_renewed_token(
    listener: Listener, server: OperatorServer, token: Path
) -> None:
    stream = server.wait_for_stream()
    token.write_text("second\n")
    stream.end()
    again = server.wait_for_stream(number=2)
    assert again.token == "second"
    again.send_frame(notice(again))
    assert len(listener.heard.wait_for_posts()) == 1


@pytest.mark.integration
def test_a_stream_that_falls_silent_is_given_up_after_three_heartbeats(
    server: OperatorServer, channel: Callable[[], OperatorConnection]
) -> None:
    server.heartbeat_s = 1.0  # a busy machine may be two seconds late with one
    listener = Listener(channel())
    try:
        first = server.wait_for_stream()
        for _ in range(5):  # longer than three heartbeats in all, and alive
            first.send_frame(Ping())
            time.sleep(0.8)
        assert len(server.streams) == 1
        server.wait_for_stream(number=2)
    finally:
        listener.subscriber.close()


def test_a_refused_subscription_is_tried_again(
    server: OperatorServer, channel: Callable[[], OperatorConnection]
) -> None:
    server.refuse[PATH_SUBSCRIBE] = 503
    listener = Listener(channel())
    try:
        server.wait_until(lambda: len(server.refused) >= 2)
        server.refuse.clear()
        server.wait_for_stream()
    finally:
        listener.subscriber.close()


@pytest.mark.parametrize("state", ["connected", "not yet", "waiting to try again"])
def test_closing_is_quick_in_every_state(
    server: OperatorServer, channel: Callable[[], OperatorConnection], state: str
) -> None:
    if state == "waiting to try again":
        server.refuse[PATH_SUBSCRIBE] = 503
    listener = Listener(channel())
    if state == "connected":
        server.wait_for_stream()
    elif state == "waiting to try again":
        server.wait_until(lambda: len(server.refused) >= 2)
    began = time.monotonic()
    listener.subscriber.close()
    assert time.monotonic() - began < 1.5
    assert not [t for t in threading.enumerate() if t.name == "gracepoint-subscription"]


def test_a_server_with_a_certificate_of_somebody_else_is_refused(server: OperatorServer, token: Path) -> None:
    other = trustme.CA().cert_pem.bytes().decode()
    channel = OperatorConnection(server.url, other, str(token))
    with pytest.raises(ChannelError, match="CERTIFICATE_VERIFY_FAILED"):
        channel.post(PATH_ACKNOWLEDGE, RECEIPT, timeout_s=5)


def test_a_missing_token_is_an_error_of_the_channel(server: OperatorServer, tmp_path: Path) -> None:
    channel = OperatorConnection(server.url, server.ca_certificate, str(tmp_path / "nowhere"))
    with pytest.raises(ChannelError, match="nowhere"):
        channel.post(PATH_ACKNOWLEDGE, RECEIPT, timeout_s=5)


def test_messages_arrive_in_order_and_flush_waits_for_them(sender: Sender, server: OperatorServer) -> None:
    for number in range(5):
        sender.send(_resumption(number), within_s=30)
    assert sender.flush(30)
    assert [m.restored_step for m in server.messages(Resumption)] == [0, 1, 2, 3, 4]
    assert {token for token, _ in server.received} == {"first"}


def test_a_token_that_cannot_be_sent_ends_neither_thread(
    sender: Sender, listener: Listener, server: OperatorServer, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stream = server.wait_for_stream()
    token.write_text("two\nlines")
    sender.send(_resumption(1), within_s=60)
    stream.end()
    _wait_for_log(
        caplog, "could not send a message, trying again message=Resumption", "trying again; SIGTERM is still watched"
    )
    token.write_text("second")
    assert sender.flush(30)
    assert len(server.messages(Resumption)) == 1
    server.wait_for_stream(number=2)


def _wait_for_log(caplog: pytest.LogCaptureFixture, *texts: str) -> None:
    until(
        lambda: all("Invalid header value" in caplog.text and text in caplog.text for text in texts),
        lambda: f"{texts} in {caplog.text}",
    )


def test_a_message_is_sent_again_until_it_is_taken(sender: Sender, server: OperatorServer) -> None:
    server.refuse[PATH_RESUMPTION] = 503
    sender.send(_resumption(1), within_s=60)
    server.wait_until(lambda: len(server.refused) >= 2)
    server.refuse.clear()
    assert sender.flush(30)
    (taken,) = server.messages(Resumption)
    assert taken.age_s > 0, "a message that had to wait must say for how long"


def test_an_outage_is_logged_once_however_long_it_lasts(
    sender: Sender, server: OperatorServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gracepoint.receivers.channel")
    for outage in (1, 2):
        server.refuse[PATH_RESUMPTION] = 503
        known = len(server.refused)
        sender.send(_resumption(outage), within_s=60)
        server.wait_until(lambda: len(server.refused) >= known + 3)  # noqa: B023
        server.refuse.clear()
        assert sender.flush(30)
        assert caplog.text.count("could not send a message, trying again message=Resumption") == outage


@pytest.mark.parametrize("status", [503, 403], ids=["not ready", "of an unknown caller"])
def test_a_message_that_a_replica_refuses_may_reach_another_one(
    sender: Sender, server: OperatorServer, status: int
) -> None:
    """A connection that is kept stays at its replica. None is made without need, as it costs the operator most."""
    server.refuse[PATH_ACKNOWLEDGE] = status
    sender.send(RECEIPT, within_s=60)
    server.wait_until(lambda: len(server.refused) >= 2)
    server.refuse.clear()
    assert sender.flush(30)
    assert server.messages(Acknowledgement) == [RECEIPT]
    assert server.connections == (len(server.refused) + 1 if status == 403 else 1)


def test_rejected_message_does_not_block_the_next(
    sender: Sender, server: OperatorServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse[PATH_RESUMPTION] = 400
    sender.send(_resumption(1), within_s=60)
    sender.send(RECEIPT, within_s=60)
    assert sender.flush(30)
    assert [type(m) for _, m in server.received] == [Acknowledgement]
    assert server.refused == [PATH_RESUMPTION]
    assert "could not send a message message=Resumption" in caplog.text


def test_a_message_whose_time_is_over_is_dropped_with_a_word(
    sender: Sender, server: OperatorServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse[PATH_RESUMPTION] = 503
    sender.send(_resumption(1), within_s=0.3)
    assert sender.flush(30)
    assert "could not send a message message=Resumption" in caplog.text


def test_a_full_queue_never_blocks_training(
    sender: Sender, server: OperatorServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse[PATH_RESUMPTION] = 503
    began = time.monotonic()
    for number in range(300):
        sender.send(_resumption(number), within_s=60)
    assert time.monotonic() - began < 5
    assert "dropped a message, as too many wait" in caplog.text
    assert not sender.flush(0.0)


def test_a_connection_that_the_server_closed_meanwhile_is_made_again_at_once(
    channel: Callable[[], OperatorConnection], server: OperatorServer
) -> None:
    kept = channel()
    kept.post(PATH_ACKNOWLEDGE, RECEIPT, timeout_s=5)
    kept.interrupt()  # what an idle timeout of the server does to it
    kept.post(PATH_ACKNOWLEDGE, RECEIPT, timeout_s=5)
    assert len(server.messages(Acknowledgement)) == 2


def connections_to(port: int) -> int:
    """Returns how many connections to a port this process has."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as end:
                    peer = end.getpeername()
                    count += isinstance(peer, tuple) and peer[1] == port  # of a Unix socket it is a path
    return count


def test_a_forked_child_keeps_no_connection_by_which_the_operator_takes_its_parent_for_alive(
    channel: Callable[[], OperatorConnection], server: OperatorServer
) -> None:
    kept, port = channel(), urllib.parse.urlsplit(server.url).port
    assert port is not None
    kept.post(PATH_ACKNOWLEDGE, RECEIPT, timeout_s=5)
    assert connections_to(port) == 1
    assert forked(lambda: connections_to(port)) == "0"
    assert connections_to(port) == 1
    kept.post(PATH_ACKNOWLEDGE, RECEIPT, timeout_s=5)
    assert len(server.messages(Acknowledgement)) == 2


@pytest.mark.parametrize(
    ("takes", "answer", "expected"),
    [
        pytest.param(True, SaveEvery(every_s=42.5).to_json(), [42.5], id="taken"),
        pytest.param(False, SaveEvery(every_s=42.5).to_json(), [], id="not asked for"),
        pytest.param(True, "", [], id="nothing to suggest"),
        pytest.param(True, '{"version":1}', [], id="unreadable"),
    ],
)
def test_the_answer_to_a_forecast_is_the_interval_of_saves(
    sender: Sender, server: OperatorServer, takes: bool, answer: str, expected: list[float]
) -> None:
    server.answers[PATH_FORECAST] = answer.encode()
    found: list[float] = []
    sender.on_interval = found.append
    sender.send(_forecast(takes_interval=takes), within_s=30)
    assert sender.flush(30)
    assert found == expected


def test_a_message_that_waited_says_its_time_as_of_its_sending(sender: Sender, server: OperatorServer) -> None:
    server.refuse[PATH_FORECAST] = 503
    sender.send(_forecast(spent=Spent(now_s=10.0, joined_s=1.0)), within_s=60)
    server.wait_until(lambda: len(server.refused) >= 2)
    server.refuse.clear()
    assert sender.flush(30)
    (taken,) = server.messages(Forecast)
    assert taken.spent is not None
    assert taken.spent.now_s > 10.0
    assert taken.spent.joined_s == 1.0


def _forecast(*, takes_interval: bool = False, spent: Spent | None = None) -> Forecast:
    return Forecast(
        pod_uid="pod-uid-0",
        session="session-0",
        workload_uid="jobset-uid",
        state_bytes=1,
        step_s=0.1,
        drain_s=0.1,
        save_s=0.5,
        margin=1.25,
        spent=spent,
        takes_interval=takes_interval,
    )


def _resumption(step: int) -> Resumption:
    return Resumption(
        pod_uid="pod-uid-0",
        session="session-0",
        workload_uid="jobset-uid",
        restart_attempt=0,
        restored_step=step,
        training=True,
        age_s=0.0,
    )


def test_delayed_message_is_overtaken_and_sent_when_due(
    server: OperatorServer, channel: Callable[[], OperatorConnection]
) -> None:
    now_s = [0.0]
    sender = Sender(channel(), lambda: now_s[0])
    try:
        sender.send(RECEIPT, within_s=60, after_s=5)
        sender.send(resumption(), within_s=60)
        server.wait_for(Resumption)
        assert server.messages(Acknowledgement) == []
        now_s[0] = 5.0
        sender.send(resumption(), within_s=60)  # which wakes the sender: its clock is the test's
        assert server.wait_for(Acknowledgement) == [RECEIPT]
    finally:
        sender.close()


def placement(session: str, address: str) -> SnapshotPlacement:
    return SnapshotPlacement(
        pod_uid="pod-uid-0",
        session=session,
        capability="v1.k1.e30.AA",
        server_name="gracepoint-snapshots.gracepoint.svc",
        write_to={"node-0": address},
        read_from={"node-0": address, "node-1": "10.0.0.2:9470"},
    )


def test_a_placement_of_snapshots_goes_to_who_asked_for_it_if_it_is_for_this_session(
    server: OperatorServer, channel: Callable[[], OperatorConnection]
) -> None:
    taken: queue.Queue[SnapshotPlacement] = queue.Queue()
    who = dataclasses.replace(WHO, takes_snapshots=True)
    subscriber = OperatorSubscriber(channel(), who, Heard(), lambda receipt: None, place=taken.put)
    try:
        stream = server.wait_for_stream()
        assert stream.who.takes_snapshots
        for session, address in ((WHO.session, "10.0.0.1:9470"), ("another", "10.6.6.6:1"), (WHO.session, "[fd::1]:1")):
            stream.send_frame(placement(session, address))
        assert [taken.get(timeout=30).write_to["node-0"] for _ in range(2)] == ["10.0.0.1:9470", "[fd::1]:1"]
        assert taken.empty()
    finally:
        subscriber.close()


def test_placement_that_nobody_asked_for_is_ignored(listener: Listener, server: OperatorServer) -> None:
    stream = server.wait_for_stream()
    assert not stream.who.takes_snapshots
    stream.send_frame(placement(WHO.session, "10.0.0.1:9470"))
    stream.send_frame(notice(stream, remaining_s=12.5))
    assert len(listener.heard.wait_for_posts()) == 1  # the stream goes on


def test_snapshot_servers_are_trusted_as_the_operator_is_also_after_a_rotation(
    server: OperatorServer, tmp_path: Path
) -> None:
    taken: queue.Queue[tuple[str, str]] = queue.Queue()
    operator = Operator(Settings.from_environment(server.environment(0, 1, tmp_path)), time.monotonic)
    try:
        operator.subscribe(
            WHO.session,
            SingleProcess(),
            Heard(),
            "0.1.0",
            place=lambda placed, authorities: taken.put((placed.write_to["node-0"], authorities)),
        )
        stream = server.wait_for_stream()
        stream.send_frame(placement(WHO.session, "10.0.0.1:9470"))
        assert taken.get(timeout=30) == ("10.0.0.1:9470", server.ca_certificate)
        another = trustme.CA().cert_pem.bytes().decode()
        stream.send_frame(Trust(authorities=another))
        assert taken.get(timeout=30) == ("10.0.0.1:9470", another)
    finally:
        operator.close()


def snapshot_report(step: int) -> SnapshotReport:
    return SnapshotReport(
        pod_uid="pod-uid-0",
        session="session-0",
        workload_uid="jobset-uid",
        process_index=0,
        safe_step=step,
        copies=2,
        age_s=1.0,
        interval_s=5.0,
        skipped=0,
        skipped_reason="",
        bytes=1 << 30,
        servers=["node-0", "node-1"],
    )


def test_of_the_reports_on_snapshots_that_wait_the_newest_is_sent_with_its_age(
    server: OperatorServer, channel: Callable[[], OperatorConnection]
) -> None:
    now_s = [0.0]
    sender = Sender(channel(), lambda: now_s[0])
    try:
        for step in (100, 200, 300):
            sender.send(snapshot_report(step), within_s=60, after_s=10 - now_s[0])
            now_s[0] += 1.0
        now_s[0] = 12.0
        sender.send(resumption(), within_s=60)  # which wakes the sender: its clock is the test's
        (report,) = server.wait_for(SnapshotReport)
        assert (report.safe_step, report.age_s) == (300, 11.0)  # 1 s old at 2 s
    finally:
        sender.close()


def test_reporter_sends_the_first_report_on_snapshots_at_once_and_keeps_what_follows_for_a_while(
    server: OperatorServer, sender: Sender
) -> None:
    gang = StoreProcessGroup(InMemoryStore(), 1, 2)  # each process reports its own part
    reporter = Reporter(sender, Settings(), "session-0", gang, Mailbox(time.monotonic), TimeSpent(time.monotonic))
    for step in (1, 2, 3):
        reporter.snapshots(
            safe_step=step,
            copies=1,
            age_s=0.0,
            interval_s=None,
            skipped=0,
            skipped_reason="",
            size_bytes=5,
            servers=["node-0"],
        )
        server.wait_for(SnapshotReport)
    assert sender.flush(10)
    assert [report.safe_step for report in server.messages(SnapshotReport)] == [1, 3]
    assert server.messages(SnapshotReport)[0].process_index == 1


def test_receipts_come_after_the_whole_gang_was_notified_and_one_after_another() -> None:
    def after_s(index: int, count: int) -> float:
        return receipt_after_s(StoreProcessGroup(InMemoryStore(), index, count))

    assert after_s(0, 2) < after_s(1, 2) < 0.01
    assert after_s(0, 1000) >= 1.0  # the goal: all of them are told by then
    assert after_s(999, 1000) - after_s(0, 1000) > 2.5  # a connection costs the operator 2.5 ms


def test_a_receipt_that_was_held_back_is_tried_again_after_it_was_due(
    server: OperatorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_receiver, "BETWEEN_RECEIPTS_S", 100.0)  # as if it were the last of a very large gang
    passed_s: list[float] = [0.0]
    settings = Settings.from_environment(server.environment(1, 2, tmp_path))
    operator, heard = Operator(settings, lambda: time.monotonic() + passed_s[-1]), Heard()
    server.refuse[PATH_ACKNOWLEDGE] = 503
    try:
        operator.subscribe(WHO.session, StoreProcessGroup(InMemoryStore(), 1, 2), heard, "0.1.0")
        stream = server.wait_for_stream(process_index=1)
        stream.send_frame(notice(stream))
        heard.wait_for_posts()
        assert server.refused == []
        passed_s.append(101.0)
        operator.sender.send(_resumption(1), within_s=30)  # the sender looks at the clock
        server.wait_until(lambda: len(server.refused) >= 1)
        del server.refuse[PATH_ACKNOWLEDGE]
        (receipt,) = server.wait_for(Acknowledgement)
        assert receipt.process_index == 1
    finally:
        operator.close()


def test_a_flush_sends_what_is_held_back_at_once(server: OperatorServer, sender: Sender) -> None:
    sender.send(RECEIPT, within_s=7200, after_s=3600)
    assert sender.flush(10)
    assert server.messages(Acknowledgement) == [RECEIPT]


def test_leaving_process_sends_its_acknowledgement_at_once(server: OperatorServer, sender: Sender) -> None:
    gang = StoreProcessGroup(InMemoryStore(), 1, 2)
    reporter = Reporter(sender, Settings(), "session-0", gang, Mailbox(time.monotonic), TimeSpent(time.monotonic))
    sender.send(RECEIPT, within_s=7200, after_s=3600)
    reporter.flush(10)
    assert server.messages(Acknowledgement) == [RECEIPT]


def resumption() -> Resumption:
    return Resumption(
        pod_uid="pod-uid-0",
        session="session-0",
        workload_uid="jobset-uid",
        restart_attempt=0,
        restored_step=None,
        training=False,
        age_s=0.0,
    )


def test_hundreds_of_troubles_leave_room_for_a_report(server: OperatorServer, sender: Sender) -> None:
    def trouble(kind: TroubleKind, times: int) -> Trouble:
        return Trouble(
            pod_uid="pod-uid",
            session="abcd",
            workload_uid="jobset-uid",
            kind=kind,
            over=False,
            for_s=1.0,
            times=times,
            left_s=None,
            message="no space",
        )

    for times in range(300):
        sender.send(trouble(TroubleKind.DELETIONS, times), within_s=7200, after_s=3600)
    sender.send(trouble(TroubleKind.SAVES, 1), within_s=7200, after_s=3600)
    sender.send(RECEIPT, within_s=7200, after_s=3600)
    assert sender.flush(10)
    assert server.messages(Trouble) == [trouble(TroubleKind.DELETIONS, 299), trouble(TroubleKind.SAVES, 1)]
    assert server.messages(Acknowledgement) == [RECEIPT]
