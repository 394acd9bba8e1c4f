"""The interface of a cloud's source of events, and the constants and parsers that the sources share."""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import json
from collections.abc import Sequence
from typing import Any, Protocol

from gracepoint.receivers.metadata.board import Look
from gracepoint.receivers.metadata.client import MetadataClient, MetadataError, MetadataResponse

#: Timeout, in seconds, of a request that the server answers at once.
READY_TIMEOUT_S = 10.0

# Causes, as in the operator's ``gracepoint_operator.signals.Cause``.
SPOT_TERMINATION = "SpotTermination"
MAINTENANCE = "Maintenance"
SCALE_DOWN = "ScaleDown"
REBALANCE = "Rebalance"


class MetadataSource(Protocol):
    """A part of a metadata server that is read repeatedly."""

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next look."""

    def look(self) -> Look:
        """Returns all events that exist now.

        Raises:
            MetadataError: The server could not be reached, or its answer cannot be read.
        """


@dataclasses.dataclass(frozen=True)
class WatchGroup:
    """The sources that one thread looks at in turn.

    Attributes:
        name: Name of the group, for the thread and the log.
        client: The client that the sources share.
        sources: The sources.
    """

    name: str
    client: MetadataClient
    sources: Sequence[MetadataSource]


def expected_ok(what: str, answer: MetadataResponse) -> str:
    """Returns the body of an answer.

    Raises:
        MetadataError: The status is not 200.
    """
    if answer.status != 200:
        raise MetadataError(f"{what}: expected HTTP 200, found {answer.status} {answer.text[:120]!r}")
    return answer.text


def parsed(what: str, text: str) -> Any:
    """Returns the JSON value of a body.

    Raises:
        MetadataError: The body is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise MetadataError(f"{what}: expected JSON, found {text[:120]!r} ({error})") from error


def rfc3339_s(what: str, value: Any) -> float:
    """Returns the seconds since the epoch of a time such as ``2026-01-01T00:00:00Z``.

    Raises:
        MetadataError: The value is not such a time.
    """
    try:
        moment = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise MetadataError(f"{what}: expected a time as 2026-01-01T00:00:00Z, found {value!r}") from error
    return _utc_s(moment)


def rfc2822_s(what: str, value: Any) -> float:
    """Returns the seconds since the epoch of a time such as ``Mon, 19 Sep 2016 18:29:47 GMT``.

    The name of the day may be missing.

    Raises:
        MetadataError: The value is not such a time.
    """
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise MetadataError(f"{what}: expected a time as 19 Sep 2016 18:29:47 GMT, found {value!r}") from error
    return _utc_s(moment)


def _utc_s(moment: datetime.datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
