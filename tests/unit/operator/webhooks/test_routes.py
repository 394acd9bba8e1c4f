"""The webhooks over HTTP, as the API server calls them."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import jsonpatch
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.wire.names import JOBSET_LABEL_REPLICATED_JOB, LABEL_POLICY, Env
from gracepoint_operator.kube import client as kube
from gracepoint_operator.model.evictions import Hold
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks import Admission, AdmissionSettings, InstalledApi, add_routes
from gracepoint_operator.webhooks.routes import (
    PATH_EVICTIONS,
    PATH_JOBSETS,
    PATH_PODS,
    PATH_POLICIES,
    PATH_REQUESTS,
    AdmissionRequest,
    RequestBodies,
    allowed,
    path_of,
)
from gracepoint_operator.webhooks.updates import ANNOTATION, MemberPlace
from tests.unit.operator.fakes.samples import Json, environment, jobset, pod_of, policy, replicated_job

Client = TestClient[web.Request, web.Application]

TOKEN = "told-to-the-api-server-alone"


class Operator:
    """What the webhooks see of the operator, in the place of ``Admission``."""

    def __init__(self) -> None:
        self.settings = AdmissionSettings(operator_url="https://o:443", ca_certificate="PEM")
        self.policies = {("team", "default"): policy()}
        self.default: CheckpointPolicy | Exception | None = None
        self.nodes: frozenset[str] = frozenset()
        self.attempts: list[tuple[str, str, str | None]] = []
        self.users: dict[tuple[str, str], list[str]] = {}
        self.waits_for: str | None = None
        self.too_many: str | Exception | None = None
        self.refused: list[str] = []
        self.now: dict[str, MemberPlace] | Exception = {}
        self.jobset_api: list[InstalledApi | Exception] = [InstalledApi()]  # as it is read, one reading after another

    async def policy(self, namespace: str, name: str) -> CheckpointPolicy | None:
        if name == "broken":
            CheckpointPolicy.of(
                {"apiVersion": "gracepoint.dev/v1beta1", "kind": "CheckpointPolicy", "metadata": {}, "spec": {}}
            )
        if name == "unreadable":
            raise kube.Unavailable("GET ...: HTTP 503")
        return self.policies.get((namespace, name))

    def limited(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        return policy

    async def default_policy(self, namespace: str) -> CheckpointPolicy | None:
        if isinstance(self.default, Exception):
            raise self.default
        return self.default

    async def installed_workload_api(self, *, afresh: bool = False) -> InstalledApi:
        found = self.jobset_api[0]
        if afresh and len(self.jobset_api) > 1:
            found = self.jobset_api[1]
        if isinstance(found, Exception):
            raise found
        return found

    def users_of(self, namespace: str, policy: str) -> list[str]:
        return self.users.get((namespace, policy), [])

    def disrupted_nodes(self) -> frozenset[str]:
        return self.nodes

    async def places(self, namespace: str, labels: Mapping[str, str]) -> dict[str, MemberPlace]:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    async def why_requests_are_too_many(self, namespace: str) -> str | None:
        if isinstance(self.too_many, Exception):
            raise self.too_many
        return self.too_many

    @property
    def evictions(self) -> Operator:
        return self

    async def attempted(self, namespace: str, pod: str, uid: str | None) -> Hold | None:
        if pod == "broken":
            raise RuntimeError("told by the test")
        self.attempts.append((namespace, pod, uid))
        return None if self.waits_for is None else Hold(0.0, self.waits_for)


@pytest.fixture
def operator() -> Operator:
    return Operator()


@pytest.fixture
async def client(operator: Operator) -> AsyncIterator[Client]:
    app = web.Application()
    add_routes(app, cast(Admission, operator), TOKEN, operator.refused.append)
    async with TestClient(TestServer(app)) as client:
        yield client


def review(body: Json, **given: Any) -> Json:
    request = {"uid": "r-1", "operation": "CREATE", "namespace": "team", "dryRun": True, "object": body, **given}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


async def call(client: Client, path: str, body: Json, **given: Any) -> Json:
    async with client.post(path_of(path, TOKEN), json=review(body, **given)) as answer:
        assert answer.status == 200, await answer.text()
        read: Json = await answer.json()
    assert (read["apiVersion"], read["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: Json = read["response"]
    assert response["uid"] == "r-1"
    return response


def patched(body: Json, response: Json) -> Json:
    assert response["allowed"] is True
    if "patch" not in response:
        return body
    assert response["patchType"] == "JSONPatch"
    made: Json = jsonpatch.apply_patch(body, json.loads(base64.b64decode(response["patch"])))
    return made


async def test_a_labelled_jobset_leaves_with_contract_and_injection(client: Client) -> None:
    body = jobset()
    made = patched(body, await call(client, PATH_JOBSETS, body))
    assert pod_of(made)["restartPolicy"] == "Never"
    assert environment(pod_of(made)["containers"][0])[Env.POLICY] == "default"
    assert "spec.failurePolicy" in json.loads(made["metadata"]["annotations"][ANNOTATION])["fields"]
    again = await call(client, PATH_JOBSETS, made)
    assert "patch" not in again, "called again, it has nothing to add"


async def test_whoever_creates_a_jobset_is_warned_of_what_is_set_in_vain(client: Client) -> None:
    body = jobset()
    pod_of(body)["containers"][0]["env"] = [{"name": Env.POD_UID, "value": "forged"}]
    (warning,) = (await call(client, PATH_JOBSETS, body))["warnings"]
    assert f"Gracepoint sets {Env.POD_UID} by itself" in warning
    assert "warnings" not in await call(client, PATH_JOBSETS, jobset())


async def test_a_jobset_that_the_installed_api_would_cut_is_refused(client: Client, operator: Operator) -> None:
    operator.jobset_api = [InstalledApi(missing=("spec.failurePolicy.rules",))]
    response = await call(client, PATH_JOBSETS, jobset())
    assert response["allowed"] is False
    assert "Upgrade JobSet to v0.10 or newer" in response["status"]["message"]


async def test_before_it_is_refused_the_installed_api_is_read_again(client: Client, operator: Operator) -> None:
    operator.jobset_api = [InstalledApi(missing=("spec.failurePolicy.rules",)), InstalledApi()]
    assert (await call(client, PATH_JOBSETS, jobset()))["allowed"] is True


@pytest.mark.parametrize(
    ("found", "says"),
    [
        pytest.param(InstalledApi(by_message=False), "onJobFailureMessagePatterns", id="rules without messages"),
        pytest.param(kube.Refused("HTTP 403"), "HTTP 403", id="an API that cannot be read"),
    ],
)
async def test_a_jobset_is_allowed_with_a_warning_of_the_installed_api(
    client: Client, operator: Operator, found: InstalledApi | Exception, says: str
) -> None:
    operator.jobset_api = [found]
    response = await call(client, PATH_JOBSETS, jobset())
    assert response["allowed"] is True
    (warning,) = response["warnings"]
    assert says in warning


async def test_a_jobset_without_the_label_is_not_touched(client: Client) -> None:
    body = jobset()
    body["metadata"]["labels"] = {}
    assert patched(body, await call(client, PATH_JOBSETS, body)) == body


@pytest.mark.parametrize("name", ["nobody", ""])
async def test_a_jobset_of_an_unknown_policy_is_refused_in_words(client: Client, name: str) -> None:
    body = jobset()
    body["metadata"]["labels"][LABEL_POLICY] = name
    response = await call(client, PATH_JOBSETS, body)
    assert response["allowed"] is False
    assert f"metadata.labels[gracepoint.dev/policy]: found {name!r}" in response["status"]["message"]
    assert "in the namespace 'team'" in response["status"]["message"]


async def test_a_jobset_of_a_policy_that_cannot_be_used_gets_the_reason(client: Client) -> None:
    body = jobset()
    body["metadata"]["labels"][LABEL_POLICY] = "broken"
    response = await call(client, PATH_JOBSETS, body)
    assert response["allowed"] is False
    assert "cannot be used" in response["status"]["message"]
    assert "checkpoint" in response["status"]["message"]


async def test_where_the_policy_cannot_be_read_the_jobset_may_come_again(client: Client) -> None:
    body = jobset()
    body["metadata"]["labels"][LABEL_POLICY] = "unreadable"
    response = await call(client, PATH_JOBSETS, body)
    assert response["allowed"] is False
    assert response["status"]["code"] == 503
    assert "could not be read just now (GET ...: HTTP 503). Try again" in response["status"]["message"]


async def test_a_jobset_that_contradicts_is_refused_with_the_field(client: Client) -> None:
    response = await call(client, PATH_JOBSETS, jobset(replicated_job(backoffLimit=6)))
    assert response["allowed"] is False
    assert response["status"]["message"].startswith("spec.replicatedJobs[0].template.spec.backoffLimit:")


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"replicatedJobs": "many"}, id="no list"),
        pytest.param({"replicatedJobs": [{"name": "a", "replicas": "two"}]}, id="replicas in words"),
        pytest.param(
            {"replicatedJobs": [{"name": "a", "template": {"spec": {"template": {"spec": {"containers": [{}]}}}}}]},
            id="container without a name",
        ),
    ],
)
async def test_a_jobset_of_the_wrong_shape_is_refused_and_breaks_nothing(client: Client, spec: Json) -> None:
    response = await call(client, PATH_JOBSETS, {**jobset(), "spec": spec})
    assert response["allowed"] is False
    assert "not of JobSet's schema" in response["status"]["message"]


async def test_gang_pod_avoids_disrupted_nodes_and_gets_the_current_ca(client: Client, operator: Operator) -> None:
    body = jobset()
    template = patched(body, await call(client, PATH_JOBSETS, body))
    pod = {"metadata": {"labels": {LABEL_POLICY: "default"}}, "spec": pod_of(template)}
    operator.nodes = frozenset({"doomed"})
    operator.settings = AdmissionSettings(operator_url="https://o:443", ca_certificate="PEM-2")
    made = patched(pod, await call(client, PATH_PODS, pod))
    assert environment(made["spec"]["containers"][0])[Env.CA_CERTIFICATE] == "PEM-2"
    assert "doomed" in json.dumps(made["spec"]["affinity"])


ELASTIC = {"training": {"minProcesses": 2}}


@pytest.mark.parametrize(
    ("policy_fields", "now", "expected"),
    [
        pytest.param(ELASTIC, {"workers": MemberPlace(6, 0, 3)}, ("6", "3"), id="the size was changed"),
        pytest.param(ELASTIC, TimeoutError(), None, id="the size cannot be read"),
        pytest.param(ELASTIC, {}, ("2", "1"), id="another replicatedJob"),
        pytest.param({}, {"workers": MemberPlace(6, 0, 3)}, ("2", "1"), id="the size is fixed"),
    ],
)
async def test_a_pod_gets_the_size_that_its_gang_has_now(
    client: Client,
    operator: Operator,
    policy_fields: Json,
    now: dict[str, MemberPlace] | Exception,
    expected: tuple[str, str] | None,
) -> None:
    operator.policies["team", "default"] = policy(**policy_fields)
    template = patched(jobset(), await call(client, PATH_JOBSETS, jobset()))
    labels = {LABEL_POLICY: "default", JOBSET_LABEL_REPLICATED_JOB: "workers"}
    operator.now = now
    pod = {"metadata": {"labels": labels}, "spec": pod_of(template)}
    response = await call(client, PATH_PODS, pod)
    if expected is None:
        assert (response["allowed"], response["status"]["code"]) == (False, 503), "a wrong size would not fit the rest"
        return
    made = environment(patched(pod, response)["spec"]["containers"][0])
    assert (made[Env.PROCESS_COUNT], made[Env.PODS_PER_JOB]) == expected


@pytest.mark.parametrize("labels", [{}, {LABEL_POLICY: "default"}], ids=["no label", "label set by hand"])
async def test_a_pod_that_no_jobset_was_injected_for_is_not_touched(
    client: Client, operator: Operator, labels: dict[str, str]
) -> None:
    operator.nodes = frozenset({"doomed"})
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    assert patched(pod, await call(client, PATH_PODS, pod)) == pod


def eviction(**options: Any) -> Json:
    """As kubectl drain sends it."""
    metadata = {"name": "llm-workers-0-0-x", "namespace": "team"}
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options or None}


async def ask(client: Client, body: Json, *, dry_run: bool = False, name: str = "llm-workers-0-0-x") -> Json:
    return await call(client, PATH_EVICTIONS, body, dryRun=dry_run, name=name, subResource="eviction")


async def test_an_eviction_that_waits_is_answered_as_a_budget_would(client: Client, operator: Operator) -> None:
    operator.waits_for = "Gracepoint saves"
    response = await ask(client, eviction())
    assert response["allowed"] is False
    assert response["status"] == {"code": 429, "reason": "TooManyRequests", "message": "Gracepoint saves"}
    assert operator.attempts == [("team", "llm-workers-0-0-x", None)]


async def test_an_eviction_that_may_continue_is_allowed_and_not_changed(client: Client, operator: Operator) -> None:
    response = await ask(client, eviction(preconditions={"uid": "u-1"}))
    assert response == {"uid": "r-1", "allowed": True}
    assert operator.attempts == [("team", "llm-workers-0-0-x", "u-1")]


async def test_pod_name_comes_from_the_eviction_when_the_request_has_none(client: Client, operator: Operator) -> None:
    await ask(client, eviction(), name="")
    assert operator.attempts == [("team", "llm-workers-0-0-x", None)]


@pytest.mark.parametrize(
    ("body", "dry_run"),
    [
        pytest.param(eviction(dryRun=["All"]), False, id="in deleteOptions, as kubectl drain"),
        pytest.param(eviction(), True, id="in the request"),
    ],
)
async def test_a_dry_run_is_allowed_and_nobody_is_notified(
    client: Client, operator: Operator, body: Json, dry_run: bool
) -> None:
    operator.waits_for = "Gracepoint saves"
    assert (await ask(client, body, dry_run=dry_run))["allowed"] is True
    assert operator.attempts == []


@pytest.mark.parametrize(
    ("body", "name"),
    [
        pytest.param(eviction(), "broken", id="an error of ours"),
        pytest.param({"kind": "Eviction"}, "", id="no name anywhere"),
        pytest.param({**eviction(), "metadata": None}, "", id="no metadata"),
    ],
)
async def test_whatever_goes_wrong_the_eviction_continues(client: Client, body: Json, name: str) -> None:
    assert (await ask(client, body, name=name))["allowed"] is True


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'{"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview"}', id="no request"),
        pytest.param(
            b'{"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", '
            b'"request": {"uid": "1", "object": {}}}',
            id="another version",
        ),
        pytest.param(
            b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", '
            b'"request": {"uid": "1", "object": null}}',
            id="no object",
        ),
    ],
)
async def test_what_is_no_review_is_answered_with_400_and_what_was_expected(
    client: Client, operator: Operator, body: bytes
) -> None:
    async with client.post(path_of(PATH_PODS, TOKEN), data=body) as answer:
        assert answer.status == 400
        assert "expected an" in await answer.text()
    assert operator.refused == ["no_review"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(PATH_EVICTIONS, id="no secret part"),
        pytest.param(path_of(PATH_EVICTIONS, "another-token"), id="another token's"),
        pytest.param(PATH_EVICTIONS + path_of(PATH_JOBSETS, TOKEN).removeprefix(PATH_JOBSETS), id="another webhook's"),
        pytest.param("/", id="nothing"),
    ],
)
async def test_who_does_not_know_the_path_is_refused_and_changes_nothing(
    client: Client, operator: Operator, path: str
) -> None:
    async with client.post(path, json=review(eviction(), dryRun=False, name="llm-workers-0-0-x")) as answer:
        assert answer.status == 404
    assert (operator.attempts, operator.refused) == ([], ["unknown_path"])


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not told beforehand."""
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("webhook", "size_bytes"),
    [
        pytest.param(PATH_EVICTIONS, 2 << 20, id="an eviction, which is small"),
        pytest.param(PATH_JOBSETS, 9 << 20, id="a JobSet larger than the API server takes"),
    ],
)
@pytest.mark.parametrize("told", [True, False], ids=["length told", "length not told"])
async def test_a_body_larger_than_any_review_is_not_taken(
    client: Client, operator: Operator, webhook: str, size_bytes: int, told: bool
) -> None:
    body = bytes(size_bytes)
    async with client.post(path_of(webhook, TOKEN), data=io.BytesIO(body) if told else _parts(body)) as answer:
        assert answer.status == 413
    assert operator.refused == ["too_large"]


async def test_large_objects_are_limited_and_small_ones_do_not_wait(client: Client, operator: Operator) -> None:
    gate, inside = asyncio.Event(), 0
    most = 0

    async def policy_when_told(namespace: str, name: str) -> CheckpointPolicy | None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await gate.wait()
        inside -= 1
        return policy()

    operator.policy = policy_when_told  # type: ignore[method-assign]
    large = jobset()
    large["metadata"]["annotations"] = {"note": "x" * 300_000}
    calls = [asyncio.create_task(call(client, PATH_JOBSETS, large)) for _ in range(5)]
    while inside < 2:  # noqa: ASYNC110  the state of the server is asked
        await asyncio.sleep(0.005)
    assert (await ask(client, eviction()))["allowed"] is True
    gate.set()
    assert all(response["allowed"] for response in await asyncio.gather(*calls))
    assert most == 2


async def test_a_body_that_does_not_come_ends_its_call() -> None:
    refused: list[str] = []
    bodies = RequestBodies(refused.append, within_s=0.05)

    async def take(request: web.Request) -> web.Response:
        async with bodies.read(request, at_most_bytes=1 << 20):
            return web.Response()

    app = web.Application()
    app.router.add_post("/", take)
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: o\r\nContent-Length: 400000\r\n\r\n")
        assert b" 408 " in await reader.readline()
        writer.close()
    await writer.wait_closed()
    assert refused == ["too_slow"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab/~0", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab/~0", max_size=2), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text("ab", max_size=2), _JSON), st.dictionaries(st.text("ab", max_size=2), _JSON))
def test_the_patch_turns_any_object_into_the_wanted_one(before: dict[str, Any], wanted: dict[str, Any]) -> None:
    response = allowed(AdmissionRequest("r-1", "team", before), wanted)["response"]
    # As text, since to Python True is 1.
    assert json.dumps(patched(before, response), sort_keys=True) == json.dumps(wanted, sort_keys=True)


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        pytest.param(None, None, "", id="few"),
        pytest.param("found 200, expected fewer", 422, "found 200, expected fewer", id="too many"),
        pytest.param(kube.Unavailable("HTTP 503"), 503, "could not be counted", id="not known"),
    ],
)
async def test_a_request_is_created_only_if_its_namespace_has_few(
    client: Client, operator: Operator, found: str | Exception | None, code: int | None, words: str
) -> None:
    operator.too_many = found
    response = await call(client, PATH_REQUESTS, {"metadata": {}})
    assert response["allowed"] is (code is None)
    assert "patch" not in response
    if code is not None:
        assert response["status"]["code"] == code
        assert words in response["status"]["message"]


async def test_deleting_a_policy_that_jobs_use_warns_and_is_allowed(client: Client, operator: Operator) -> None:
    operator.users["team", "default"] = [f"JobSet j{i}" for i in range(5)]
    response = await deleted(client, "default")
    assert response["allowed"] is True
    (warning,) = response["warnings"]
    assert "is used by JobSet j0, JobSet j1, JobSet j2 and 2 more" in warning
    assert "They keep the settings that they were created with" in warning
    assert len(warning) <= 256, "clients may cut longer ones"
    operator.users["", "default"] = ["JobSet team/train"]
    (warning,) = (await deleted(client, "default", namespace=""))["warnings"]
    assert warning.startswith("ClusterCheckpointPolicy default is used by JobSet team/train. They keep")
    response = await deleted(client, "unused")
    assert (response["allowed"], response.get("warnings")) == (True, None)


async def deleted(client: Client, name: str, namespace: str = "team") -> Json:
    """The response as the API server asks, which has no object of a deletion."""
    old = {"metadata": {"name": name, "namespace": namespace}, "spec": policy(name).spec.to_json()}
    about = {"uid": "u", "namespace": namespace, "name": name, "operation": "DELETE", "object": None, "oldObject": old}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": about}
    answer = await client.post(path_of(PATH_POLICIES, TOKEN), json=review)
    response: Json = (await answer.json())["response"]
    return response


def without_policy(**spec: Any) -> Json:
    body = jobset(**spec)
    del body["metadata"]["labels"][LABEL_POLICY]
    return body


async def test_a_jobset_that_names_no_policy_is_left_alone(client: Client) -> None:
    response = await call(client, PATH_JOBSETS, without_policy())
    assert response["allowed"] is True
    assert "patch" not in response


async def test_a_jobset_that_names_no_policy_gets_the_default_of_its_namespace(
    client: Client, operator: Operator
) -> None:
    operator.default = policy()
    body = without_policy()
    made = patched(body, await call(client, PATH_JOBSETS, body))
    named = jobset()
    expected = patched(named, await call(client, PATH_JOBSETS, named))
    assert made["metadata"]["labels"] == expected["metadata"]["labels"]
    assert made["spec"] == expected["spec"], "as if it had named the policy"
    shown = json.loads(made["metadata"]["annotations"][ANNOTATION])
    assert shown["policy"] == "default"
    assert any(field.startswith("metadata.labels") for field in shown["fields"])
    assert "patch" not in await call(client, PATH_JOBSETS, made), "called again, it has nothing to add"


async def test_the_label_of_a_default_stays_when_the_manifest_is_applied_again(
    client: Client, operator: Operator
) -> None:
    operator.default = policy()
    body = without_policy()
    old = patched(body, await call(client, PATH_JOBSETS, body))
    again = patched(body, await call(client, PATH_JOBSETS, body, operation="UPDATE", oldObject=old))
    assert again["metadata"]["labels"] == old["metadata"]["labels"]
    assert again["spec"] == old["spec"]


async def test_the_label_that_a_user_wrote_may_be_taken_away_again(client: Client) -> None:
    body = jobset()
    old = patched(body, await call(client, PATH_JOBSETS, body))
    unlabelled = copy.deepcopy(old)
    del unlabelled["metadata"]["labels"][LABEL_POLICY]
    again = patched(unlabelled, await call(client, PATH_JOBSETS, unlabelled, operation="UPDATE", oldObject=old))
    assert LABEL_POLICY not in again["metadata"].get("labels", {})


@pytest.mark.parametrize(
    ("default", "spec", "says"),
    [
        pytest.param(kube.Unavailable("HTTP 503"), {}, "HTTP 503", id="the API server does not answer"),
        pytest.param(Unreadable("spec.default: wrong"), {}, "spec.default: wrong", id="a default that cannot be used"),
        pytest.param(
            policy(), {"network": {"enableDNSHostnames": False}}, "spec.network.enableDNSHostnames", id="contract"
        ),
    ],
)
async def test_whatever_stands_against_a_default_the_jobset_is_created_with_a_warning(
    client: Client, operator: Operator, default: CheckpointPolicy | Exception, spec: Json, says: str
) -> None:
    operator.default = default
    response = await call(client, PATH_JOBSETS, without_policy(**spec))
    assert response["allowed"] is True
    assert "patch" not in response
    (warning,) = response["warnings"]
    assert warning.startswith("not protected from preemptions")
    assert says in warning
