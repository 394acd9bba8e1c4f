"""Google Compute Engine: three keys of the instance, each watched with a request that waits for a change.

``instance/preempted`` is FALSE, then TRUE. 30 s later the VM ends (cloud.google.com/compute/docs/instances/spot,
"preemption process"). GKE's kubelet gives user pods 15 s of them by default, whatever their grace period
(cloud.google.com/kubernetes-engine/docs/concepts/spot-vms). In a pod, these 15 s count.
An instance with ``scheduling.preemptionNoticeDuration`` (120 s) becomes TRUE that much earlier, which no key tells
(github.com/cloudpilot-ai/karpenter-provider-gcp/pull/563). So it is a setting, ``gce_notice_s``.

``instance/maintenance-event`` is NONE, then MIGRATE_ON_HOST_MAINTENANCE (live migration, which pauses the VM) or
TERMINATE_ON_HOST_MAINTENANCE. The latter comes 60 s ahead (cloud.google.com/compute/docs/metadata/
getting-live-migration-notice), with GPUs one hour ahead (cloud.google.com/compute/docs/gpus/gpu-host-maintenance). The
answer does not say which applies, so 60 s are assumed. With GPUs the job may leave up to an hour early.

``instance/upcoming-maintenance?alt=json`` is an object with ``window_start_time``, ``maintenance_status`` and others,
in snake or camel case (cloud.google.com/compute/docs/instances/monitor-plan-host-maintenance-event). The start of the
window is the earliest time of the maintenance. If nothing is planned, documents and servers differ: ``NONE``, ``{}``,
an object with ``error``, HTTP 503, and 404 on machines that have no such notice. The window does not matter to a VM
that is live-migrated (``instance/scheduling/on-host-maintenance``).

Waiting (cloud.google.com/compute/docs/metadata/querying-metadata): with ``wait_for_change=true`` the server answers
when the value differs from that of ``last_etag``, or when ``timeout_sec`` is over. Every request needs the header
``Metadata-Flavor: Google``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gracepoint.receivers.metadata.source import (
    MAINTENANCE,
    READY_TIMEOUT_S,
    SPOT_TERMINATION,
    Event,
    Look,
    MetadataClient,
    MetadataError,
    MetadataResponse,
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

#: Seconds after which the server answers without a change. A longer time only means fewer requests.
_WAIT_S = 60
#: Pause between an answer and the next request, for a server that does not wait for changes (such as GKE's).
_PAUSE_S = 1.0
#: Pause if the server has no value to wait on. A maintenance window is announced long before it begins.
_WITHOUT_VALUE_PAUSE_S = 15.0


class Key:
    """One key, watched with requests that wait for a change.

    Args:
        client: The client, which only the sources of this key's thread use.
        path: The path below ``/computeMetadata/v1/``, with the query that it needs.
        read: Reads the events from the body of an answer.
        unset: HTTP statuses that mean that there is no value.
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
        self._etag = answer.headers.get("etag")  # not set if reading failed, so the next request gets the value again
        return Look(events, answer.server_time_s)

    def _ask(self) -> MetadataResponse:
        if self._etag is None:
            return self._client.request(ROOT + self._path, HEADERS, timeout_s=READY_TIMEOUT_S)
        joint = "&" if "?" in self._path else "?"
        wait = f"{joint}wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={self._etag}"
        return self._client.request(ROOT + self._path + wait, HEADERS, timeout_s=_WAIT_S + READY_TIMEOUT_S)


def groups(new_client: Callable[[], MetadataClient], *, preempted_s: float, grace_period_s: float) -> list[WatchGroup]:
    """Returns the three keys, each for its own thread, because each request waits.

    Args:
        new_client: Makes a client.
        preempted_s: Seconds that are left when ``preempted`` becomes TRUE.
        grace_period_s: Seconds that are assumed to be left if a maintenance has begun.
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
    """Returns the events of ``instance/preempted``.

    Raises:
        MetadataError: The text is neither TRUE nor FALSE.
    """
    value = text.strip()
    if value not in {"TRUE", "FALSE"}:
        raise MetadataError(f"instance/preempted: expected TRUE or FALSE, found {value[:40]!r}")
    return [Event(name="instance/preempted", cause=SPOT_TERMINATION, lead_s=preempted_s)] if value == "TRUE" else []


def read_maintenance_event(text: str) -> Sequence[Event]:
    """Returns the events of ``instance/maintenance-event``.

    Raises:
        MetadataError: The text is not one of the three values.
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
    """Returns the events of ``instance/upcoming-maintenance?alt=json``.

    Args:
        text: The body of the answer.
        is_migrated: Returns whether this VM is live-migrated. Only called if maintenance is planned.
        grace_period_s: Seconds that are assumed to be left if the maintenance has begun.

    Raises:
        MetadataError: The text is not such an object.
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
    """Returns the notice with names in one case. Some servers wrap the notice in an object of one field."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(inner := next(iter(value.values())), dict):
        value = inner
    if not isinstance(value, dict):
        raise MetadataError(f"instance/upcoming-maintenance: expected an object, found {str(value)[:120]!r}")
    return {name.replace("_", "").lower(): item for name, item in value.items()}


def _is_migrated(client: MetadataClient) -> bool:
    path = "instance/scheduling/on-host-maintenance"
    return expected_ok(path, client.request(ROOT + path, HEADERS, timeout_s=READY_TIMEOUT_S)).strip() == "MIGRATE"
