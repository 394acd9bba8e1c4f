"""Taints of devices: which pods they concern, when these pods will be gone, and until when the taints count."""

from __future__ import annotations

import pytest

from gracepoint_operator import signals
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.model.devices import Device, DeviceSelector
from gracepoint_operator.resources import SignalKind
from gracepoint_operator.signals import BUILT_IN, Row, Signal
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Body
from tests.unit.operator.fakes.scene import Scene

BROKEN = objects.taint("example.com/broken", "NoExecute", added_at=NOW)
SELECTOR = {"driver": "tpu.example.com", "pool": "node-1"}
SLICE = (kinds.RESOURCE_SLICES, objects.resource_slice(tpu_0=[BROKEN]))
RULE = (kinds.DEVICE_TAINT_RULES, objects.device_taint_rule(SELECTOR, BROKEN))


def using_devices(**claim: object) -> Scene:
    """A gang whose pods each have a device of their node."""
    scene = Scene()
    scene.listed(kinds.RESOURCE_CLAIMS, objects.resource_claim(0, **claim))  # type: ignore[arg-type]
    scene.listed(kinds.RESOURCE_CLAIMS, objects.resource_claim(1))
    for node in ("node-1", "node-2"):
        scene.listed(kinds.RESOURCE_SLICES, objects.resource_slice(node))
    return scene


def found(scene: Scene) -> list[Signal]:
    gang = scene.cache.gang(JOBSET_UID)
    return [signal for pod in gang.pods for signal in signals.of_pod(pod, gang.marks.get(pod.uid, ()))]


def tolerating(seconds: int | None = None, **fields: object) -> list[Body]:
    entry: Body = {"operator": "Exists", "effect": "NoExecute", **fields}
    return [entry if seconds is None else entry | {"tolerationSeconds": seconds}]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(*SLICE, id="by the driver, in a ResourceSlice"),
        pytest.param(*RULE, id="by an administrator, in a DeviceTaintRule"),
        pytest.param(kinds.DEVICE_TAINT_RULES, objects.device_taint_rule({}, BROKEN), id="in a rule for all devices"),
    ],
)
def test_taint_of_a_device_is_a_signal_for_pods_using_it(kind: kinds.Kind, body: Body) -> None:
    scene = using_devices()
    assert found(scene) == []
    assert scene.cache.put(kind, body, listed=False) == {JOBSET_UID}
    signal = found(scene)[0]
    assert (signal.kind, signal.cause, signal.cancelable) == (SignalKind.DEVICE_TAINT, "Hardware", True)
    assert signal.text == "taint example.com/broken:NoExecute of device tpu.example.com/node-1/tpu-0"
    assert signal.pod.uid == "uid-pod-0-0"
    spec = scene.start().spec
    assert (spec.cause, spec.deadline.timestamp()) == ("Hardware", NOW + 30)


@pytest.mark.parametrize(
    ("tolerations", "lead_s"),
    [
        pytest.param([], 30, id="none"),
        pytest.param(tolerating(), None, id="for good"),
        pytest.param(tolerating(600), 630, id="for some seconds"),
        pytest.param([*tolerating(600), *tolerating(60)], 90, id="twice, the shorter counts"),
        pytest.param([*tolerating(60), *tolerating()], None, id="twice, for good counts"),
        pytest.param(tolerating(600, key="example.com/other"), 30, id="another taint"),
        pytest.param(tolerating(600, effect=""), 30, id="no effect named, which Kubernetes does not count"),
        pytest.param(tolerating(-5), 30, id="for less than nothing"),
    ],
)
def test_tolerations_of_the_claim_say_when_pods_will_be_gone(tolerations: list[Body], lead_s: float | None) -> None:
    scene = using_devices(tolerations=tolerations)
    scene.seen(*SLICE)
    assert [signal.lead_s for signal in found(scene)] == ([] if lead_s is None else [lead_s])


@pytest.mark.parametrize("order", [("tpu-0", "tpu-1"), ("tpu-1", "tpu-0")], ids=["first", "last"])
def test_pod_goes_by_its_device_whose_taint_is_tolerated_least(order: tuple[str, str]) -> None:
    """One rule taints both of its devices."""
    scene = using_devices()
    tolerations = dict(zip(order, (tolerating(), tolerating(60)), strict=True))
    for device in ("tpu-0", "tpu-1"):
        scene.listed(kinds.RESOURCE_CLAIMS, objects.resource_claim(0, device=device, tolerations=tolerations[device]))
    scene.seen(*RULE)
    assert [signal.lead_s for signal in found(scene)] == [90]
    assert scene.start().spec.deadline.timestamp() == NOW + 90


def test_taint_for_good_tolerated_by_the_pod_still_counts() -> None:
    scene = using_devices()
    scene.seen(kinds.PODS, objects.pod(0, tolerations=[{"operator": "Exists"}]))
    scene.seen(*SLICE)
    assert len(found(scene)) == 1, "tolerations of pods are for taints of nodes"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(
            kinds.RESOURCE_SLICES,
            objects.resource_slice(tpu_0=[objects.taint("example.com/broken", "NoSchedule")]),
            id="that only keeps new pods away",
        ),
        pytest.param(kinds.RESOURCE_SLICES, objects.resource_slice(tpu_1=[BROKEN]), id="of another device"),
        pytest.param(kinds.RESOURCE_SLICES, objects.resource_slice("node-3", tpu_0=[BROKEN]), id="of another node"),
        pytest.param(
            kinds.RESOURCE_SLICES,
            objects.resource_slice(generation=0, name="old", tpu_0=[BROKEN]),
            id="in a slice of an older generation",
        ),
        pytest.param(
            kinds.DEVICE_TAINT_RULES, objects.device_taint_rule(None, BROKEN), id="in a rule without a selector"
        ),
        pytest.param(
            kinds.DEVICE_TAINT_RULES,
            objects.device_taint_rule({**SELECTOR, "device": "tpu-1"}, BROKEN),
            id="in a rule for another device",
        ),
    ],
)
def test_taint_concerns_nobody(kind: kinds.Kind, body: Body) -> None:
    scene = using_devices()
    scene.seen(kind, body)
    assert found(scene) == []
    assert scene.decisions() == []


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(objects.resource_claim(namespace="another"), id="of another namespace"),
        pytest.param(objects.resource_claim() | {"status": {}}, id="without devices"),
    ],
)
def test_claim_gives_a_pod_no_devices(claim: Body) -> None:
    scene = Scene()
    scene.listed(kinds.RESOURCE_CLAIMS, claim)
    scene.seen(*SLICE)
    assert found(scene) == []


@pytest.mark.parametrize(("kind", "body"), [pytest.param(*SLICE, id="slice"), pytest.param(*RULE, id="rule")])
def test_taint_that_goes_away_concerns_the_pods_once_more(kind: kinds.Kind, body: Body) -> None:
    scene = using_devices()
    scene.seen(kind, body)
    assert scene.cache.drop(body["metadata"]["uid"]) == {JOBSET_UID}
    assert found(scene) == []


def test_next_generation_of_a_pool_ends_the_taints_of_all_its_slices() -> None:
    scene = using_devices()
    scene.seen(*SLICE)
    newer = objects.resource_slice(generation=2, name="node-1-tpus-2")
    assert scene.cache.put(kinds.RESOURCE_SLICES, newer, listed=False) == {JOBSET_UID}
    assert found(scene) == []


def test_a_taint_stays_while_slices_of_the_next_generation_are_missing() -> None:
    scene = using_devices()
    names = ("node-1-tpus", "node-1-others")
    tainted, other = (
        objects.resource_slice(slices=2, name=name, tpu_0=taints)
        for name, taints in zip(names, ([BROKEN], []), strict=True)
    )
    scene.seen(kinds.RESOURCE_SLICES, tainted)
    scene.seen(kinds.RESOURCE_SLICES, other)
    assert len(found(scene)) == 1
    scene.seen(kinds.RESOURCE_SLICES, objects.resource_slice(slices=2, generation=2, name=names[1]))
    assert len(found(scene)) == 1, "the driver writes one slice after the other"
    scene.seen(kinds.RESOURCE_SLICES, objects.resource_slice(slices=2, generation=2, name=names[0]))
    assert found(scene) == []


def test_claim_that_is_known_after_the_taint_counts_too() -> None:
    scene = Scene()
    scene.seen(*SLICE)
    assert scene.cache.put(kinds.RESOURCE_CLAIMS, objects.resource_claim(), listed=False) == {JOBSET_UID}
    assert len(found(scene)) == 1
    assert scene.cache.drop("uid-claim-0-tpu-0") == {JOBSET_UID}
    assert found(scene) == []


def test_taint_that_a_device_had_when_the_pod_was_bound_starts_nothing() -> None:
    scene = using_devices(tolerations=tolerating(600))
    scene.clock.move(-200)  # the pods of the scene are bound at NOW - 99
    scene.seen(*SLICE)
    scene.clock.move(200)
    assert len(found(scene)) == 1
    assert scene.decisions() == []


@pytest.mark.parametrize(("kind", "body"), [pytest.param(*SLICE, id="slice"), pytest.param(*RULE, id="rule")])
def test_new_status_of_known_taints_concerns_nobody(kind: kinds.Kind, body: Body) -> None:
    scene = using_devices()
    scene.seen(kind, body)
    assert scene.cache.put(kind, body | {"status": {"conditions": []}}, listed=False) == set()
    assert len(found(scene)) == 1


def test_taints_elsewhere_are_not_compared_with_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gang may have thousands of devices, and rules stay until somebody deletes them."""
    scene = using_devices()
    scene.seen(kinds.RESOURCE_SLICES, objects.resource_slice("node-3", tpu_0=[BROKEN]))
    for number in range(3):
        rule = objects.device_taint_rule({"driver": "other.example.com"}, BROKEN)
        rule["metadata"] = {"name": f"rule-{number}", "uid": f"uid-rule-{number}"}
        scene.seen(kinds.DEVICE_TAINT_RULES, rule)
    compared: list[DeviceSelector] = []
    selects = DeviceSelector.selects

    def counted(selector: DeviceSelector, device: Device) -> bool:
        compared.append(selector)
        return selects(selector, device)

    monkeypatch.setattr(DeviceSelector, "selects", counted)
    assert found(scene) == []
    assert compared == []
    scene.seen(*SLICE)
    assert len(found(scene)) == 1


def test_news_without_taints_concern_nobody() -> None:
    scene = using_devices()
    later = objects.resource_slice(generation=2)
    assert scene.cache.put(kinds.RESOURCE_SLICES, later, listed=False) == set()
    assert scene.cache.put(kinds.RESOURCE_CLAIMS, objects.resource_claim(), listed=False) == set()


def row_of_a_user(key: str, confidence: str, deadline: Body) -> Row:
    return Row.model_validate(
        {
            "name": f"tpu-{key}",
            "provider": "us",
            "match": {"kind": "Device", "taint": {"key": f"example.com/{key}"}},
            "cause": "Hardware",
            "confidence": confidence,
            "cancelable": True,
            "deadline": deadline,
        }
    )


def test_users_rows_may_be_about_any_effect_of_a_device() -> None:
    row = row_of_a_user("degraded", "likely", {"afterSeconds": 300})
    scene = using_devices()
    scene.cache = ClusterCache(scene.clock, (row, *BUILT_IN))
    for index in (0, 1):
        scene.listed(kinds.PODS, objects.pod(index))
    scene.listed(kinds.RESOURCE_CLAIMS, objects.resource_claim(1))
    degraded = objects.taint("example.com/degraded", "None", added_at=NOW)
    scene.seen(kinds.RESOURCE_SLICES, objects.resource_slice("node-2", tpu_0=[degraded]))
    (signal,) = found(scene)
    assert (signal.pod.uid, signal.lead_s) == ("uid-pod-1-0", 300)


def test_value_of_one_taint_that_is_no_time_hides_no_other() -> None:
    deadline: Body = {"time": {"format": "JSON", "jsonFields": ["at"]}, "afterSeconds": 300}
    row = row_of_a_user("repair", "sure", deadline)
    scene = using_devices()
    scene.cache = ClusterCache(scene.clock, (row, *BUILT_IN))
    scene.listed(kinds.PODS, objects.pod(0))
    scene.listed(kinds.RESOURCE_CLAIMS, objects.resource_claim(0))
    repair = objects.taint("example.com/repair", "None", added_at=NOW) | {"value": "soon"}
    scene.seen(kinds.RESOURCE_SLICES, objects.resource_slice(tpu_0=[repair, BROKEN]))
    assert sorted(signal.lead_s for signal in found(scene)) == [30, 300]
    assert scene.cache.unreadable_objects.objects(kinds.RESOURCE_SLICES) == {}
