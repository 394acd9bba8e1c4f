"""What a watcher asks of a cloud's source of events, and the words that the sources share."""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import json
from collections.abc import Sequence
from typing import Any, Protocol

from gracepoint.receivers.metadata.board import Look
from gracepoint.receivers.metadata.client import MetadataClient, MetadataError, MetadataResponse

#: How long an answer may take that the server has ready.
READY_TIMEOUT_S = 10.0

# Causes, in the operator's words (``gracepoint_operator.signals.Cause``).
SPOT_TERMINATION = "SpotTermination"
MAINTENANCE = "Maintenance"
SCALE_DOWN = "ScaleDown"
REBALANCE = "Rebalance"


class MetadataSource(Protocol):
    """One place of a metadata server that is looked at again and again."""

    @property
    def pause_s(self) -> float:
        """How long to wait until the next look."""

    def look(self) -> Look:
        """All that is there now.

        Raises:
            MetadataError: That cannot be known.
        """


@dataclasses.dataclass(frozen=True)
class WatchGroup:
    """What one thread looks at in turn.

    Attributes:
        name: For the thread and the log.
        client: That the sources share.
        sources: What is looked at.
    """

    name: str
    client: MetadataClient
    sources: Sequence[MetadataSource]


def expected_ok(what: str, answer: MetadataResponse) -> str:
    """The body of an answer.

    Raises:
        MetadataError: It is none.
    """
    if answer.status != 200:
        raise MetadataError(f"{what}: expected HTTP 200, found {answer.status} {answer.text[:120]!r}")
    return answer.text


def parsed(what: str, text: str) -> Any:
    """The JSON value of a body.

    Raises:
        MetadataError: It is none.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise MetadataError(f"{what}: expected JSON, found {text[:120]!r} ({error})") from error


def rfc3339_s(what: str, value: Any) -> float:
    """Seconds since the epoch of ``2026-01-01T00:00:00Z``.

    Raises:
        MetadataError: It is no such time.
    """
    try:
        moment = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise MetadataError(f"{what}: expected a time as 2026-01-01T00:00:00Z, found {value!r}") from error
    return _utc_s(moment)


def rfc2822_s(what: str, value: Any) -> float:
    """Seconds since the epoch of ``Mon, 19 Sep 2016 18:29:47 GMT``, with or without the day's name.

    Raises:
        MetadataError: It is no such time.
    """
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise MetadataError(f"{what}: expected a time as 19 Sep 2016 18:29:47 GMT, found {value!r}") from error
    return _utc_s(moment)


def _utc_s(moment: datetime.datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
