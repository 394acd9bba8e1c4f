"""What the proxy in front of an object store does to requests, and how it counts them. All of it is plain values.

A fault is chosen by a ``Rule``: by the request's kind, its path, its number, or by chance with a seed. Requests are
numbered from 1 in the order in which they reach the proxy.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from urllib.parse import parse_qsl, urlsplit


class How(Enum):
    """What becomes of a request."""

    ANSWER = "answer"
    """The server never sees it; the proxy answers with ``Fault.status``."""
    REFUSE = "refuse"
    """The server never sees it; the connection is reset."""
    CUT_REQUEST = "cut-request"
    """The server gets the first ``Fault.after_bytes`` of the body; then both connections are closed."""
    STALL_REQUEST = "stall-request"
    """The server gets the first ``Fault.after_bytes`` of the body, and then nothing for ``Fault.seconds``."""
    LOST_REPLY = "lost-reply"
    """The server does it; the connection is reset instead of its reply."""
    SLOW_REPLY = "slow-reply"
    """The first byte of the reply comes ``Fault.seconds`` late."""
    CUT_REPLY = "cut-reply"
    """The connection is reset after ``Fault.after_bytes`` of the reply's body."""
    STALL_REPLY = "stall-reply"
    """After ``Fault.after_bytes`` of the reply's body nothing comes for ``Fault.seconds``."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a request.

    Attributes:
        how: See ``How``.
        status: The answer's status, for ANSWER.
        seconds: For SLOW_REPLY and the stalls; None is until either side closes the connection.
        after_bytes: Of the body, for the cuts and stalls.
        retry_after_s: The Retry-After header of ANSWER; None is none.
    """

    how: How
    status: int = 503
    seconds: float | None = None
    after_bytes: int = 0
    retry_after_s: int | None = None


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, as rules and counts see it.

    Attributes:
        number: Counted from 1.
        method: Such as ``GET``.
        target: Path and query.
        kind: See ``kind_of``.
        conditional: Whether it has a condition on a generation or an ETag.
    """

    number: int
    method: str
    target: str
    kind: str
    conditional: bool


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which requests a fault is for: those to which all of these apply.

    Attributes:
        fault: What happens to them.
        kinds: Their kinds; empty is every kind.
        path: A regular expression that is searched in path and query.
        first: The least number of the request.
        times: At most so many requests; None is without a limit.
        share: The share of the requests that fits the rest, drawn with ``seed`` and the request's number.
        seed: See ``share``.
    """

    fault: Fault
    kinds: tuple[str, ...] = ()
    path: str = ""
    first: int = 1
    times: int | None = None
    share: float = 1.0
    seed: int = 0

    def fits(self, asked: Asked) -> bool:
        """Whether the fault is for the request, ``times`` aside."""
        return (
            asked.number >= self.first
            and (not self.kinds or asked.kind in self.kinds)
            and re.search(self.path, asked.target) is not None
            and (self.share >= 1 or random.Random(f"{self.seed} {asked.number}").random() < self.share)
        )


def cut_after(requests: int, *, lose_last_reply: bool = False) -> tuple[Rule, ...]:
    """Rules for a client that dies after its n-th request: nothing reaches the server after it.

    Args:
        requests: n; with 0 nothing reaches the server at all.
        lose_last_reply: Whether the reply to the n-th request is lost, too. The server has done what it asked.
    """
    lost = (Rule(Fault(How.LOST_REPLY), first=requests, times=1),) if lose_last_reply and requests else ()
    return (*lost, Rule(Fault(How.REFUSE), first=requests + 1))


@dataclasses.dataclass(frozen=True)
class Shape:
    """How slow the network is.

    Attributes:
        round_trip_s: What each request and each new connection costs in time.
        connection_rate: Bytes a second of a connection in each direction; None is without a limit.
        total_rate: Of all connections together, in each direction; None is without a limit.
    """

    round_trip_s: float = 0.0
    connection_rate: float | None = None
    total_rate: float | None = None


@dataclasses.dataclass(frozen=True)
class Count:
    """Requests of one method and kind.

    Attributes:
        requests: How many.
        sent: Bytes of their bodies.
        received: Bytes of the bodies of the replies.
        failed: How many were answered with a status of 400 or more, or not at all.
    """

    requests: int = 0
    sent: int = 0
    received: int = 0
    failed: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A request that has ended.

    Attributes:
        asked: The request.
        status: Of the reply; None if none reached the client.
        sent: Bytes of the request's body that the proxy has read.
        received: Bytes of the reply's body that the client was sent.
        fault: What the proxy did to it; None if nothing.
    """

    asked: Asked
    status: int | None
    sent: int
    received: int
    fault: How | None


def counts(exchanges: Iterable[Exchange]) -> dict[str, Count]:
    """Counts by method and kind, such as ``PUT write``."""
    found: dict[str, Count] = {}
    for each in exchanges:
        key = f"{each.asked.method} {each.asked.kind}"
        failed = each.status is None or each.status >= 400
        found[key] = found.get(key, Count()) + Count(1, each.sent, each.received, int(failed))
    return dict(sorted(found.items()))


def statuses(exchanges: Iterable[Exchange]) -> Counter[int | None]:
    """How often each status was replied."""
    return Counter(each.status for each in exchanges)


_CONDITIONS = ("if-match", "if-none-match", "x-goog-if-generation-match")


def is_conditional(target: str, headers: Iterable[str]) -> bool:
    """Whether a request has a condition, given its path and query and the names of its headers."""
    query = dict(parse_qsl(urlsplit(target).query, keep_blank_values=True))
    return any(name.startswith("ifGeneration") for name in query) or any(
        each.lower() in _CONDITIONS for each in headers
    )


KINDS = ("read", "stat", "list", "write", "begin", "part", "end", "delete", "bucket", "other")


def kind_of(method: str, target: str) -> str:
    """What a request does: one of ``KINDS``.

    ``begin``, ``part`` and ``end`` belong to uploads of several requests. A ``stat`` asks for an object without data.
    """
    parts = urlsplit(target)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    google = re.fullmatch(r"/(?:(?:upload|download)/)?storage/v1/b(?:/([^/]+)(/o(?:/(.*))?)?)?", parts.path)
    if google is not None:
        return _google_kind(
            method, query, parts.path, bucket=bool(google[1]), objects=bool(google[2]), name=google[3] or ""
        )
    if parts.path.startswith("/batch/"):
        return "other"
    return _s3_kind(method, query, parts.path.strip("/").count("/") > 0)


def _google_kind(method: str, query: dict[str, str], path: str, *, bucket: bool, objects: bool, name: str) -> str:
    if not bucket or not objects:
        return "bucket"
    if path.startswith("/upload/"):
        if "upload_id" in query:
            return "part"
        return "begin" if query.get("uploadType") == "resumable" else "write"
    if method == "GET" and not name:
        return "list"
    if method == "GET":
        return "read" if query.get("alt") == "media" or path.startswith("/download/") else "stat"
    return {"DELETE": "delete", "HEAD": "stat"}.get(method, "other")


def _s3_kind(method: str, query: dict[str, str], names_object: bool) -> str:
    if "uploads" in query:
        return "begin" if method == "POST" else "list"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "end", "DELETE": "delete"}.get(method, "list")
    if "delete" in query:
        return "delete"
    if not names_object:
        return "list" if method == "GET" and ("list-type" in query or "prefix" in query) else "bucket"
    return {"GET": "read", "HEAD": "stat", "PUT": "write", "DELETE": "delete"}.get(method, "other")
