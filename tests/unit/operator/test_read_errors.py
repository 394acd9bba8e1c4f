"""Whatever stands in objects, messages and webhook calls, a reader gives what it read, or raises its one error."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gracepoint.errors import WireError
from gracepoint.wire.frames import Frame, Hello, Notice
from gracepoint.wire.messages import Acknowledgement, Confidence, Forecast, Message, Mode, Phase, Report, Resumption
from gracepoint.wire.names import Env
from gracepoint_operator import signals
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.decisions.decide import decide
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import read_node, read_taint
from gracepoint_operator.model import evictions
from gracepoint_operator.model.devices import read_claim, read_rule, read_slice
from gracepoint_operator.model.evictions import Hold
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.model.preemption_record import RequestRecord as Asked
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, PreemptionRequest
from gracepoint_operator.signals import BUILT_IN, On
from gracepoint_operator.webhooks import Admission, AdmissionSettings, InstalledApi, routes
from gracepoint_operator.webhooks.routes import AdmissionRequest, NotAnAdmissionReview
from gracepoint_operator.workloads import JOBSETS, LONE_JOBS, JobSetType, JobType, read_job, read_pod
from tests.hypothesis_profiles import examples
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID, Body, stamp
from tests.unit.operator.fakes.replica import report, subscription
from tests.unit.operator.fakes.scene import Scene

#: What stands where something else is expected, or is more than anybody expects.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**63, -(2**63) - 1, 10**30, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", "x", "0", "-1", "nan", "inf", "1e400", "9" * 5000, "٣", "True", "[" * 50_000, '{"a":' * 20_000),
    *("2026-13-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-03-01", "72000000h"),
    *('{"windowStartTime": 1e400}', '{"windowStartTime": "soon"}', '{"startTimeWindow": []}', "\x00", "\ud800"),
    *([], {}, [[]], [None], [{}], {"": None}, {"type": "Ready"}, {"metadata": None}),
]
JSON = st.recursive(
    st.sampled_from(ODD) | st.text(max_size=8) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MANY = settings(
    deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """The valid value with one to three of its parts replaced or taken away."""
    made = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        here = made
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(here[key], dict | list) and here[key] and draw(st.integers(0, 3)):
                here = here[key]
                continue
            if draw(st.integers(0, 4)) == 0:
                del here[key]
            else:
                here[key] = copy.deepcopy(draw(st.sampled_from(ODD) | JSON))
            break
    return made


def refusal(kind: type[Exception], read: Callable[[], object]) -> str:
    """What the declared error says; empty where there was none."""
    try:
        read()
    except kind as error:
        return str(error)
    return ""


@st.composite
def odd(draw: st.DrawFn, valid: tuple[Body, ...]) -> Any:
    """Anything, or a valid object that was changed."""
    if draw(st.integers(0, 5)) == 0:
        return draw(JSON)
    return mutated(draw, draw(st.sampled_from(valid)))


def of_node() -> tuple[Body, ...]:
    node = objects.node(
        taints=[objects.taint(added_at=objects.NOW)],
        written_at=objects.NOW,
        annotations={"node.gke.io/upcoming-maintenance": json.dumps({"windowStartTime": stamp(objects.NOW)})},
        labels={"cloud.google.com/scheduled-maintenance-time": "1772370000"},
        conditions=[objects.condition("TerminationDetected", message="Mon, 02 Mar 2026 19:01:45 GMT")],
    )
    return (node,)


VALID: dict[kinds.Kind, tuple[Body, ...]] = {
    kinds.NODES: of_node(),
    kinds.NODE_CLAIMS: (objects.node_claim(annotations={"karpenter.sh/nodeclaim-termination-timestamp": stamp(1.0)}),),
    kinds.KUEUE_WORKLOADS: (objects.workload(limit_s=60, used_s=5, conditions=[objects.condition("Evicted")]),),
    kinds.PODS: (objects.pod(disruption="EvictionByEvictionAPI", deleting_at=objects.NOW),),
    kinds.JOBS: (objects.job(condition="Failed"),),
    JOBSETS: (objects.jobset(), objects.jobset(finished="Completed")),
    LONE_JOBS: (objects.lone_job(), objects.lone_job(condition="Complete")),
    kinds.POLICIES: (objects.policy(mode="Drill", deadline={"margin": 2}),),
    kinds.RESOURCE_CLAIMS: (objects.resource_claim(tolerations=[{"effect": "NoExecute", "tolerationSeconds": 5}]),),
    kinds.RESOURCE_SLICES: (objects.resource_slice(tpu_0=[objects.taint("broken", "NoExecute")]),),
    kinds.DEVICE_TAINT_RULES: (objects.device_taint_rule({"driver": "a"}, objects.taint("broken", "NoExecute")),),
    kinds.PREEMPTIONS: (objects.preemption(ended_at=objects.NOW, phase="Committed"),),
    kinds.REQUESTS: (objects.request(),),
}
ON_DEVICE = functools.partial(signals.marks, BUILT_IN, On.DEVICE)
READERS: dict[str, tuple[Callable[[Any], object], kinds.Kind]] = {
    "node": (read_node, kinds.NODES),
    "pod": (read_pod, kinds.PODS),
    "job": (read_job, kinds.JOBS),
    "jobset": (JobSetType().read, JOBSETS),
    "lone job": (JobType().read, LONE_JOBS),
    "policy": (CheckpointPolicy.of, kinds.POLICIES),
    "preemption": (PreemptionRecord.of, kinds.PREEMPTIONS),
    "request": (Asked.of, kinds.REQUESTS),
    "request's model": (PreemptionRequest.of, kinds.PREEMPTIONS),
    "slice": (lambda body: read_slice(body, ON_DEVICE), kinds.RESOURCE_SLICES),
    "taint rule": (lambda body: read_rule(body, ON_DEVICE), kinds.DEVICE_TAINT_RULES),
    "claim": (read_claim, kinds.RESOURCE_CLAIMS),
}


def test_a_name_without_end_is_shown_by_its_beginning() -> None:
    request = objects.request()
    request["metadata"] |= {"name": "n" * 50_000, "creationTimestamp": True}
    assert "nnn... (500" in refusal(Unreadable, lambda: Asked.of(request))[:700]


@pytest.mark.parametrize("reader", READERS)
@MANY
@given(data=st.data())
def test_a_reader_of_objects_raises_nothing_but_unreadable(reader: str, data: st.DataObject) -> None:
    read, kind = READERS[reader]
    body = data.draw(odd(VALID[kind]))
    assert len(refusal(Unreadable, lambda: read(body))) < 2000


@pytest.mark.parametrize("on", On)
@MANY
@given(data=st.data())
def test_the_catalogue_reads_any_object_that_has_a_uid(on: On, data: st.DataObject) -> None:
    kind = {
        On.NODE: kinds.NODES,
        On.POD: kinds.PODS,
        On.JOB: kinds.JOBS,
        On.JOB_SET: JOBSETS,
        On.NODE_CLAIM: kinds.NODE_CLAIMS,
        On.WORKLOAD: kinds.KUEUE_WORKLOADS,
        On.DEVICE: kinds.NODES,  # the taints of a device are read as those of a node
    }[on]
    body = data.draw(odd(VALID[kind]))
    try:
        signals.marks(BUILT_IN, on, body)
    except Unreadable:
        assert not (isinstance(body, dict) and isinstance(body.get("metadata"), dict) and "uid" in body["metadata"])


@MANY
@given(st.data())
def test_a_taint_is_read_or_unreadable(data: st.DataObject) -> None:
    try:
        read_taint(data.draw(odd((objects.taint(added_at=objects.NOW),))))
    except Unreadable:
        return


@MANY
@given(st.data())
def test_whatever_objects_come_the_gang_of_the_others_is_decided_about(data: st.DataObject) -> None:
    scene = Scene()
    kinds_of: dict[object, kinds.Kind] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(list(VALID)))
        body = data.draw(odd(VALID[kind]))
        # The API server makes UIDs, so none is that of objects of two kinds.
        with contextlib.suppress(TypeError, KeyError):  # it has none, or something else in its place
            assume(kinds_of.setdefault(body["metadata"]["uid"], kind) == kind)
        scene.cache.put(kind, body, listed=data.draw(st.booleans()))
    gang = scene.cache.gang(JOBSET_UID)
    for moved_s in (0.0, 10.0, 7200.0):
        scene.clock.move(moved_s)
        decide(gang, scene.clock())
    scene.cache.undated_since()
    for pod in gang.pods:
        evictions.hold(gang.preemptions, pod, gang.nodes.get(pod.node), scene.clock())
    for uid in [uid for kind in VALID for uid in scene.cache.uids(kind)]:
        scene.cache.drop(uid)


@pytest.mark.parametrize("field", ["metadata.name", "metadata.namespace", "spec.nodeName"])
def test_a_pod_with_a_name_that_fits_no_record_is_left_out(field: str) -> None:
    scene = Scene()
    body = objects.pod(1, deleting_at=objects.NOW)
    part, _, name = field.partition(".")
    body[part][name] = "n" * 254
    body["metadata"]["uid"] = "uid-of-another"
    scene.cache.put(kinds.PODS, body, listed=False)
    assert "uid-of-another" not in scene.cache.objects.pods


MESSAGES: dict[str, Message] = {
    "subscription": subscription(),
    "acknowledgement": Acknowledgement(pod_uid="u", session="s", preemption="p", process_index=0),
    "report": report(Phase.COMMITTED),
    "forecast": Forecast(
        pod_uid="u", session="s", workload_uid="j", state_bytes=1, step_s=1.0, drain_s=1.0, save_s=1.0, margin=1.25
    ),
    "resumption": Resumption(
        pod_uid="u", session="s", workload_uid="j", restart_attempt=1, restored_step=1, training=True, age_s=0.0
    ),
    "hello": Hello(replica="a", heartbeat_s=1.0),
    "notice": Notice(
        preemption="p",
        pod_uid="u",
        session="s",
        workload_uid="j",
        cause="Drain",
        signal="taint",
        confidence=Confidence.SURE,
        nodes=["n"],
        remaining_s=1.0,
        deadline=stamp(objects.NOW),
        mode=Mode.ENFORCE,
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
@MANY
@given(data=st.data())
def test_a_message_is_read_or_refused_in_a_few_words(name: str, data: st.DataObject) -> None:
    message = MESSAGES[name]
    body = data.draw(odd((json.loads(message.to_json()),)))
    text = data.draw(st.sampled_from(["[" * 100_000, '{"a":' * 100_000, "", "\x00"]) | st.just(json.dumps(body)))
    for read in (type(message).from_json, Frame.read):
        assert len(refusal(WireError, functools.partial(read, text.encode("utf-8", "surrogatepass")))) < 4000


REVIEW: Body = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "u", "namespace": "n", "name": "x", "object": objects.jobset(), "dryRun": False},
}


@MANY
@given(st.data())
def test_a_webhooks_body_is_a_review_or_none(data: st.DataObject) -> None:
    body = data.draw(odd((REVIEW,)))
    text = data.draw(st.sampled_from(["[" * 100_000, '{"a":' * 100_000, ""]) | st.just(json.dumps(body)))
    assert (
        len(refusal(NotAnAdmissionReview, lambda: AdmissionRequest.read(text.encode("utf-8", "surrogatepass")).labels))
        < 2000
    )


@MANY
@given(st.data())
def test_impossible_figures_are_refused_and_others_fit_a_record(data: st.DataObject) -> None:
    preemption = PreemptionRecord.of(objects.preemption())
    for name, kind in (("report", Report), ("resumption", Resumption)):
        body = data.draw(odd((json.loads(MESSAGES[name].to_json()),)))
        with contextlib.suppress(WireError, ValidationError):
            message = kind.from_json(json.dumps(body).encode("utf-8", "surrogatepass"))
            assert isinstance(message, Report | Resumption)
            if isinstance(message, Report):
                after = preemption_status.reported(preemption, message, 0.5, objects.NOW)
            else:
                after = preemption_status.resumed(preemption, message, objects.NOW)
            written = after.to_json()
            assert all(figure < 2**63 for figure in written.values() if isinstance(figure, int))


class Operator:
    """What the webhooks ask, in the place of ``Admission``."""

    settings = AdmissionSettings(operator_url="https://o:443", ca_certificate="PEM")

    async def policy(self, namespace: str, name: str) -> CheckpointPolicy | None:
        return CheckpointPolicy.of(objects.policy())

    def limited(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        return policy

    async def default_policy(self, namespace: str) -> CheckpointPolicy | None:
        return CheckpointPolicy.of(objects.policy())

    async def installed_workload_api(self, *, afresh: bool = False) -> InstalledApi:
        return InstalledApi()

    async def places(self, namespace: str, labels: Any) -> dict[str, Any]:
        return {}

    def users_of(self, namespace: str, policy: str) -> list[str]:
        return ["JobSet train"]

    def disrupted_nodes(self) -> frozenset[str]:
        return frozenset({"node-1"})

    @property
    def evictions(self) -> Operator:
        return self

    async def attempted(self, namespace: str, pod: str, uid: str | None) -> Hold | None:
        return Hold(0.0, f"{namespace}/{pod} saves")

    async def why_requests_are_too_many(self, namespace: str) -> str | None:
        return None


def injected_pod() -> Body:
    pod = objects.pod()
    pod["metadata"]["annotations"] = {}
    env = [{"name": name, "value": "x"} for name in (Env.OPERATOR_URL, Env.CA_CERTIFICATE)]
    pod["spec"]["containers"] = [{"name": "train", "env": env, "volumeMounts": []}]
    pod["spec"]["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    return pod


EVICTION: Body = {
    "metadata": {"name": "p", "namespace": "n"},
    "deleteOptions": {"dryRun": ["All"], "preconditions": {"uid": "u"}},
}


@MANY
@given(st.data())
async def test_every_webhook_answers_whatever_object_it_is_asked_about(data: st.DataObject) -> None:
    for valid in (objects.jobset(), injected_pod(), EVICTION, objects.request()):
        body = data.draw(odd((valid,)))
        if not isinstance(body, dict):
            continue
        request = AdmissionRequest("u", "n", body, "x", dry_run=False)
        operator = cast(Admission, Operator())
        for answer in (
            await routes.mutate_workload(request, operator),
            await routes.mutate_pod(request, operator),
            await routes.validate_eviction(request, operator),
            await routes.validate_request(request, operator),
        ):
            assert isinstance(answer["response"]["allowed"], bool)
