"""Objects that are stored in a real API server while the operator and its CRDs are upgraded and rolled back."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint.wire import names
from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator.cache.cluster_cache import CacheReader, ClusterCache
from gracepoint_operator.decisions.decide import Answer
from gracepoint_operator.decisions.policy_conditions import PodRights
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.recording.preemption_writer import RequestWriter
from gracepoint_operator.recording.replica_lease import ReplicaLease
from gracepoint_operator.resources import CheckpointPolicy, RequestPhase, RequestStatus, SignalKind
from gracepoint_operator.resources.crds import definitions
from tests.testcluster.api_server import open_api_server, why_not

pytestmark = pytest.mark.timeout(240)

Json = dict[str, Any]
NAMESPACE = "default"
CRDS = objects.CRDS
OLD_CRDS = Path(__file__).parent / "stored" / "0.2"
OLD_POLICIES = objects.POLICIES.of_version(f"{names.GROUP}/{names.OLD_API_VERSION}")
OLD_PREEMPTIONS = objects.PREEMPTIONS.of_version(f"{names.GROUP}/{names.OLD_API_VERSION}")
WAIT_S = 30.0


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeClient]:
    if reason := why_not():
        pytest.skip(reason)
    with open_api_server(tmp_path_factory.mktemp("api-server")) as server:
        connected = KubeClient.connect(str(server.kubeconfig))
        yield connected
        connected.close()


def newer() -> dict[str, Json]:
    """The CRDs of a version that is to come: more values, and more fields."""
    made = copy.deepcopy(definitions())
    for crd in made.values():
        for version in crd["spec"]["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            _extend(schema)
            schema["properties"]["spec"]["properties"]["ofTomorrow"] = {"type": "string"}
    return made


def of_02() -> dict[str, Json]:
    """The CRDs of version 0.2, which had v1alpha1 alone."""
    return {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(OLD_CRDS.iterdir())}


def _extend(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _extend(item)
    elif isinstance(node, dict):
        if isinstance(node.get("enum"), list):
            node["enum"] = [*node["enum"], "OfTomorrow"]
        for value in node.values():
            _extend(value)


async def install(api: KubeClient, crds: dict[str, Json]) -> None:
    for crd in crds.values():
        name = crd["metadata"]["name"]
        try:
            found = await api.get(CRDS, None, name)
        except client.NotFound:
            await api.create(CRDS, None, crd)
        else:
            version = {"resourceVersion": found["metadata"]["resourceVersion"]}
            await api.merge(CRDS, None, name, {"metadata": version, "spec": crd["spec"]})


async def until_true(holds: Any, what: str) -> None:
    """Waits for what the API server does some time after a CRD has changed."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not await holds():  # noqa: ASYNC110  the API server tells nobody
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"waited {WAIT_S:.0f} s for: {what}") from None


def policy(name: str, **spec: Any) -> Json:
    return {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"checkpoint": {"directory": "/checkpoints/{jobset}"}, **spec},
    }


def record(name: str, **spec: Any) -> Json:
    now = "2026-01-02T03:04:05.678901Z"
    return {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "Preemption",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "jobSet": {"name": "llm", "uid": "u-1"},
            "epoch": 1,
            "cause": "SpotTermination",
            "signal": "a taint",
            "confidence": "sure",
            "cancelable": False,
            "observedAt": now,
            "deadline": now,
            "mode": "Enforce",
            "exits": True,
            "policy": {"name": "p", "spec": {}},
            **spec,
        },
    }


async def created(api: KubeClient, kind: objects.Kind, body: Json) -> bool:
    try:
        await api.create(kind, NAMESPACE, body)
    except (client.Refused, client.NotFound):
        return False
    return True


def test_objects_of_0_2_are_read_and_written_after_an_upgrade_and_after_its_rollback(api: KubeClient) -> None:
    asyncio.run(_from_0_2_and_back(api))


async def _from_0_2_and_back(api: KubeClient) -> None:
    await install(api, of_02())
    old = {"apiVersion": OLD_POLICIES.api_version}
    await until_true(lambda: created(api, OLD_POLICIES, policy("of-02") | old), "the CRD of policies of 0.2")
    await until_true(lambda: created(api, OLD_PREEMPTIONS, record("of-02") | old), "the CRD of Preemptions of 0.2")
    await api.merge_status(OLD_PREEMPTIONS, NAMESPACE, "of-02", {"status": {"phase": "Frozen"}})
    assert await created(api, OLD_PREEMPTIONS, request_of_02("asked"))

    await install(api, definitions())
    await until_true(lambda: served(api, objects.PREEMPTIONS), "v1beta1 to be served")
    assert CheckpointPolicy.of(await api.get(objects.POLICIES, NAMESPACE, "of-02")).unknown == ()
    await api.merge(objects.PREEMPTIONS, NAMESPACE, "of-02", {"spec": {"signal": "another taint", "moves": 1}})
    await api.merge_status(objects.PREEMPTIONS, NAMESPACE, "of-02", {"status": {"phase": "Committed"}})
    assert PreemptionRecord.of(await api.get(objects.PREEMPTIONS, NAMESPACE, "of-02")).phase is Phase.COMMITTED
    assert await created(api, objects.POLICIES, policy("after"))
    await _request_of_02_is_answered_and_withdrawn(api)

    # A rollback takes v1beta1 away. The API server lets it go only if nothing was stored in it.
    await install(api, of_02())
    await until_true(lambda: unserved(api, objects.PREEMPTIONS), "v1beta1 not to be served any more")
    found = await api.get(OLD_PREEMPTIONS, NAMESPACE, "of-02")
    assert (found["spec"]["signal"], found["status"]["phase"]) == ("another taint", "Committed")
    assert (await api.get(OLD_POLICIES, NAMESPACE, "after"))["apiVersion"] == OLD_POLICIES.api_version
    for kind in (OLD_POLICIES, OLD_PREEMPTIONS):
        for body in (await api.list(kind)).items:
            await api.delete(kind, body)


def request_of_02(name: str) -> Json:
    spec = {"jobSet": {"name": "llm"}, "deadlineSeconds": 3600, "mode": "Drill"}
    return record(name) | {"apiVersion": OLD_PREEMPTIONS.api_version, "spec": spec}


async def _request_of_02_is_answered_and_withdrawn(api: KubeClient) -> None:
    """One that is stored counts as before. None is made any more, in no version."""
    found = CacheReader(()).read(objects.PREEMPTIONS, await api.get(objects.PREEMPTIONS, NAMESPACE, "asked"))
    assert found is not None
    assert isinstance(found.value, RequestRecord)
    assert (found.value.spec.deadline_seconds, found.value.spec.mode) == (3600, Mode.DRILL)
    writer = RequestWriter(api, Metrics(), 0.05)
    writer.answer(Answer(found.value, RequestStatus(phase=RequestPhase.SUPERSEDED, message="no pod runs")))
    await writer.close(5.0)
    body = await api.get(objects.PREEMPTIONS, NAMESPACE, "asked")
    assert body["status"]["phase"] == "Superseded"
    await api.merge(objects.PREEMPTIONS, NAMESPACE, "asked", {"spec": {"retracted": True}})
    for kind, spec in ((OLD_PREEMPTIONS, {}), (objects.PREEMPTIONS, {"signal": "half a record"})):
        body = request_of_02("again") | {"apiVersion": kind.api_version}
        body["spec"] |= spec
        with pytest.raises(client.Refused, match=r"create a PreemptionRequest \(gracepoint.dev/v1beta1\)"):
            await api.create(kind, NAMESPACE, body)
    with pytest.raises(client.Refused, match="epoch"):
        await api.merge(objects.PREEMPTIONS, NAMESPACE, "asked", {"spec": record("x")["spec"]})


async def served(api: KubeClient, kind: objects.Kind) -> bool:
    try:
        await api.list(kind)
    except client.NotFound:
        return False
    return True


async def unserved(api: KubeClient, kind: objects.Kind) -> bool:
    return not await served(api, kind)


def test_who_uses_the_old_version_gets_a_warning_that_names_the_new_one() -> None:
    for crd in definitions().values():
        for version in crd["spec"]["versions"]:
            if version["name"] == names.OLD_API_VERSION:
                assert "write apiVersion: gracepoint.dev/v1beta1" in version["deprecationWarning"]


def test_after_a_rollback_objects_of_both_versions_are_read_and_written(api: KubeClient) -> None:
    asyncio.run(_install_upgrade_and_roll_back(api))


def test_what_the_operator_writes_is_known_to_be_its_own(api: KubeClient) -> None:
    async def managers() -> set[str]:
        await install(api, definitions())
        await until_true(lambda: created(api, objects.POLICIES, policy("owned")), "the CRD of policies")
        await api.merge_status(objects.POLICIES, NAMESPACE, "owned", {"status": {"observedGeneration": 1}})
        body = await api.get(objects.POLICIES, NAMESPACE, "owned")
        await api.delete(objects.POLICIES, body)
        return {entry["manager"] for entry in body["metadata"]["managedFields"]}

    assert asyncio.run(managers()) == {"gracepoint-operator"}


async def _install_upgrade_and_roll_back(api: KubeClient) -> None:
    await install(api, definitions())
    await until_true(lambda: created(api, objects.POLICIES, policy("old")), "the CRD of policies")
    await until_true(lambda: created(api, objects.PREEMPTIONS, record("old")), "the CRD of Preemptions")

    # Nothing names kinds of signals for a user who did not.
    stored = await api.get(objects.POLICIES, NAMESPACE, "old")
    assert "signals" not in stored["spec"]
    for wrong in ({"mode": "OfTomorrow"}, {"signals": ["OfTomorrow"]}, {"cloudMetadata": ["OfTomorrow"]}):
        with pytest.raises(client.Refused, match="Unsupported value"):
            await api.create(objects.POLICIES, NAMESPACE, policy("wrong", **wrong))

    await install(api, newer())
    tomorrow = policy("new", mode="OfTomorrow", signals=["NodeTaint", "OfTomorrow"], ofTomorrow="x")
    await until_true(lambda: created(api, objects.POLICIES, tomorrow), "the newer CRD of policies")
    later = record("new", mode="OfTomorrow", confidence="OfTomorrow", ofTomorrow="x")
    await until_true(lambda: created(api, objects.PREEMPTIONS, later), "the newer CRD of Preemptions")
    await api.merge_status(objects.PREEMPTIONS, NAMESPACE, "new", {"status": {"phase": "OfTomorrow"}})

    # The operator before the CRDs, as whoever rolls back the Deployment alone has it; then both.
    await _read_and_written(api, {"spec.mode: 'OfTomorrow'", "spec.signals: 'OfTomorrow'", "spec.ofTomorrow"})
    await install(api, definitions())

    async def pruned() -> bool:
        return "ofTomorrow" not in (await api.get(objects.POLICIES, NAMESPACE, "new"))["spec"]

    await until_true(pruned, "the older CRD")
    await _read_and_written(api, {"spec.mode: 'OfTomorrow'", "spec.signals: 'OfTomorrow'"})
    with pytest.raises(client.Refused, match="Unsupported value"):
        await api.create(objects.POLICIES, NAMESPACE, policy("wrong", mode="OfTomorrow"))


async def _read_and_written(api: KubeClient, unknown: set[str]) -> None:
    policies = {body["metadata"]["name"]: body for body in (await api.list(objects.POLICIES)).items}
    read = {name: CheckpointPolicy.of(body) for name, body in policies.items()}
    assert set(read) == {"old", "new"}
    assert all(read["old"].spec.counts(kind) for kind in SignalKind)
    assert read["old"].unknown == ()
    assert set(read["new"].unknown) == unknown
    assert (read["new"].spec.mode, read["new"].spec.signals) == (Mode.ENFORCE, [SignalKind.NODE_TAINT])

    records = {
        body["metadata"]["name"]: PreemptionRecord.of(body) for body in (await api.list(objects.PREEMPTIONS)).items
    }
    assert set(records) == {"old", "new"}
    assert (records["new"].spec.mode, records["new"].phase) == (Mode.OBSERVE, Phase.FAILED)

    # Written, too: the API server lets pass what is wrong in a stored object and does not change.
    cache = ClusterCache(time.time)
    for body in policies.values():
        cache.put(objects.POLICIES, body, listed=True)
    lease = ReplicaLease(api, time.time, "replica-a", NAMESPACE, view_age_s=lambda: 0.0)
    recorder = PolicyWriter(api, cache, lease, Metrics(), time.time, 0.05, PodRights())
    for name in policies:
        recorder.touch(NAMESPACE, name)

    async def said() -> bool:
        body = await api.get(objects.POLICIES, NAMESPACE, "new")
        ready = [item for item in body.get("status", {}).get("conditions", []) if item["type"] == "Ready"]
        return bool(ready) and ready[0]["status"] == "True" and all(item in ready[0]["message"] for item in unknown)

    await until_true(said, "Ready to name what is not understood")
    await recorder.close(5.0)
    await api.merge_status(objects.PREEMPTIONS, NAMESPACE, "new", {"status": {"message": "read by an older operator"}})
    assert (await api.get(objects.PREEMPTIONS, NAMESPACE, "new"))["status"]["phase"] == "OfTomorrow"
