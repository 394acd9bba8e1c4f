"""Devices of dynamic resource allocation (resource.k8s.io/v1): which pods use them, and which have taints. Pure.

The scheduler allocates devices to a ResourceClaim, and reserves the claim for pods. A driver writes taints of its
devices into ResourceSlices, and an administrator writes one for many devices into a DeviceTaintRule. Kubernetes deletes
the pods whose devices have a NoExecute taint, at once or after the seconds that the claim tolerates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gracepoint_operator.kube.objects import Toleration, object_name, optional_number, shared, text
from gracepoint_operator.read_errors import reading
from gracepoint_operator.signals import Mark

#: Reads the marks of the catalogue on an object whose ``spec.taints`` are the taints of a device.
ReadMarks = Callable[[Mapping[str, Any]], tuple[Mark, ...]]

#: Only tolerations that name this effect delay the deletion.
_NO_EXECUTE = "NoExecute"


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A device.

    Attributes:
        pool: Name of the pool. Often the name of the node.
    """

    driver: str
    pool: str
    name: str

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}/{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """A device of a claim.

    Attributes:
        tolerations: The tolerations of the claim for NoExecute taints of this device. The first that matches counts.
    """

    device: Device
    tolerations: tuple[Toleration, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimedDevices:
    """A ResourceClaim.

    Attributes:
        pod_uids: UIDs of the pods that it is reserved for.
        devices: The devices that are allocated to it.
    """

    namespace: str
    uid: str
    pod_uids: tuple[str, ...]
    devices: tuple[AllocatedDevice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSelector:
    """The devices that a taint is for. None: any driver, pool or name."""

    driver: str | None = None
    pool: str | None = None
    name: str | None = None

    def selects(self, device: Device) -> bool:
        return self.may_select(device.driver, device.pool) and self.name in (None, device.name)

    def may_select(self, driver: str, pool: str) -> bool:
        """Returns whether it can select devices of a pool."""
        return self.driver in (None, driver) and self.pool in (None, pool)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceTaints:
    """The taints of devices in a ResourceSlice or a DeviceTaintRule.

    Attributes:
        uid: UID of that object.
        pool: Driver and pool of a ResourceSlice. None for a DeviceTaintRule.
        generation: Generation of the pool. Only the slices of the highest generation count, once there are all of them.
            0 for a DeviceTaintRule.
        taints: The marks of the catalogue, each with the devices that have the taint.
        slices: Number of slices of the pool in this generation. 0 for a DeviceTaintRule.
    """

    uid: str
    pool: tuple[str, str] | None
    generation: int
    taints: tuple[tuple[DeviceSelector, Mark], ...]
    slices: int = 0


def read_claim(body: Mapping[str, Any]) -> ClaimedDevices:
    """Reads a ResourceClaim.

    Raises:
        Unreadable: It is not one.
    """
    with reading("a ResourceClaim"):
        meta, status = body["metadata"], body.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        reserved = [item for item in status.get("reservedFor") or () if item["resource"] == "pods"]
        return ClaimedDevices(
            namespace=shared(text(meta["namespace"])),
            uid=text(meta["uid"]),
            pod_uids=tuple(text(item["uid"]) for item in reserved if not item.get("apiGroup")),
            devices=tuple(
                AllocatedDevice(
                    _device(item["driver"], item["pool"], item["device"]), tuple(_tolerations(item.get("tolerations")))
                )
                for item in results
            ),
        )


def read_slice(body: Mapping[str, Any], marks: ReadMarks) -> DeviceTaints:
    """Reads a ResourceSlice.

    Raises:
        Unreadable: It is not one.
    """
    with reading("a ResourceSlice"):
        meta, spec = body["metadata"], body["spec"]
        driver, pool = shared(object_name(spec["driver"])), shared(object_name(spec["pool"]["name"]))
        taints = [
            (DeviceSelector(driver, pool, text(device["name"])), mark)
            for device in spec.get("devices") or ()
            if device.get("taints")
            for mark in marks({"metadata": meta, "spec": {"taints": device["taints"]}})
        ]
        generation = int(optional_number(spec["pool"].get("generation"), 0))
        slices = int(optional_number(spec["pool"].get("resourceSliceCount"), 0))
        return DeviceTaints(text(meta["uid"]), (driver, pool), generation, tuple(taints), slices)


def read_rule(body: Mapping[str, Any], marks: ReadMarks) -> DeviceTaints:
    """Reads a DeviceTaintRule.

    Raises:
        Unreadable: It is not one.
    """
    with reading("a DeviceTaintRule"):
        meta, spec = body["metadata"], body["spec"]
        selector_fields = spec.get("deviceSelector")
        if selector_fields is None:  # selects nothing, while an empty selector selects everything
            return DeviceTaints(text(meta["uid"]), None, 0, ())
        selector = DeviceSelector(*(selector_fields.get(field) for field in ("driver", "pool", "device")))
        taint_marks = marks({"metadata": meta, "spec": {"taints": [spec["taint"]]}})
        return DeviceTaints(text(meta["uid"]), None, 0, tuple((selector, mark) for mark in taint_marks))


def _device(driver: Any, pool: Any, name: Any) -> Device:
    device: Device = shared(Device(shared(text(driver)), shared(text(pool)), shared(text(name))))
    return device


def _tolerations(entries: Any) -> Iterator[Toleration]:
    """Yields the tolerations that delay a deletion, in the order in which they count.

    As in pkg/controller/devicetainteviction of Kubernetes: those without an effect do not count, one without seconds
    prevents the deletion, and of several the one with the fewest seconds counts.
    """
    tolerations = [
        Toleration(
            key=text(item.get("key") or ""),
            operator=text(item.get("operator") or "Equal"),
            value=text(item.get("value") or ""),
            effect=_NO_EXECUTE,
            seconds=optional_number(item.get("tolerationSeconds"), None),
        )
        for item in entries or ()
        if item.get("effect") == _NO_EXECUTE
    ]
    yield from sorted(tolerations, key=lambda item: (item.seconds is not None, item.seconds or 0.0))
