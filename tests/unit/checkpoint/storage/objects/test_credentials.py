"""Credentials of object stores: when they are renewed, who waits for that, and what is said of those that fail."""

from __future__ import annotations

import functools
import itertools
import threading
import time

import pytest

from gracepoint import threads as daemon_thread
from gracepoint.checkpoint.storage.checks import must_not_write
from gracepoint.checkpoint.storage.objects import provider
from gracepoint.checkpoint.storage.objects.gcs import GcsApi
from gracepoint.checkpoint.storage.objects.http import Connections, Exchange
from gracepoint.checkpoint.storage.objects.provider import Renewed, StoreCredentials, Transient
from gracepoint.checkpoint.storage.storage_path import NotAdmitted
from tests.interrupts import interrupt_at
from tests.unit.checkpoint.storage.fakes.unsent import Unsent
from tests.waiting import until

WAIT_S = 10.0


class Source:
    """Finds credentials that are valid for a time that the test sets."""

    def __init__(self) -> None:
        self.left_s = 3600.0
        self.calls: list[bool] = []
        self.error: Exception | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, was_refused: bool) -> StoreCredentials[str]:
        self.calls.append(was_refused)
        assert self.may_end.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        until_s = time.monotonic() + self.left_s
        return StoreCredentials(f"token {len(self.calls)}", lambda seconds: time.monotonic() + seconds < until_s)


class GoogleCredentials:
    """As the class of ``google.auth``."""

    token = "of Google"
    expiry = None

    def refresh(self, request: object) -> None:
        pass


def nothing() -> None:
    pass


def test_credentials_are_found_once() -> None:
    source = Source()
    renewed = Renewed("test", source)
    assert [renewed.get(nothing) for _ in range(3)] == ["token 1"] * 3


def test_valid_credentials_are_used_while_others_are_looked_for() -> None:
    source = Source()
    source.left_s = 100.0  # less than what is left when a renewal begins
    renewed = Renewed("test", source)
    renewed.get(nothing)
    source.may_end.clear()
    assert renewed.get(nothing) == "token 1"
    source.left_s = 3600.0
    source.may_end.set()
    until(lambda: renewed.get(nothing) != "token 1", "another token")


def test_valid_credentials_are_used_if_others_cannot_be_had() -> None:
    source = Source()
    source.left_s = 100.0
    renewed = Renewed("test", source)
    renewed.get(nothing)
    source.error = RuntimeError("the metadata server is away")
    for _ in range(3):
        assert renewed.get(nothing) in ("token 1", "token 2")
    until(lambda: len(source.calls) >= 2, "the second call")


def test_credentials_that_cannot_be_renewed_now_are_asked_for_again() -> None:
    source = Source()
    source.error = RuntimeError("the metadata server is away")
    with pytest.raises(Transient, match="the metadata server is away"):
        Renewed("test", source).get(nothing)


def test_missing_credentials_do_not_mean_read_only() -> None:
    source = Source()
    source.error = NotAdmitted(5, "no credentials were found")
    with pytest.raises(NotAdmitted, match="no credentials were found") as caught:
        Renewed("test", source).get(nothing)
    assert not must_not_write(caught.value)


class Enough(Exception):
    pass


def test_a_caller_without_time_does_not_wait_for_a_renewal() -> None:
    source = Source()
    source.may_end.clear()
    end_s = time.monotonic() + 0.3

    def go_on() -> None:
        if time.monotonic() > end_s:
            raise Enough

    began_s = time.monotonic()
    with pytest.raises(Enough):
        Renewed("test", source).get(go_on)
    assert time.monotonic() - began_s < 3
    source.may_end.set()


def test_refused_credentials_are_renewed_unless_they_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    renewed = Renewed("test", source)
    first = renewed.get(nothing)
    assert not renewed.refused(first)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 400.0)
    assert renewed.refused(first)
    monkeypatch.undo()
    assert renewed.get(nothing) == "token 2"
    assert source.calls == [False, True]
    assert renewed.refused(first)  # it has been renewed meanwhile


def test_several_threads_renew_once() -> None:
    source = Source()
    source.may_end.clear()
    renewed = Renewed("test", source)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(renewed.get(nothing))) for _ in range(8)]
    for thread in threads:
        thread.start()
    source.may_end.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == ["token 1"] * 8
    assert source.calls == [False]


@pytest.mark.parametrize(
    ("status", "code", "writes", "means_read_only"),
    [
        (403, "AccessDenied", True, True),
        (403, "forbidden", True, True),
        (403, "AccessDenied", False, False),
        (403, "RequestTimeTooSkewed", True, False),
        (403, "InvalidAccessKeyId", True, False),
        (403, "SignatureDoesNotMatch", True, False),
        (400, "ExpiredToken", True, False),
        (401, "authError", True, False),
        (404, "NoSuchSomething", True, False),
    ],
)
def test_only_a_write_that_is_forbidden_means_read_only(
    status: int, code: str, writes: bool, means_read_only: bool
) -> None:
    exchange = Exchange(Connections("http://127.0.0.1:1"))
    exchange.status = status
    error = provider.refused("what", exchange, code, "message", writes=writes)
    assert must_not_write(error) == means_read_only
    assert isinstance(error, NotAdmitted) != means_read_only


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"TENSORSTORE_GCS_HTTP_URL": "https://storage.googleapis.com/"}, True),
        ({"TENSORSTORE_GCS_HTTP_URL": "https://storage-mine.p.googleapis.com"}, True),
        ({"TENSORSTORE_GCS_HTTP_URL": "http://127.0.0.1:1"}, False),
        ({"STORAGE_EMULATOR_HOST": "127.0.0.1:1"}, False),
        ({"STORAGE_EMULATOR_HOST": "https://localhost:1"}, False),
    ],
)
def test_only_an_emulator_gets_no_access_token(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: bool
) -> None:
    import google.auth

    monkeypatch.setattr(google.auth, "default", lambda scopes: (GoogleCredentials(), "project"))
    bucket, exchange = GcsApi("bucket", environ), Unsent()
    assert bucket.head(exchange, "key") is None
    assert exchange.sent[0].headers == ({"Authorization": "Bearer of Google"} if expected else {})


def test_wherever_a_renewal_is_interrupted_the_next_request_gets_credentials() -> None:
    for number in itertools.count():
        credentials = Renewed("the store", Source())
        reached = interrupt_at(functools.partial(credentials.get, lambda: None), number, [daemon_thread])
        until_s = time.monotonic() + WAIT_S

        def go_on(until_s: float = until_s, number: int = number) -> None:
            assert time.monotonic() < until_s, f"bytecode {number}"

        assert credentials.get(go_on).startswith("token")
        if not reached:
            break
    assert number > 20
