"""Amazon EC2: four items of the instance metadata service, version 2, polled every 5 s as Amazon recommends.

Pages without a path are in docs.aws.amazon.com/AWSEC2/latest/UserGuide/. Version 2 needs a token: first PUT
``/latest/api/token``, then send the token in every request. 401 means that the token has expired. 404 means that the
item does not exist, so there are no events.

* ``spot/instance-action`` (spot-instance-termination-notices.html): ``{"action": "terminate", "time":
  "2017-09-18T08:22:00Z"}`` two minutes ahead. The action may also be stop or hibernate. It is not taken back.
* ``events/recommendations/rebalance`` (rebalance-recommendations.html): ``{"noticeTime": ...}``, an elevated risk
  of such an interruption. It is a hint.
* ``events/maintenance/scheduled`` (monitoring-instances-status-check_sched.html): a list of events with Code,
  EventId, State (active, completed, canceled) and NotBefore, ``21 Jan 2019 09:00:43 GMT``, the earliest start.
* ``autoscaling/target-lifecycle-state`` (docs.aws.amazon.com/autoscaling/ec2/userguide/
  retrieving-target-lifecycle-state-through-imds.html): Terminated if the group is about to end the instance. The item
  does not say for how long lifecycle hooks delay the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from gracepoint.receivers.metadata.source import (
    MAINTENANCE,
    READY_TIMEOUT_S,
    REBALANCE,
    SCALE_DOWN,
    SPOT_TERMINATION,
    Event,
    Look,
    MetadataClient,
    MetadataError,
    MetadataResponse,
    WatchGroup,
    expected_ok,
    parsed,
    rfc2822_s,
    rfc3339_s,
)

TOKEN_PATH = "/latest/api/token"
TOKEN_TTL_HEADERS = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}  # 6 hours, the maximum
POLL_S = 5.0
_ROOT = "/latest/meta-data/"


class Imds:
    """Sends requests with a token. A token that is refused is renewed.

    Args:
        client: The client, which no other object uses.
    """

    def __init__(self, client: MetadataClient) -> None:
        self._client = client
        self._token: str | None = None

    def get(self, item: str) -> MetadataResponse:
        """Returns the answer for the item, with any status except 401.

        Raises:
            MetadataError: There is no answer, or the service gives no token.
        """
        for _ in range(2):
            if self._token is None:
                self._token = new_token(self._client)
            headers = {"X-aws-ec2-metadata-token": self._token}
            answer = self._client.request(_ROOT + item, headers, timeout_s=READY_TIMEOUT_S)
            if answer.status != 401:
                return answer
            self._token = None
        raise MetadataError(f"GET {item}: HTTP 401 with a token that was just made")


def new_token(client: MetadataClient) -> str:
    """Requests a token.

    Raises:
        MetadataError: The service gives no token.
    """
    try:
        answer = client.request(TOKEN_PATH, TOKEN_TTL_HEADERS, timeout_s=READY_TIMEOUT_S, method="PUT")
    except MetadataError as error:
        raise MetadataError(
            f"{error}. Where this is a timeout in a container, the instance's HttpPutResponseHopLimit is 1: set it to 2"
        ) from error
    return expected_ok(f"PUT {TOKEN_PATH}", answer).strip()


class Item:
    """One item of the service, which is polled.

    Args:
        imds: Sends the requests. The items of one watcher share it.
        name: The path of the item below ``/latest/meta-data/``.
        read: Reads the events from the body of an answer.
    """

    pause_s = POLL_S

    def __init__(self, imds: Imds, name: str, read: Callable[[str], Sequence[Event]]) -> None:
        self._imds = imds
        self._name = name
        self._read = read

    def look(self) -> Look:
        answer = self._imds.get(self._name)
        if answer.status == 404:
            return Look((), answer.server_time_s)
        return Look(self._read(expected_ok(self._name, answer)), answer.server_time_s)


def groups(new_client: Callable[[], MetadataClient], *, grace_period_s: float) -> list[WatchGroup]:
    """Returns the four items, for one thread.

    Args:
        new_client: Makes a client.
        grace_period_s: Seconds that are assumed to be left if Amazon gives no time.
    """
    client = new_client()
    imds = Imds(client)
    readers: dict[str, Callable[..., Sequence[Event]]] = {
        "spot/instance-action": read_instance_action,
        "events/recommendations/rebalance": read_rebalance,
        "events/maintenance/scheduled": read_scheduled,
        "autoscaling/target-lifecycle-state": read_lifecycle_state,
    }
    items = [Item(imds, name, functools.partial(read, lead_s=grace_period_s)) for name, read in readers.items()]
    return [WatchGroup("aws", client, items)]


def read_instance_action(text: str, lead_s: float) -> Sequence[Event]:
    """Returns the events of ``spot/instance-action``.

    Raises:
        MetadataError: The text is not such an object.
    """
    path = "spot/instance-action"
    notice = _object(path, parsed(path, text))
    return [
        Event(
            name=f"{path} {notice.get('action')}",
            cause=SPOT_TERMINATION,
            lead_s=lead_s,
            starts_at_s=rfc3339_s(f"{path} time", notice.get("time")),
        )
    ]


def read_rebalance(text: str, lead_s: float) -> Sequence[Event]:
    """Returns the events of ``events/recommendations/rebalance``."""
    return [Event(name="events/recommendations/rebalance", cause=REBALANCE, lead_s=lead_s, hint=True)]


def read_scheduled(text: str, lead_s: float) -> Sequence[Event]:
    """Returns the events of ``events/maintenance/scheduled``.

    Raises:
        MetadataError: The text is not a list of such objects.
    """
    path = "events/maintenance/scheduled"
    listed = parsed(path, text)
    if not isinstance(listed, list):
        raise MetadataError(f"{path}: expected a list, found {text[:120]!r}")
    return [
        Event(
            name=f"{path} {notice.get('Code')} {notice.get('EventId')}",
            cause=MAINTENANCE,
            lead_s=lead_s,
            starts_at_s=rfc2822_s(f"{path} NotBefore", notice.get("NotBefore")),
            cancelable=True,
        )
        for notice in (_object(path, item) for item in listed)
        if notice.get("State") == "active"
    ]


def read_lifecycle_state(text: str, lead_s: float) -> Sequence[Event]:
    """Returns the events of ``autoscaling/target-lifecycle-state``. Only Terminated is an event."""
    if text.strip() != "Terminated":
        return []
    return [Event(name="autoscaling/target-lifecycle-state Terminated", cause=SCALE_DOWN, lead_s=lead_s)]


def _object(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MetadataError(f"{path}: expected an object, found {str(value)[:120]!r}")
    return value
