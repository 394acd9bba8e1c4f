"""Replies that a store would not send, and stores that ignore conditions."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import google_crc32c
import pytest
import trustme

from gracepoint.checkpoint.storage.objects.gcs import GcsApi
from gracepoint.checkpoint.storage.objects.object_store import BucketStore, ObjectPath, object_path
from gracepoint.checkpoint.storage.objects.s3 import S3Api
from gracepoint.checkpoint.storage.storage_path import Generation
from tests.object_stores.scripted_server import Heard, Script, ScriptedServer, answer
from tests.object_stores.servers import Bucket, Server
from tests.unit.checkpoint.storage.fakes.unsent import KEYS, S3Settings

pytestmark = pytest.mark.integration

HTML = b"<html><body>Log in</body></html>"


@pytest.fixture
def serve() -> Iterator[Callable[[Script], ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(script: Script) -> ScriptedServer:
        servers.append(ScriptedServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


Serve = Callable[[Script], ScriptedServer]


@pytest.fixture(params=["gs", "s3"])
def bucket_at(request: pytest.FixtureRequest, s3_settings: S3Settings) -> Callable[[str], ObjectPath]:
    def connect(url: str) -> ObjectPath:
        api = (
            GcsApi("bucket", {"STORAGE_EMULATOR_HOST": url})
            if request.param == "gs"
            else s3_settings.bucket({**KEYS, "AWS_ENDPOINT_URL": url, "AWS_REGION": "here"})
        )
        request.addfinalizer(api.connections.close)
        return ObjectPath(BucketStore(api, hedges=False, patience_s=0.3), "")

    return connect


ASKED: dict[str, Callable[[ObjectPath], Any]] = {
    "head": lambda top: (top / "key").entry(),
    "read": lambda top: (top / "key").read(),
    "list": lambda top: (top / "folder").entries(),
    "exists": lambda top: (top / "folder").is_folder(),
    "write": lambda top: (top / "key").create(b"data"),
}


@pytest.mark.parametrize("body", [HTML, b"", b"[]", b"<a/>"], ids=["HTML", "nothing", "a list", "XML"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_reply_that_no_store_sends_is_not_believed(
    serve: Serve, bucket_at: Callable[[str], ObjectPath], asked: str, body: bytes
) -> None:
    server = serve(lambda heard, sock: sock.sendall(answer(200, body if heard.method != "HEAD" else b"")))
    with pytest.raises(TimeoutError, match="the reply is not one of the store"):
        ASKED[asked](bucket_at(server.url))


def test_a_whole_object_is_not_taken_for_its_end(serve: Serve, bucket_at: Callable[[str], ObjectPath]) -> None:
    known = {"x_goog_generation": "1", "ETag": '"1"'}

    def script(heard: Heard, sock: socket.socket) -> None:
        sock.sendall(answer(200, b"0123456789" * 10_000, **known))

    with (bucket_at(serve(script).url) / "key").open() as reader, pytest.raises(TimeoutError, match="the whole object"):
        reader.read_into(memoryview(bytearray(10)), 50_000)


def test_a_body_that_breaks_each_time_is_asked_for_after_pauses(
    serve: Serve, bucket_at: Callable[[str], ObjectPath]
) -> None:
    def script(heard: Heard, sock: socket.socket) -> None:
        first = int(heard.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        known = f'x-goog-generation: 1\r\nETag: "1"\r\nContent-Range: bytes {first}-99999/100000\r\n'
        sock.sendall(f"HTTP/1.1 {206 if first else 200} OK\r\nContent-Length: {100000 - first}\r\n{known}\r\n".encode())
        sock.sendall(b"x" * 10)
        sock.shutdown(socket.SHUT_RDWR)

    server = serve(script)
    place = bucket_at(server.url) / "key"
    began_s = time.monotonic()
    with place.open() as reader, pytest.raises(OSError):  # noqa: PT011 - any
        reader.read_into(memoryview(bytearray(100_000)), 0)
    assert time.monotonic() - began_s < 10
    assert len(server.heard) < 30


def test_uploads_to_google_carry_their_checksum(serve: Serve) -> None:
    server = serve(lambda heard, sock: sock.sendall(answer(200, b'{"generation": "7"}')))
    api = GcsApi("bucket", {"STORAGE_EMULATOR_HOST": server.url})
    data = b"data" * 200_000
    assert ObjectPath(BucketStore(api, hedges=False), "key").create(data) == "7"
    sent = server.heard[0].body
    described = json.loads(sent.split(b"\r\n")[3])
    assert base64.b64decode(described["crc32c"]) == google_crc32c.value(data).to_bytes(4, "big")
    api.connections.close()


def in_googles_words(server: Server, heard: Heard) -> bytes:
    """Passes a request on to ``server``. Returns its reply, in which a 404 of an object has the text of Google's."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10.0)
    headers = {name: value for name, value in heard.headers.items() if name != "host"}
    connection.request(heard.method, heard.target, heard.body, headers)
    reply = connection.getresponse()
    status, body = reply.status, reply.read()
    kept = {name.replace("-", "_"): value for name, value in reply.getheaders() if name.lower() != "content-length"}
    connection.close()
    place, _, query = heard.target.partition("?")
    bucket, _, key = place.partition("/b/")[2].partition("/o/")
    if status == 404 and key:
        is_there = bucket == "my-bucket"
        message = f"No such object: {bucket}/{unquote(key)}" if is_there else "The specified bucket does not exist."
        told = {"message": message, "domain": "global", "reason": "notFound"}
        body = json.dumps({"error": {"code": 404, "message": message, "errors": [told]}}).encode()
        if "alt=media" in query:
            body = message.encode()
    return answer(status, body, **kept)


def test_google_s_text_on_a_missing_object_may_contain_any_words(gcs: Server, serve: Serve) -> None:
    gcs.bucket("my-bucket")
    server = serve(lambda heard, sock: sock.sendall(in_googles_words(gcs, heard)))
    api = GcsApi("my-bucket", {"STORAGE_EMULATOR_HOST": server.url})
    top = ObjectPath(BucketStore(api, hedges=False, patience_s=5), "top")
    for place in (top.at("key"), top.at("the specified bucket does not exist")):
        assert place.entry() is None
        with pytest.raises(FileNotFoundError):
            place.read()
        with pytest.raises(FileNotFoundError), place.open():
            pass
        place.delete()
        generation = place.create(b"data")
        assert place.read_bytes() == b"data"
        assert place.delete_version(generation)
        assert place.entry() is None
    top.check_usable()
    other = GcsApi("another-bucket", {"STORAGE_EMULATOR_HOST": server.url})
    missing = ObjectPath(BucketStore(other, hedges=False), "")
    for asked in ASKED.values():
        with pytest.raises(OSError, match="The bucket does not exist: create it"):
            asked(missing)
    api.connections.close()


@pytest.mark.parametrize("ignored", ["create", "replace"])
def test_a_store_that_ignores_a_condition_is_refused(bucket: Bucket, ignored: str) -> None:
    api = GcsApi(bucket.name) if bucket.scheme == "gs" else S3Api(bucket.name)
    top = ObjectPath(BucketStore(api), "top")
    top.check_usable()
    put = api.put

    def careless_put(exchange: Any, key: str, body: Any, only_if: Generation | None, *rest: Any) -> Generation:
        is_ignored = only_if is not None and (ignored == "replace") == bool(only_if)
        return put(exchange, key, body, None if is_ignored else only_if, *rest)

    api.put = careless_put  # type: ignore[assignment]
    with pytest.raises(OSError, match="the store ignores"):
        top.check_usable()
    assert top.entries() == []


def test_each_store_has_its_own_authorities(monkeypatch: pytest.MonkeyPatch, s3_settings: S3Settings) -> None:
    server = ScriptedServer(lambda heard, sock: sock.sendall(answer(404)), authority := trustme.CA())
    other = trustme.CA()
    with authority.cert_pem.tempfile() as ours, other.cert_pem.tempfile() as theirs:
        monkeypatch.setenv("SSL_CERT_FILE", ours)
        google = GcsApi("bucket", {"STORAGE_EMULATOR_HOST": server.url, "AWS_CA_BUNDLE": theirs})
        assert ObjectPath(BucketStore(google, patience_s=1), "key").entry() is None
        environ = {**KEYS, "AWS_ENDPOINT_URL": server.url, "AWS_REGION": "here"}
        apis = [
            s3_settings.bucket({**environ, "AWS_CA_BUNDLE": theirs}),
            s3_settings.bucket(environ, config=f"ca_bundle = {theirs}"),
        ]
        for api in apis:
            with pytest.raises(TimeoutError, match="CERTIFICATE_VERIFY_FAILED"):
                ObjectPath(BucketStore(api, patience_s=0.1), "key").entry()
        assert ObjectPath(BucketStore(s3_settings.bucket(environ), patience_s=1), "key").entry() is None
        google.connections.close()
    server.close()


def test_a_bucket_of_an_emulator_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    assert object_path("gs://bucket/a").store is object_path("gs://bucket/b").store


def test_an_expired_token_of_s3_is_renewed(
    serve: Serve, s3_settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired = b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"

    def script(heard: Heard, sock: socket.socket) -> None:
        is_old = heard.headers.get("x-amz-security-token") == "old"
        sock.sendall(answer(400, expired) if is_old else answer(200, b"data", ETag='"1"'))

    server = serve(script)
    environ = {**KEYS, "AWS_SESSION_TOKEN": "old", "AWS_ENDPOINT_URL": server.url, "AWS_REGION": "here"}
    api = s3_settings.bucket(environ)
    place = ObjectPath(BucketStore(api, hedges=False, patience_s=5), "key")
    with pytest.raises(OSError, match="ExpiredToken"):  # they are new, and there are no others
        place.read()
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    monkeypatch.setattr("gracepoint.checkpoint.storage.objects.provider.RENEW_BEFORE_S", 0.0)
    assert place.read_bytes() == b"data"
    assert len(server.heard) == 3
    api.connections.close()
