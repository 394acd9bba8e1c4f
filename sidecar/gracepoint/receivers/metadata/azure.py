"""Azure: Scheduled Events, polled once a second as Microsoft recommends.

(learn.microsoft.com/azure/virtual-machines/linux/scheduled-events, API version 2020-07-01.)
``Events`` lists the events that are scheduled or have started, for all VMs of the availability set or scale set. Only
events that name this VM in ``Resources`` concern it. Events that are over or were cancelled are not listed any more.

* EventType Preempt (at least 30 s ahead), Terminate (5 to 15 minutes, set by the user), Reboot (15 minutes) and
  Redeploy (10 minutes) end the VM or lose its memory. Freeze pauses the VM for some seconds and loses nothing. It is a
  hint, like any type that is not known here.
* ``NotBefore``, ``Mon, 19 Sep 2016 18:29:47 GMT``, is the earliest start. It is empty once the event has started.

The first request of a service turns the feature on and may take up to two minutes. If an event is approved, it may
begin earlier, for all VMs that it names. This module never approves an event.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gracepoint.receivers.metadata.source import (
    MAINTENANCE,
    READY_TIMEOUT_S,
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
)

HEADERS = {"Metadata": "true"}
#: A single value as plain text; see learn.microsoft.com/azure/virtual-machines/instance-metadata-service.
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
POLL_S = 1.0
_FIRST_TIMEOUT_S = 130.0

_CAUSES = {
    "Preempt": SPOT_TERMINATION,
    "Terminate": SCALE_DOWN,
    "Reboot": MAINTENANCE,
    "Redeploy": MAINTENANCE,
}


class ScheduledEvents:
    """The list of scheduled events, which is polled.

    Args:
        client: The client, which no other object uses.
        grace_period_s: Seconds that are assumed to be left if an event has started.
    """

    pause_s = POLL_S

    def __init__(self, client: MetadataClient, *, grace_period_s: float) -> None:
        self._client = client
        self._grace_period_s = grace_period_s
        self._vm: str | None = None
        self._timeout_s = _FIRST_TIMEOUT_S

    def look(self) -> Look:
        if self._vm is None:
            self._vm = read_name(self._client.request(NAME_PATH, HEADERS, timeout_s=READY_TIMEOUT_S))
        answer = self._client.request(EVENTS_PATH, HEADERS, timeout_s=self._timeout_s)
        text = expected_ok("scheduledevents", answer)
        self._timeout_s = READY_TIMEOUT_S
        return Look(read_events(text, self._vm, self._grace_period_s), answer.server_time_s)


def groups(new_client: Callable[[], MetadataClient], *, grace_period_s: float) -> list[WatchGroup]:
    """Returns the list of scheduled events, for one thread.

    Args:
        new_client: Makes a client.
        grace_period_s: Seconds that are assumed to be left if an event has started.
    """
    client = new_client()
    return [WatchGroup("azure", client, [ScheduledEvents(client, grace_period_s=grace_period_s)])]


def read_name(answer: MetadataResponse) -> str:
    """Returns the VM's name.

    Raises:
        MetadataError: The answer is not a name. It is checked because this process compares all later events with it.
    """
    name = expected_ok("compute/name", answer).strip()
    if not re.fullmatch(r"[\w.-]{1,80}", name):
        raise MetadataError(f"compute/name: expected the name of a VM, found {name[:120]!r}")
    return name


def read_events(text: str, vm: str, grace_period_s: float) -> Sequence[Event]:
    """Returns the events that name this VM.

    Args:
        text: The body of the answer.
        vm: The VM's name.
        grace_period_s: Seconds that are assumed to be left if an event has started.

    Raises:
        MetadataError: The text is not such a document.
    """
    document = parsed("scheduledevents", text)
    listed = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise MetadataError(f"scheduledevents: expected an object with a list of Events, found {text[:120]!r}")
    events = []
    for item in listed:
        kind = item.get("EventType")
        if not any(str(name).casefold() == vm.casefold() for name in item.get("Resources") or []):
            continue
        begins = item.get("NotBefore")
        events.append(
            Event(
                name=f"scheduledevents {kind} {item.get('EventId')}",
                cause=_CAUSES.get(kind, MAINTENANCE),
                lead_s=grace_period_s,
                starts_at_s=rfc2822_s("scheduledevents NotBefore", begins) if begins else None,
                cancelable=True,
                hint=kind not in _CAUSES,
            )
        )
    return events
