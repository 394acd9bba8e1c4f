"""The channel as the library meets it: its own client over TLS against the operator's own server.

Only the API server is in memory (its TokenReviews too; the cluster tests ask the real one).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import http.client
import json
import socket
import ssl
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import SingleProcess
from gracepoint.receivers.channel import ChannelError, OperatorSubscriber, Sender
from gracepoint.receivers.mailbox import Mailbox
from gracepoint.settings import Settings
from gracepoint.wire.frames import Hello, Ping
from gracepoint.wire.messages import Acknowledgement, Forecast, Phase, Spent, Stall, TroubleKind
from gracepoint.wire.names import PATH_ACKNOWLEDGE, PATH_REPORT, PATH_STALL, PATH_SUBSCRIBE
from gracepoint_operator.channel import notifier, service
from gracepoint_operator.channel.notifier import Outgoing
from gracepoint_operator.goodput import accounts
from gracepoint_operator.goodput.accounts import GoodputLedger, daly_s
from gracepoint_operator.goodput.life import Category
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.workloads import ANY_PLURAL, WorkloadIdentity
from tests.contract.fakes.replicas import NAME, WAIT_S, Replica, Stream
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE
from tests.unit.operator.fakes.replica import forecast, report, subscription
from tests.waiting import until


@pytest.fixture
def replica(start: Callable[..., Replica], api: MemoryApi) -> Replica:
    return start(api)


def test_the_librarys_own_receiver_gets_the_notice_and_its_sender_is_heard(replica: Replica) -> None:
    mailbox = Mailbox(time.monotonic)
    sender = Sender(replica.channel("token-0"), time.monotonic)
    who = subscription(0)
    receiver = OperatorSubscriber(
        replica.channel("token-0"), who, mailbox, lambda message: sender.send(message, within_s=10)
    )
    try:
        assert receiver.wait_until_connected(WAIT_S)
        replica.taint()
        until(lambda: mailbox.current, "the notice")
        disruption = mailbox.current
        assert disruption is not None
        assert (disruption.preemption, disruption.cause) == (NAME, "SpotTermination")
        assert 0 < disruption.remaining_s <= 15
        sender.send(report(Phase.COMMITTED), within_s=10)
        assert sender.flush(WAIT_S)
        until(lambda: recorded(replica).get("phase") == "Committed", "the record")
        assert recorded(replica)["acknowledgements"]["received"] == 1
    finally:
        receiver.close()
        sender.close()


def recorded(replica: Replica) -> client.JsonObject:
    made = replica.api.of(kinds.PREEMPTIONS)
    found: client.JsonObject = made[0].get("status", {}) if made else {}
    return found


def test_a_notice_reaches_the_sockets_well_within_250_ms(replica: Replica) -> None:
    streams = [replica.stream(index, f"s-{index}") for index in (0, 1)]
    for stream in streams:
        assert isinstance(stream.next(), Hello)
    begun_at = time.monotonic()
    replica.taint()
    notices = [stream.notice() for stream in streams]
    elapsed_s = time.monotonic() - begun_at
    assert [notice.session for notice in notices] == ["s-0", "s-1"]
    assert elapsed_s < 0.25
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("token", "changes", "status", "reason", "says"),
    [
        pytest.param("forged", {}, 401, "bad_token", "invalid bearer token", id="a token nobody issued"),
        pytest.param("for-others", {}, 401, "bad_token", "audiences", id="a good token for another audience"),
        pytest.param("unbound", {}, 403, "not_a_pod", "not bound to a pod", id="a token of no pod"),
        pytest.param("token-1", {}, 403, "other_pod", "'uid-pod-1-0'", id="the token of another pod"),
        pytest.param("ghost", {"pod_uid": "uid-ghost"}, 403, "unknown_pod", "uid-ghost", id="a pod that is not there"),
        pytest.param("abroad", {}, 403, "unknown_pod", "'team-b'", id="a token of the pod's UID from elsewhere"),
        pytest.param("token-0", {"namespace": "team-b"}, 403, "other_pod", "namespace", id="another namespace"),
        pytest.param("token-0", {"restart_attempt": 7}, 403, "other_pod", "restart_attempt", id="another attempt"),
        pytest.param("token-0", {"workload_uid": "x"}, 403, "other_pod", "jobset_uid", id="another JobSet"),
    ],
)
def test_a_subscription_that_is_not_the_pods_own_is_refused_and_counted(
    replica: Replica, token: str, changes: dict[str, Any], status: int, reason: str, says: str
) -> None:
    replica.api.bind_token("for-others", NAMESPACE, "uid-pod-0-0", audience="https://kubernetes.default.svc")
    replica.api.bind_token("ghost", NAMESPACE, "uid-ghost")
    replica.api.bind_token("abroad", "team-b", "uid-pod-0-0")
    replica.api.tokens["unbound"] = {
        "authenticated": True,
        "audiences": ["gracepoint.dev"],
        "user": {"username": f"system:serviceaccount:{NAMESPACE}:default", "extra": {}},
    }
    who = dataclasses.replace(subscription(0), **changes)
    with pytest.raises(ChannelError, match=says) as refusal:
        Stream(replica.channel(token), who)
    assert refusal.value.status == status
    assert replica.refused(reason) == 1
    assert len(replica.core.subscribers) == 0


def test_request_without_token_or_readable_body_is_refused_and_counted(
    replica: Replica,
) -> None:
    context = ssl.create_default_context(cadata=replica.ca)
    for headers, body, status, reason in (
        ({}, subscription(0).to_json(), 401, "no_token"),
        ({"Authorization": "Bearer token-0"}, "{", 400, "bad_message"),
        ({"Authorization": "Bearer token-0"}, "[" * 100_000, 400, "bad_message"),
        ({"Authorization": "Bearer token-0"}, json.dumps({"version": 2}), 400, "bad_message"),
    ):
        connection = http.client.HTTPSConnection("localhost", replica.server.https_port, context=context)
        before = replica.refused(reason)
        connection.request("POST", PATH_SUBSCRIBE, body=body, headers=headers)
        assert connection.getresponse().status == status
        connection.close()
        assert replica.refused(reason) == before + 1


def test_a_stopped_session_may_neither_subscribe_nor_report(replica: Replica) -> None:
    first = replica.stream(0, "s-old")
    first.next()
    second = replica.stream(0, "s-new")
    second.next()
    with pytest.raises(EOFError):
        first.next()
    first.close()
    with pytest.raises(ChannelError, match="session") as refusal:
        replica.stream(0, "s-old")
    assert refusal.value.status == 403
    message = dataclasses.replace(report(Phase.COMMITTED), session="s-old")
    with pytest.raises(ChannelError, match="session"):
        replica.post("token-0", PATH_REPORT, message)
    with pytest.raises(ChannelError, match="session"):
        replica.post("token-0", PATH_STALL, told_by("s-old"))
    assert replica.refused("stopped_session") == 3
    assert replica.api.of(kinds.PREEMPTIONS) == []
    second.close()


def test_both_replicas_hear_a_session_that_followed_another_in_its_pod(
    start: Callable[..., Replica], api: MemoryApi
) -> None:
    """The containers were started again in their pods, and the sessions subscribed at different replicas."""
    first, second = start(api, "replica-a"), start(api, "replica-b")
    before, stream = first.stream(0, "s-before"), second.stream(0, "s-0")
    before.next()
    stream.next()
    first.taint()
    second.taint()
    assert stream.notice().preemption == NAME
    with pytest.raises(ChannelError, match="session"):  # two processes of one pod
        first.post("token-0", PATH_REPORT, report(Phase.COMMITTED))
    before.close()
    until(lambda: len(first.core.subscribers) == 0, "the end of the former session")
    first.post("token-0", PATH_REPORT, report(Phase.COMMITTED))
    until(lambda: recorded(first).get("phase") == "Committed", "the record")
    late = dataclasses.replace(report(Phase.FAILED), session="s-before")
    with pytest.raises(ChannelError, match="session"):
        second.post("token-0", PATH_REPORT, late)
    assert (first.refused("stopped_session"), second.refused("stopped_session")) == (1, 1)
    stream.close()
    moved = first.stream(0, "s-0")
    assert isinstance(moved.next(), Hello)
    with pytest.raises(ChannelError, match="session"):
        first.post("token-0", PATH_REPORT, late)
    moved.close()


def told_by(session: str) -> Stall:
    return Stall(
        pod_uid="uid-pod-0-0",
        session=session,
        workload_uid=JOBSET_UID,
        over=False,
        stage="training",
        step=40,
        for_s=900.0,
        suspects=[0],
        message="it does not run",
        stack="",
        beside=True,
    )


def test_a_pod_that_has_ended_is_refused(replica: Replica) -> None:
    replica.core.feed(kinds.PODS, "MODIFIED", replica.api.add(kinds.PODS, objects.pod(0, phase="Failed")))
    until(lambda: replica.core.cache.objects.pods["uid-pod-0-0"].finished, "the watch")
    with pytest.raises(ChannelError, match="running pod"):
        replica.stream(0)


def test_a_message_about_an_unknown_preemption_is_refused_for_good(replica: Replica) -> None:
    message = Acknowledgement(pod_uid="uid-pod-0-0", session="s-0", preemption="train-unheard-of-1", process_index=0)
    with pytest.raises(ChannelError, match="train-unheard-of-1") as refusal:
        replica.post("token-0", PATH_ACKNOWLEDGE, message)
    assert refusal.value.status == 404


def test_an_api_server_that_is_down_refuses_nobody_for_good(replica: Replica) -> None:
    replica.api.failing = [client.Unavailable("down")] * 50
    with pytest.raises(ChannelError, match="try again") as refusal:
        replica.stream(0)
    assert refusal.value.status == 503


def _that_never_reads(replica: Replica) -> ssl.SSLSocket:
    """A pod's connection that has subscribed."""
    context = ssl.create_default_context(cadata=replica.ca)
    raw = socket.create_connection(("localhost", replica.server.https_port))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    stuck = context.wrap_socket(raw, server_hostname="localhost")
    body = subscription(0, "s-stuck").to_json().encode()
    head = (
        f"POST {PATH_SUBSCRIBE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer token-0\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    stuck.sendall(head.encode() + body)
    return stuck


def test_a_pod_that_never_reads_does_not_delay_the_others(replica: Replica) -> None:
    stuck = _that_never_reads(replica)
    stream = replica.stream(1, "s-1")
    stream.next()
    until(lambda: len(replica.core.subscribers) == 2, "both to be connected")
    replica.taint()
    assert stream.notice().preemption == NAME
    stuck.close()
    stream.close()


def test_pod_that_never_reads_is_disconnected_alone(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(service, "_UNACKNOWLEDGED_MS", 600_000)  # the kernel would notice it as well
    monkeypatch.setattr(notifier.Subscriber, "next", _much)
    stuck = _that_never_reads(replica)
    stream = replica.stream(1, "s-1")
    until(
        lambda: [item.hello.session for item in replica.core.subscribers.of_workload(JOBSET_UID)] == ["s-1"], "the end"
    )
    assert isinstance(stream.next(), Hello)
    assert isinstance(stream.next(), Ping)
    stuck.close()
    stream.close()


async def _much(subscriber: notifier.Subscriber) -> Outgoing | None:
    """One frame after another for him who never reads, and pings for the other."""
    if subscriber.closed:
        return None
    if subscriber.hello.session == "s-stuck":
        return Outgoing(lambda: Hello(replica="r" * 100_000, heartbeat_s=1.0), lambda: None)
    await asyncio.sleep(0.05)
    return Outgoing(Ping, lambda: None)


def test_who_reconnects_gets_the_open_notice(replica: Replica) -> None:
    stream = replica.stream()
    stream.next()
    replica.taint()
    assert stream.notice().preemption == NAME
    stream.close()
    until(lambda: len(replica.core.subscribers) == 0, "the lost stream to be noticed")
    again = replica.stream()
    assert isinstance(again.next(), Hello)
    assert again.notice().preemption == NAME
    again.close()


def test_two_replicas_each_notify_their_own_and_take_each_others_messages(
    start: Callable[..., Replica], api: MemoryApi
) -> None:
    first, second = start(api, "replica-a"), start(api, "replica-b")
    one, two = first.stream(0, "s-0"), second.stream(1, "s-1")
    one.next()
    two.next()
    first.taint()
    second.taint()
    assert one.notice().preemption == two.notice().preemption == NAME
    until(
        lambda: {entry["name"] for entry in recorded(first).get("replicas", [])} == {"replica-a", "replica-b"},
        "entries",
    )
    second.post("token-0", PATH_REPORT, report(Phase.COMMITTED))
    until(lambda: recorded(first).get("phase") == "Committed", "the record")
    assert len(api.of(kinds.PREEMPTIONS)) == 1
    one.close()
    two.close()


def test_a_renewed_certificate_is_used_for_new_connections(
    replica: Replica, authority: trustme.CA, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path / "tls")
    assert not certificates.load()
    renewed = authority.issue_cert("localhost", "renewed.example")
    renewed.private_key_pem.write_to_path(str(tmp_path / "tls" / "tls.key"))
    renewed.cert_chain_pems[0].write_to_path(str(tmp_path / "tls" / "tls.crt"))
    assert certificates.load()
    assert not certificates.load()


def test_certificate_that_does_not_match_its_key_is_not_loaded(
    replica: Replica, authority: trustme.CA, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path / "tls")
    other = authority.issue_cert("localhost")
    other.cert_chain_pems[0].write_to_path(str(tmp_path / "tls" / "tls.crt"))
    with pytest.raises(ssl.SSLError):
        certificates.load()
    ends = [
        ssl.create_default_context(cadata=replica.ca).wrap_bio(
            to_client := ssl.MemoryBIO(), to_server := ssl.MemoryBIO(), server_hostname="localhost"
        ),
        certificates.context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(5):
        for end in tuple(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)
    assert ends == []


def test_oversized_body_is_refused_before_authentication(replica: Replica) -> None:
    context = ssl.create_default_context(cadata=replica.ca)
    connection = http.client.HTTPSConnection("localhost", replica.server.https_port, context=context)
    connection.request("POST", PATH_REPORT, body=b"x" * 300_000, headers={"Authorization": "Bearer token-0"})
    response = connection.getresponse()
    assert response.status == 413
    assert b"262144" in response.read()
    connection.close()
    assert not [call for call in replica.api.calls if "tokenreviews" in call]
    assert replica.refused("bad_message") == 1


def test_a_report_with_impossible_figures_is_refused_for_good(replica: Replica) -> None:
    message = dataclasses.replace(report(Phase.COMMITTED, preemption=""), step=-1)
    with pytest.raises(ChannelError, match="step") as refusal:
        replica.post("token-0", PATH_REPORT, message)
    assert refusal.value.status == 400


def _unread_stream(replica: Replica) -> Stream:
    stream = replica.stream()
    stream.next()
    return stream


def _stream_closed_just_now(replica: Replica) -> Stream:
    stream = _unread_stream(replica)
    stream.close()
    return stream


def _idle_connection(replica: Replica) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cadata=replica.ca)
    connection = http.client.HTTPSConnection("localhost", replica.server.https_port, context=context)
    connection.request("POST", PATH_REPORT, body=b"{}")
    connection.getresponse().read()
    return connection


def _connection_without_handshake(replica: Replica) -> socket.socket:
    return socket.create_connection(("localhost", replica.server.https_port))


@pytest.mark.parametrize(
    "connect",
    [
        pytest.param(_unread_stream, id="a stream that is not read"),
        pytest.param(_stream_closed_just_now, id="a stream that was closed just now"),
        pytest.param(_idle_connection, id="an idle connection"),
        pytest.param(_connection_without_handshake, id="a connection without a handshake"),
    ],
)
def test_a_server_that_has_stopped_has_closed_every_connection(
    replica: Replica, connect: Callable[[Replica], Stream | http.client.HTTPSConnection | socket.socket]
) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.closing(connect(replica)):
            replica.server.stop()
            gc.collect()
    assert [str(each.message) for each in caught if each.category is ResourceWarning] == []


def test_probes_distinguish_listening_from_knowing(replica: Replica) -> None:
    for path in ("healthz", "readyz"):
        url = f"http://localhost:{replica.server.health_port}/{path}"
        with urllib.request.urlopen(url) as response:
            assert response.status == 200


def test_ack_of_an_open_stream_costs_no_token_review(replica: Replica) -> None:
    stream = replica.stream(0, "s-0")
    assert isinstance(stream.next(), Hello)
    replica.taint()
    stream.notice()
    replica.api.bind_token("renewed", NAMESPACE, "uid-pod-0-0")  # as kubelet does every hour: another token

    def reviews() -> int:
        return replica.api.calls.count(f"POST {kinds.TOKEN_REVIEWS.path()}")

    before = reviews()
    receipt = Acknowledgement(pod_uid="uid-pod-0-0", session="s-0", preemption=NAME, process_index=0)
    replica.post("renewed", PATH_ACKNOWLEDGE, receipt)
    assert reviews() == before
    other = dataclasses.replace(receipt, pod_uid="uid-pod-1-0", session="s-1", process_index=1)
    replica.post("token-1", PATH_ACKNOWLEDGE, other)
    assert reviews() == before + 1
    stream.close()


@pytest.mark.parametrize("disruptions", [0, 4], ids=["no disruption yet", "some disruptions"])
def test_a_forecast_is_answered_with_the_interval_of_saves(
    start: Callable[..., Replica], api: MemoryApi, disruptions: int
) -> None:
    begun_ms = round((objects.NOW - 4000) * 1000)
    ledger = GoodputLedger(since_ms=begun_ms, settled={Category.TRAINING: 3_600_000}, disruptions=disruptions)
    entry = accounts.written(ledger, WorkloadIdentity("JobSet", NAMESPACE, "train", JOBSET_UID), begun_ms + 3_600_000)
    api.add(kinds.POLICIES, {**objects.policy(), "status": {"goodput": [entry.to_json()]}})
    replica = start(api)
    stream = replica.stream(0)
    told: list[float] = []
    sender = Sender(replica.channel("token-0"), time.monotonic)
    sender.on_interval = told.append
    try:
        sender.send(_forecast(saves=10), within_s=WAIT_S)
        assert sender.flush(WAIT_S)
    finally:
        sender.close()
        stream.close()
    assert len(told) == bool(disruptions)
    # Four disruptions in about an hour, of which each loses steps with the probability of one in six.
    assert told == pytest.approx([daly_s(0.5, 3700 / 4 * 6)] * len(told), rel=0.02)


def test_what_fails_while_training_continues_reaches_the_policy(replica: Replica, api: MemoryApi) -> None:
    stream = replica.stream(0)
    sender = Sender(replica.channel("token-0"), time.monotonic)
    mailbox = Mailbox(time.monotonic)
    settings = Settings(pod_uid="uid-pod-0-0", jobset_uid=JOBSET_UID)
    spent = TimeSpent(time.monotonic)
    reporter = Reporter(sender, settings, "s-0", SingleProcess(), mailbox, spent)
    try:
        reporter.trouble(TroubleKind.SAVES, "No space left", for_s=60.0, times=2, left_s=840.0)
        reporter.trouble(TroubleKind.DELETIONS, "/ckpt/3 cannot be deleted", times=1)
        assert sender.flush(WAIT_S)
        until(lambda: {"Saving", "CleanedUp"} <= _conditions(api).keys(), "the conditions")
    finally:
        sender.close()
        stream.close()
    found = _conditions(api)
    assert found["Saving"] == (
        "False",
        f"1 {ANY_PLURAL} have periodic saves that fail (train). train: No space left; training ends if this lasts "
        "another 840 s",
    )
    assert "train: /ckpt/3 cannot be deleted" in found["CleanedUp"][1]


def _conditions(api: MemoryApi) -> dict[str, tuple[str, str]]:
    found = api.of(kinds.POLICIES)[0].get("status", {}).get("conditions", [])
    return {item["type"]: (item["status"], item["message"]) for item in found}


def _forecast(saves: int) -> Forecast:
    spent = Spent(now_s=100.0, joined_s=2.0, restored_s=4.0, trained_s=8.0, saves=saves, saves_s=0.5 * saves)
    return dataclasses.replace(forecast(spent), takes_interval=True)
