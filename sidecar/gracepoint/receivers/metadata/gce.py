"""Google Compute Engine: three keys of the instance, each waited on in a request of its own.

``instance/preempted`` says FALSE, then TRUE: the VM ends 30 s later (cloud.google.com/compute/docs/instances/spot,
"preemption process"). GKE's kubelet leaves user pods 15 s of them by default, whatever their grace period
(cloud.google.com/kubernetes-engine/docs/concepts/spot-vms), which is what counts in a pod.

``instance/maintenance-event`` says NONE, then MIGRATE_ON_HOST_MAINTENANCE (the VM is moved alive: a pause, no end) or
TERMINATE_ON_HOST_MAINTENANCE. That comes 60 s ahead (cloud.google.com/compute/docs/metadata/
getting-live-migration-notice), with GPUs an hour (cloud.google.com/compute/docs/gpus/gpu-host-maintenance).
Nothing in the answer tells which, so the shorter is taken: with GPUs the job moves up to an hour early.

``instance/upcoming-maintenance?alt=json`` is an object with ``window_start_time``, ``maintenance_status`` and others,
in snake or camel case (cloud.google.com/compute/docs/instances/monitor-plan-host-maintenance-event); the window's
start is the earliest time of the maintenance. Where nothing is planned the documents and servers differ: ``NONE``,
``{}``, an object with ``error``, HTTP 503, and 404 on machines that have no such notice. A VM that is migrated alive
(``instance/scheduling/on-host-maintenance``) has nothing to fear of the window.

Waiting (cloud.google.com/compute/docs/metadata/querying-metadata): ``wait_for_change=true`` holds the answer back
until the value is another than that of ``last_etag``, or ``timeout_sec`` is over. Every request needs
``Metadata-Flavor: Google``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gracepoint.receivers.metadata.board import Event, Look
from gracepoint.receivers.metadata.client import MetadataClient, MetadataError, MetadataResponse
from gracepoint.receivers.metadata.source import (
    MAINTENANCE,
    READY_TIMEOUT_S,
    SPOT_TERMINATION,
    WatchGroup,
    expected_ok,
    parsed,
    rfc3339_s,
)

HEADERS = {"Metadata-Flavor": "Google"}
ROOT = "/computeMetadata/v1/"
PREEMPTED_VM_S = 30.0
PREEMPTED_POD_S = 15.0
MAINTENANCE_EVENT_S = 60.0

#: How long the server may hold a request; longer only means fewer requests.
_WAIT_S = 60
#: Between an answer and the next request: for a server (GKE's own, say) that does not wait for changes.
_PAUSE_S = 1.0
#: Where nothing is waited on, as the server had no value; a window is announced long before.
_WITHOUT_VALUE_PAUSE_S = 15.0


class Key:
    """One key, waited on.

    Args:
        client: Its own.
        path: Below ``/computeMetadata/v1/``, with the query it needs.
        read: From the answer to the events.
        unset: Statuses that say that there is no value.
    """

    def __init__(
        self,
        client: MetadataClient,
        path: str,
        read: Callable[[str], Sequence[Event]],
        unset: frozenset[int] = frozenset(),
    ) -> None:
        self._client = client
        self._path = path
        self._read = read
        self._unset = unset
        self._etag: str | None = None

    @property
    def pause_s(self) -> float:
        return _PAUSE_S if self._etag is not None else _WITHOUT_VALUE_PAUSE_S

    def look(self) -> Look:
        answer = self._ask()
        if answer.status in self._unset:
            self._etag = None
            return Look((), answer.server_time_s)
        events = self._read(expected_ok(self._path, answer))
        self._etag = answer.headers.get("etag")  # only of what was understood: else the next request tells it again
        return Look(events, answer.server_time_s)

    def _ask(self) -> MetadataResponse:
        if self._etag is None:
            return self._client.request(ROOT + self._path, HEADERS, timeout_s=READY_TIMEOUT_S)
        joint = "&" if "?" in self._path else "?"
        wait = f"{joint}wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={self._etag}"
        return self._client.request(ROOT + self._path + wait, HEADERS, timeout_s=_WAIT_S + READY_TIMEOUT_S)


def groups(new_client: Callable[[], MetadataClient], *, preempted_s: float, grace_period_s: float) -> list[WatchGroup]:
    """The three keys, each on its own, as each is waited on.

    Args:
        new_client: Makes a client.
        preempted_s: What is left after ``preempted``.
        grace_period_s: What is assumed to be left of a maintenance that has begun.
    """
    preempted, maintenance, upcoming = new_client(), new_client(), new_client()

    def read_upcoming(text: str) -> Sequence[Event]:
        return read_upcoming_maintenance(text, lambda: _is_migrated(upcoming), grace_period_s)

    return [
        WatchGroup(
            "gce-preempted",
            preempted,
            [Key(preempted, "instance/preempted", lambda text: read_preempted(text, preempted_s))],
        ),
        WatchGroup(
            "gce-maintenance-event",
            maintenance,
            [Key(maintenance, "instance/maintenance-event", read_maintenance_event)],
        ),
        WatchGroup(
            "gce-upcoming-maintenance",
            upcoming,
            [Key(upcoming, "instance/upcoming-maintenance?alt=json", read_upcoming, unset=frozenset({404, 503}))],
        ),
    ]


def read_preempted(text: str, preempted_s: float) -> Sequence[Event]:
    """Events of ``instance/preempted``.

    Raises:
        MetadataError: It says neither TRUE nor FALSE.
    """
    value = text.strip()
    if value not in {"TRUE", "FALSE"}:
        raise MetadataError(f"instance/preempted: expected TRUE or FALSE, found {value[:40]!r}")
    return [Event(name="instance/preempted", cause=SPOT_TERMINATION, lead_s=preempted_s)] if value == "TRUE" else []


def read_maintenance_event(text: str) -> Sequence[Event]:
    """Events of ``instance/maintenance-event``.

    Raises:
        MetadataError: It says none of the three words.
    """
    value = text.strip()
    if value == "NONE":
        return []
    hint = value == "MIGRATE_ON_HOST_MAINTENANCE"
    if not hint and value != "TERMINATE_ON_HOST_MAINTENANCE":
        raise MetadataError(
            f"instance/maintenance-event: expected NONE, MIGRATE_ON_HOST_MAINTENANCE or "
            f"TERMINATE_ON_HOST_MAINTENANCE, found {value[:40]!r}"
        )
    name = f"instance/maintenance-event {value}"
    return [Event(name=name, cause=MAINTENANCE, lead_s=MAINTENANCE_EVENT_S, cancelable=True, hint=hint)]


def read_upcoming_maintenance(text: str, is_migrated: Callable[[], bool], grace_period_s: float) -> Sequence[Event]:
    """Events of ``instance/upcoming-maintenance?alt=json``.

    Args:
        text: The body.
        is_migrated: Tells whether this VM is moved alive; only asked if something is planned.
        grace_period_s: What is assumed where the maintenance has begun.

    Raises:
        MetadataError: It is no such object.
    """
    path = "instance/upcoming-maintenance"
    if text.strip() in {"", "NONE"}:
        return []
    value = parsed(path, text)
    if value == "NONE" or (isinstance(value, dict) and (not value or "error" in value)):
        return []
    notice = _normalized(value)
    if notice.get("maintenancestatus") == "COMPLETE":
        return []
    start_s = rfc3339_s(f"{path} windowStartTime", notice.get("windowstarttime"))
    return [
        Event(
            name=path,
            cause=MAINTENANCE,
            lead_s=grace_period_s,
            starts_at_s=None if notice.get("maintenancestatus") == "ONGOING" else start_s,
            cancelable=True,
            hint=is_migrated(),
        )
    ]


def _normalized(value: Any) -> dict[str, Any]:
    """The notice with names in one case; some servers wrap it in an object of one field."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(inner := next(iter(value.values())), dict):
        value = inner
    if not isinstance(value, dict):
        raise MetadataError(f"instance/upcoming-maintenance: expected an object, found {str(value)[:120]!r}")
    return {name.replace("_", "").lower(): item for name, item in value.items()}


def _is_migrated(client: MetadataClient) -> bool:
    path = "instance/scheduling/on-host-maintenance"
    return expected_ok(path, client.request(ROOT + path, HEADERS, timeout_s=READY_TIMEOUT_S)).strip() == "MIGRATE"
