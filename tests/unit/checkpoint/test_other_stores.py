"""Stores with S3's API that differ from S3: real servers behind a proxy that takes or refuses what others do."""

from __future__ import annotations

import datetime
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, Protocol, cast
from urllib.parse import unquote

import pytest

from gracepoint.checkpoint import CheckpointManager, WriteOptions
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.part import SavePart, clear_tree
from gracepoint.checkpoint.storage import in_memory
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.objects.http import close_idle_connections
from gracepoint.checkpoint.storage.objects.s3 import S3Uploads
from gracepoint.checkpoint.storage.storage_path import NotAdmitted
from gracepoint.checkpoint.verification import verify
from gracepoint.errors import SaveFailed
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.fixtures import set_environment
from tests.object_stores.http_messages import Head
from tests.object_stores.servers import Bucket, Server
from tests.unit.checkpoint.fakes.engine import assert_same, small_state
from tests.unit.checkpoint.fakes.formats import each_format
from tests.waiting import until

pytestmark = pytest.mark.integration


class Behind(Protocol):
    """Makes a bucket of a server behind a proxy that changes or answers requests."""

    def __call__(self, server: Server, passed: Callable[[Head], Head | bytes], name: str = "") -> Bucket: ...


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behind]:
    proxies: list[FaultProxy] = []

    def make(server: Server, passed: Callable[[Head], Head | bytes], name: str = "") -> Bucket:
        proxies.append(FaultProxy(server.url))
        proxies[-1].passed = passed
        return set_environment(server.bucket(name, url=proxies[-1].url), monkeypatch)

    yield make
    for proxy in proxies:
        proxy.close()
    close_idle_connections()


def refusal(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
    return f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ignoring_versions_of_deletions(head: Head) -> Head:
    return Head(head.without("if-match")) if head.first.startswith("DELETE ") else head


def without_versions_of_deletions(head: Head) -> Head | bytes:
    if head.first.startswith("DELETE ") and "if-match" in head.headers:
        return refusal(501, "NotImplemented")
    return head


@pytest.mark.parametrize("passed", [ignoring_versions_of_deletions, without_versions_of_deletions])
def test_a_store_without_conditions_on_deletions_holds_a_run_and_is_named(
    behind: Behind, moto: Server, passed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    root: Any = f"{behind(moto, passed).uri}/run"
    with caplog.at_level(logging.WARNING):
        storage_path(root).check_usable()
    assert "the store ignores which version of an object a deletion is for" in caplog.text
    with CheckpointManager(root, keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, small_state(step))
        manager.wait_until_finished()
        assert_same(manager.restore(like=small_state()).state, small_state(3))
    assert {entry.key.partition("/")[0] for entry in storage_path(root).entries()} == {"2", "3"}
    assert verify(storage_path(root) / "3").ok


def only_virtual_hosts(head: Head) -> Head | bytes:
    name = head.headers["host"].partition(":")[0]
    return head if name.endswith(".localhost") else refusal(400, "PathStyleRequestsAreNotTaken")


@pytest.fixture
def virtual_hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bucket], None]:
    """Has clients put the bucket into the name of the host, which is then one below ``localhost``."""
    found = socket.getaddrinfo

    def here(host: Any, *rest: Any, **more: Any) -> Any:
        return found("127.0.0.1" if str(host).endswith("localhost") else host, *rest, **more)  # curl does the same

    def use(bucket: Bucket) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", here)
        monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url.replace("127.0.0.1", "localhost"))
        monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")

    return use


@each_format
def test_a_store_that_takes_virtual_hosts_only_holds_every_format(
    behind: Behind, s3: Server, virtual_hosts: Callable[[Bucket], None], options: WriteOptions
) -> None:
    bucket = behind(s3, only_virtual_hosts)
    virtual_hosts(bucket)
    check_run(f"{bucket.uri}/run", options)


@each_format
def test_a_server_at_a_path_of_another_server_holds_every_format(
    behind: Behind, moto: Server, monkeypatch: pytest.MonkeyPatch, options: WriteOptions
) -> None:
    def below_the_path(head: Head) -> Head | bytes:
        method, target = head.first.split(" ", 1)
        if not target.startswith("/storage/v1/s3/"):
            return refusal(400, "NothingIsHere")
        return Head(
            head.raw.replace(head.first.encode(), f"{method} {target.removeprefix('/storage/v1/s3')}".encode(), 1)
        )

    bucket = behind(moto, below_the_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{bucket.url}/storage/v1/s3")
    check_run(f"{bucket.uri}/run", options)


def check_run(root: Any, options: WriteOptions) -> None:
    """Saves, replaces, deletes, restores and verifies."""
    with CheckpointManager(root, keep_last=1, options=options) as manager:
        for step in (1, 2):
            manager.save(step, small_state(step))
        manager.wait_until_finished()
        assert_same(manager.restore(like=small_state()).state, small_state(2))
    assert verify(storage_path(root) / "2").ok
    assert {entry.key.partition("/")[0] for entry in storage_path(root).entries()} == {"2"}


@each_format
def test_the_start_tries_tensorstore_s_client_too_and_what_it_must_read_is_refused_by_name(
    s3: Server, behind: Behind, caplog: pytest.LogCaptureFixture, options: WriteOptions
) -> None:
    def refuses_tensorstore(head: Head) -> Head | bytes:
        return refusal(403, "AccessDenied") if "tensorstore" in head.headers.get("user-agent", "") else head

    check_without_tensorstore(f"{behind(s3, refuses_tensorstore).uri}/run", options, caplog)


def check_without_tensorstore(root: str, options: WriteOptions, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        storage_path(root).check_usable()
    assert "TensorStore cannot read from the store" in caplog.text
    if not options.use_ocdbt and options.compression is None:
        return check_run(root, options)
    with pytest.raises(
        SaveFailed,
        match="TensorStore cannot read from the store.*Save without OCDBT and without compression, or mend that",
    ):
        check_run(root, options)


SESSION_S = 300.0


class DirectoryBucket:
    """Does as S3 Express before a server that does not: opens sessions, and takes their credentials alone."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self.sessions = 0

    def __call__(self, head: Head) -> Head | bytes:
        authorization, token = head.headers.get("authorization", ""), head.headers.get("x-amz-s3session-token", "")
        if "/us-east-1/s3express/aws4_request" not in authorization:
            return refusal(403, "AccessDenied")
        if head.first.split(" ")[1].endswith("?session"):
            self.sessions += 1
            return self._opened(str(self.sessions))
        is_opened = token.isdecimal() and int(token) <= self.sessions
        is_signed = f"Credential=session-{token}/" in authorization and "x-amz-s3session-token" in authorization
        return head if is_opened and is_signed else refusal(403, "AccessDenied")

    def _opened(self, token: str) -> bytes:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self._lasts_s)
        body = (
            f"<CreateSessionResult><Credentials><SessionToken>{token}</SessionToken><SecretAccessKey>secret"
            f"</SecretAccessKey><AccessKeyId>session-{token}</AccessKeyId><Expiration>{end:%Y-%m-%dT%H:%M:%SZ}</Expiration>"
            "</Credentials></CreateSessionResult>"
        ).encode()
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@each_format
def test_a_directory_bucket_is_used_in_sessions_with_it(
    behind: Behind, moto: Server, caplog: pytest.LogCaptureFixture, options: WriteOptions
) -> None:
    express = DirectoryBucket(SESSION_S)
    bucket = behind(moto, express, f"{secrets.token_hex(4)}--use1-az4--x-s3")
    check_without_tensorstore(f"{bucket.uri}/run", options, caplog)
    assert express.sessions == 1


@pytest.mark.parametrize(("lasts_s", "expected"), [(SESSION_S, False), (50.0, True)])
def test_a_session_is_replaced_before_it_ends(behind: Behind, moto: Server, lasts_s: float, expected: bool) -> None:
    express = DirectoryBucket(lasts_s)
    top = storage_path(f"{behind(moto, express, f'{secrets.token_hex(4)}--use1-az4--x-s3').uri}/run")
    for number in range(3):  # the second request of a session that ends soon has another one opened
        (top / f"{number}").create(b"data")
    until(lambda: express.sessions > 1 or not expected, "a second session")
    assert (express.sessions > 1) == expected
    assert [(top / f"{number}").read().data for number in range(3)] == [b"data"] * 3


def test_a_session_that_the_server_ended_early_is_opened_again(behind: Behind, moto: Server) -> None:
    """As where this machine's clock is slow: by that, the session goes on."""
    express, ended = DirectoryBucket(SESSION_S), set[str]()

    def passed(head: Head) -> Head | bytes:
        token = head.headers.get("x-amz-s3session-token", "")
        return refusal(400, "ExpiredToken") if token in ended else express(head)

    top = storage_path(f"{behind(moto, passed, f'{secrets.token_hex(4)}--use1-az4--x-s3').uri}/run")
    (top / "1").create(b"data")
    ended.add("1")
    (top / "2").create(b"data")
    assert express.sessions == 2


@pytest.mark.parametrize("writer", ["thread", "worker"])
def test_what_tensorstore_must_read_is_refused_whoever_writes_it(
    behind: Behind, moto: Server, writer: Literal["thread", "worker"]
) -> None:
    def passed(head: Head) -> Head | bytes:
        return refusal(403, "AccessDenied") if "tensorstore" in head.headers.get("user-agent", "") else head

    root = f"{behind(moto, passed).uri}/run"
    storage_path(root).check_usable()
    with CheckpointManager(root, options=WriteOptions(compression="zstd", writer=writer)) as manager:

        def save() -> None:
            manager.save(1, small_state(1))
            manager.wait_until_finished()

        with pytest.raises(SaveFailed, match="TensorStore cannot read"):
            save()


def test_a_process_clears_nothing_in_a_bucket_for_a_writer_that_died(behind: Behind, moto: Server) -> None:
    """Each writer's tree has a separate name there, and a bucket that does not answer would hold up the save."""
    asked: list[str] = []

    def passed(head: Head) -> Head | bytes:
        asked.append(head.first)
        return head

    paths = Layout(storage_path(f"{behind(moto, passed).uri}/run"))
    temporary = paths.temporary(1, "attempt", 1)
    asked.clear()
    clear_tree(cast(SavePart, SimpleNamespace(paths=paths, temporary=temporary, process_index=0)))
    assert asked == []


def test_a_directory_bucket_whose_sessions_are_forbidden_says_which_right_is_missing(
    behind: Behind, moto: Server
) -> None:
    def forbids(head: Head) -> Head | bytes:
        return refusal(403, "AccessDenied")

    bucket = behind(moto, forbids, f"{secrets.token_hex(4)}--use1-az4--x-s3")
    with pytest.raises(NotAdmitted, match="AccessDenied.*may use s3express:CreateSession on it"):
        storage_path(f"{bucket.uri}/run").check_usable()


def test_saves_in_ocdbt_are_not_refused_for_one_answer_of_tensorstore_that_came_late(
    s3: Server, behind: Behind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(spec: dict[str, Any], timeout_s: float) -> bytes:
        raise TimeoutError

    root: Any = f"{behind(s3, lambda head: head).uri}/run"
    with monkeypatch.context() as patch:
        patch.setattr(in_memory, "read_alone", late)
        storage_path(root).check_usable()
    assert "TensorStore did not answer within 10 s, so it was not checked" in caplog.text
    check_run(root, WriteOptions(use_ocdbt=True))


ENCRYPTION = "x-amz-server-side-encryption"


@each_format
@pytest.mark.parametrize("server", ["s3", "moto"])
def test_a_bucket_that_demands_encryption_holds_every_format(
    behind: Behind,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    server: str,
    options: WriteOptions,
) -> None:
    told: list[dict[str, str]] = []

    def demands(head: Head) -> Head | bytes:
        method, target, _ = head.first.split(" ", 2)
        writes = (method == "PUT" and "uploadId" not in target) or (method == "POST" and "uploads" in target)
        if not writes:
            return head
        told.append({name: value for name, value in head.headers.items() if name.startswith(ENCRYPTION)})
        return head if head.headers.get(ENCRYPTION) == "AES256" else refusal(403, "AccessDenied")

    root: Any = f"{behind(request.getfixturevalue(server), demands).uri}/run"
    with pytest.raises(OSError, match=r"If the bucket's policy demands encryption, set objectStore\.serverSide"):
        storage_path(root).check_usable()
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")
    told.clear()
    storage_path(root).check_usable()
    check_run(root, options)
    assert told
    assert all(each == {ENCRYPTION: "AES256"} for each in told)


def test_the_key_and_the_key_of_the_bucket_are_sent_in_uploads_in_parts_too(
    behind: Behind, moto: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, dict[str, str]]] = []

    def note(head: Head) -> Head:
        method = head.first.partition(" ")[0]
        if of_it := {name: value for name, value in head.headers.items() if name.startswith(ENCRYPTION)}:
            told.append((method, of_it))
        return head

    monkeypatch.setattr(S3Uploads, "from_bytes", 1)
    for name, value in (
        ("SERVER_SIDE_ENCRYPTION", "aws:kms"),
        ("SSE_KMS_KEY_ID", "k"),
        ("SSE_BUCKET_KEY_ENABLED", "true"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    check_run(f"{behind(moto, note).uri}/run", WriteOptions())
    wanted = {ENCRYPTION: "aws:kms", f"{ENCRYPTION}-aws-kms-key-id": "k", f"{ENCRYPTION}-bucket-key-enabled": "true"}
    assert {method for method, _ in told} == {"PUT", "POST"}
    assert all(of_it == wanted for _, of_it in told)


def test_the_key_of_cloud_storage_is_sent_with_each_object(
    behind: Behind, gcs: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, targets = "projects/p/locations/l/keyRings/r/cryptoKeys/k", list[str]()

    def note(head: Head) -> Head:
        targets.append(unquote(head.first.split(" ")[1]))
        return head

    monkeypatch.setenv("GOOGLE_STORAGE_KMS_KEY_NAME", key)
    check_run(f"{behind(gcs, note).uri}/run", WriteOptions(use_ocdbt=True))
    uploads = [target for target in targets if target.startswith("/upload/")]
    assert uploads
    assert all(f"kmsKeyName={key}" in target for target in uploads)
