"""The webhooks' HTTP routes.

Each request is one task on the server's event loop. It keeps no state and ends with its answer. All waiting is
bounded: for the body and the turn by ``RequestBodies``, for everything else by ``Admission``. When the
timeout of the webhook's configuration is over, the API server closes the connection, which cancels the task.

API servers do not authenticate to webhooks. So each webhook has a path that nobody else knows (``path_of``), and a
request for any other path is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import jsonpatch
from aiohttp import web

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.logs import seldom
from gracepoint_operator.read_errors import CAUSES, Unreadable, said, shortened
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks.admission import Admission
from gracepoint_operator.webhooks.injection import (
    avoid_nodes,
    inject_workload,
    is_injected,
    refresh_pod,
)
from gracepoint_operator.webhooks.installation import InstalledApi
from gracepoint_operator.webhooks.release_contract import (
    ContractViolation,
    creation_warnings,
    release_contract,
)
from gracepoint_operator.webhooks.training_jobs import Json, is_job, label_handed_on
from gracepoint_operator.webhooks.updates import (
    changed_sizes,
    is_elastic,
    keep_fields,
    not_understood,
    overruled,
    resized_pod,
    shown,
)

logger = logging.getLogger(__name__)

API_VERSION = "admission.k8s.io/v1"


class NotAnAdmissionReview(ValueError):
    """The request's body is not an AdmissionReview of this version."""


@dataclasses.dataclass(frozen=True)
class AdmissionRequest:
    """A request of the API server.

    Attributes:
        name: Empty if the API server is going to generate one.
        object: The object. Of a deletion, the stored one.
        old: The stored object. None unless an object is updated or deleted.
    """

    uid: str
    namespace: str
    object: Json
    name: str = ""
    dry_run: bool = False
    old: Json | None = None

    @staticmethod
    def read(body: bytes) -> AdmissionRequest:
        """Reads the body of a webhook call.

        Raises:
            NotAnAdmissionReview: It is not an AdmissionReview of ``admission.k8s.io/v1``, or it has no object.
        """
        try:
            review: Any = json.loads(body)
            kind = review["apiVersion"], review["kind"]
            request = review["request"]
            read = AdmissionRequest(
                request["uid"],
                request.get("namespace", ""),
                request["object"] if request.get("operation") != "DELETE" else request["oldObject"],
                request.get("name", ""),
                request.get("dryRun") is True,
                request.get("oldObject"),
            )
        except CAUSES as error:
            raise NotAnAdmissionReview(f"expected an AdmissionReview, found {body[:80]!r} ({said(error)})") from error
        if kind != (API_VERSION, "AdmissionReview"):
            raise NotAnAdmissionReview(f"expected an AdmissionReview of {API_VERSION}, found {shortened(str(kind))}")
        if not all(isinstance(text, str) for text in (read.uid, read.namespace, read.name)):
            raise NotAnAdmissionReview("request: expected texts as uid, namespace and name")
        if not isinstance(read.old, dict | None):
            raise NotAnAdmissionReview(f"request.oldObject: expected an object, found {shortened(repr(read.old))}")
        if not isinstance(read.object, dict):
            raise NotAnAdmissionReview(f"request.object: expected an object, found {shortened(repr(read.object))}")
        return read

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the object. Empty if they cannot be read."""
        metadata = self.object.get("metadata")
        labels = metadata.get("labels") if isinstance(metadata, dict) else None
        return labels if isinstance(labels, dict) else {}


def allowed(request: AdmissionRequest, target: Json, warnings: Sequence[str] = ()) -> Json:
    """Returns the response that changes the request's object to ``target``. Clients show the warnings."""
    response: Json = {"uid": request.uid, "allowed": True}
    if warnings:
        response["warnings"] = list(warnings)
    patch = jsonpatch.make_patch(request.object, target).patch
    if patch:
        text = json.dumps(patch, separators=(",", ":"))
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(text.encode()).decode()}
    return _review(response)


def refused(request: AdmissionRequest, message: str) -> Json:
    """Returns the response that refuses the request and shows ``message`` to the user who made it."""
    status = {"code": 422, "reason": "Invalid", "message": message}
    return _review({"uid": request.uid, "allowed": False, "status": status})


def later(request: AdmissionRequest, message: str) -> Json:
    """Returns the response for an eviction that has to wait.

    It is the response that a PodDisruptionBudget causes, after which every client tries again.
    """
    status = {"code": 429, "reason": "TooManyRequests", "message": message}
    return _review({"uid": request.uid, "allowed": False, "status": status})


def unknown(request: AdmissionRequest, message: str) -> Json:
    """Returns the response for a request that cannot be decided now. The same request may succeed later."""
    status = {"code": 503, "reason": "ServiceUnavailable", "message": message}
    return _review({"uid": request.uid, "allowed": False, "status": status})


def _review(response: Json) -> Json:
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


#: JobSets and pods are usually smaller. While a larger body is handled, it may take twenty times its size in memory.
_LARGE_BYTES = 256 * 1024
_LARGE_AT_ONCE = 2


class RequestBodies:
    """Reads the bodies of webhook calls with limits on size, time, and the number of large bodies at once.

    A call that waits for its turn does not delay other calls. Its turn ends with its answer, because the object is in
    memory until then.

    Args:
        count_refused: Called with the reason for each body that is not taken.
        within_s: How long a body, or its turn, may take: longer than the API server waits for the slowest webhook.
    """

    def __init__(self, count_refused: Callable[[str], None], within_s: float = 10.0) -> None:
        self._within_s = within_s
        self._count_refused = count_refused
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    @contextlib.asynccontextmanager
    async def read(self, http: web.Request, at_most_bytes: int) -> AsyncIterator[bytes]:
        """Reads the body. The turn of a large body lasts until the context ends.

        Raises:
            web.HTTPRequestEntityTooLarge: It has more than ``at_most_bytes``.
            web.HTTPRequestTimeout: The body, or its turn, did not come within ``within_s``.
        """
        length = http.content_length
        if length is not None and length > at_most_bytes:
            self._count_refused("too_large")
            raise web.HTTPRequestEntityTooLarge(at_most_bytes, length)
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self._within_s):
                    if length is None or length > _LARGE_BYTES:
                        await turn.enter_async_context(self._large)
                    body = await http.clone(client_max_size=at_most_bytes).read()
            except web.HTTPRequestEntityTooLarge:
                self._count_refused("too_large")
                raise
            except TimeoutError as error:
                self._count_refused("too_slow")
                message = f"the body: not here, or not looked at, within {self._within_s:.0f} s; send it again"
                raise web.HTTPRequestTimeout(text=message) from error
            yield body


PATH_JOBSETS = "/mutate/jobsets"
PATH_JOBS = "/mutate/jobs"
PATH_TRAINJOBS = "/mutate/trainjobs"
PATH_PODS = "/mutate/pods"
PATH_EVICTIONS = "/validate/evictions"
PATH_REQUESTS = "/validate/preemptionrequests"
PATH_POLICIES = "/validate/policies"

#: An AdmissionReview contains a whole object of at most 3 MiB, as the API server serialises it.
_LARGEST_OBJECT_BYTES = 8 * 1024 * 1024
_LARGEST_EVICTION_BYTES = 1024 * 1024
_NAMED_USERS = 3


def path_of(webhook: str, token: str) -> str:
    """Returns the path of a webhook.

    If a webhook does not answer, the API server shows its path to the user who creates a JobSet. Neither the token nor
    the other paths can be computed from one path.

    Args:
        webhook: ``PATH_JOBSETS``, ``PATH_JOBS``, ``PATH_TRAINJOBS``, ``PATH_PODS``, ``PATH_EVICTIONS``,
            ``PATH_REQUESTS`` or ``PATH_POLICIES``.
        token: The secret that the chart makes. The chart computes the paths in the same way.
    """
    return f"{webhook}/{hashlib.sha256(f'{webhook} {token}'.encode()).hexdigest()}"


def add_routes(
    app: web.Application,
    operator: Admission,
    token: str,
    count_refused: Callable[[str], None],
    keep: Callable[[web.Request], None] = lambda request: None,
) -> None:
    """Adds the webhooks to ``app``.

    Args:
        app: An application without other routes.
        operator: What the webhooks ask of the operator.
        token: The secret from which the paths are computed.
        count_refused: Called with the reason when a request is refused before its object is read.
        keep: Called with each request for the path of a webhook: its caller is an API server.
    """
    bodies = RequestBodies(count_refused)

    def add(webhook: str, answer: Callable[[AdmissionRequest, Admission], Awaitable[Json]], at_most_bytes: int) -> None:
        async def handle(http: web.Request) -> web.Response:
            keep(http)
            async with bodies.read(http, at_most_bytes) as body:
                try:
                    request = AdmissionRequest.read(body)
                except NotAnAdmissionReview as error:
                    count_refused("no_review")
                    raise web.HTTPBadRequest(text=str(error)) from error
                return web.json_response(await answer(request, operator))

        app.router.add_post(path_of(webhook, token), handle)

    async def nobody(http: web.Request) -> web.Response:
        count_refused("unknown_path")
        # Without the path, which may be almost right.
        logger.warning("a request for an unknown path was refused", extra=seldom("unknown_path", peer=http.remote))
        response = web.Response(status=404)
        response.force_close()  # the next one costs another handshake
        return response

    add(PATH_EVICTIONS, validate_eviction, _LARGEST_EVICTION_BYTES)
    add(PATH_REQUESTS, validate_request, _LARGEST_OBJECT_BYTES)
    add(PATH_POLICIES, validate_policy, _LARGEST_OBJECT_BYTES)
    add(PATH_JOBSETS, mutate_workload, _LARGEST_OBJECT_BYTES)
    add(PATH_JOBS, mutate_workload, _LARGEST_OBJECT_BYTES)
    add(PATH_TRAINJOBS, mutate_trainjob, _LARGEST_OBJECT_BYTES)
    add(PATH_PODS, mutate_pod, _LARGEST_OBJECT_BYTES)
    app.router.add_route("*", "/{path:.*}", nobody)


async def mutate_workload(request: AdmissionRequest, operator: Admission) -> Json:
    """A JobSet or Job is created: applies the release contract and the injection.

    A JobSet is updated: what it got at its creation stays.
    """
    if request.old is not None:
        return _updated(request, request.old)
    if LABEL_POLICY not in request.labels:
        return await _by_default(request, operator)
    kind = "Job" if is_job(request.object) else "JobSet"
    name = request.labels[LABEL_POLICY]
    where = f"metadata.labels[{LABEL_POLICY}]: found {name!r}"
    try:
        policy = await operator.policy(request.namespace, name) if name else None
    except Unreadable as error:
        return refused(request, f"{where}, a CheckpointPolicy that cannot be used. {error}")
    except Exception as error:
        logger.exception("CheckpointPolicy cannot be read", extra=seldom(type(error).__name__))
        return unknown(request, f"{where}, a CheckpointPolicy that could not be read just now ({error}). Try again")
    if policy is None:
        return refused(
            request,
            f"{where}, expected the name of a CheckpointPolicy in the namespace {request.namespace!r}, or of a "
            "ClusterCheckpointPolicy that has a default for it. Create the policy first, correct the label, "
            f"or remove it to run the {kind} without Gracepoint",
        )
    try:
        prepared = await _prepared(request.object, policy, operator)
    except CAUSES as error:
        # The API server checks an object against its schema only after the webhooks that may change it.
        _log_unreadable(request, kind, error)
        return refused(request, f"spec: found parts that are not of {kind}'s schema ({said(error)}). Correct them")
    if isinstance(prepared, str):
        _log_refusal(request, kind, name, prepared)
        return refused(request, prepared)
    return allowed(request, *prepared)


async def _by_default(request: AdmissionRequest, operator: Admission) -> Json:
    """A workload that names no policy: it gets the default of its namespace, if there is one.

    Its user has asked for nothing. So whatever stands against it, the workload is created as it is, and a warning says
    that it is not protected.
    """
    try:
        policy = await operator.default_policy(request.namespace)
        if policy is None:
            return allowed(request, request.object)
        labelled = copy.deepcopy(request.object)
        metadata = labelled.setdefault("metadata", {})
        metadata["labels"] = {**(metadata.get("labels") or {}), LABEL_POLICY: policy.name}
        prepared = await _prepared(labelled, policy, operator, before=request.object)
    except Exception as error:  # noqa: BLE001  whatever it is, the workload is created
        logger.warning("a workload gets no default policy", extra=seldom("default", error=said(error)))
        return allowed(request, request.object, [f"not protected from preemptions: the default policy: {said(error)}"])
    if isinstance(prepared, str):
        warning = f"not protected from preemptions by the default policy {policy.name}: {prepared}"
        return allowed(request, request.object, [warning])
    return allowed(request, *prepared)


async def _prepared(
    workload: Json, policy: CheckpointPolicy, operator: Admission, before: Json | None = None
) -> tuple[Json, list[str]] | str:
    """Returns a workload as it is created under a policy, and warnings; or why it cannot be.

    Args:
        workload: With the label of the policy.
        policy: The policy.
        operator: What the webhooks ask of the operator.
        before: The workload as its user wrote it. None: as it is.

    Raises:
        AttributeError, LookupError, TypeError, ...: It is not of its kind's schema (``read_errors.CAUSES``).
    """
    before = workload if before is None else before
    result = release_contract(workload, policy.spec)
    if isinstance(result, ContractViolation):
        return result.message
    refusal, unserved = await _unserved(result.object, policy, operator)
    if refusal is not None:
        return refusal
    injected = inject_workload(result.object, policy.name, policy.spec, operator.settings)
    warnings = [
        *unserved,
        *not_understood(policy),
        *overruled(before, injected, policy),
        *creation_warnings(injected, operator.limited(policy)),
    ]
    return shown(before, injected, policy), warnings


def _updated(request: AdmissionRequest, old: Json) -> Json:
    try:
        updated, given_up = keep_fields(old, request.object)
        resized = changed_sizes(old, updated)
    except CAUSES as error:
        # The API server checks an object against its schema only after the webhooks that may change it.
        _log_unreadable(request, "JobSet", error)
        return allowed(request, request.object)
    warnings = [
        f"{path}: Gracepoint keeps the value of the JobSet's creation, as the field is immutable" for path in given_up
    ]
    return allowed(request, updated, [*warnings, *resized])


async def mutate_trainjob(request: AdmissionRequest, operator: Admission) -> Json:
    """A TrainJob is created: the Kubeflow Trainer copies its label to the JobSet that it makes."""
    try:
        labelled = label_handed_on(request.object)
    except CAUSES as error:
        _log_unreadable(request, "TrainJob", error)
        labelled = request.object
    return allowed(request, labelled)


async def _unserved(jobset: Json, policy: CheckpointPolicy, operator: Admission) -> tuple[str | None, list[str]]:
    """Returns why the installed JobSet API cannot keep the contract, or None; and warnings."""
    if is_job(jobset):
        return None, []  # Kubernetes itself serves all that its contract needs
    try:
        installed = await operator.installed_workload_api()
        if installed != InstalledApi():
            installed = await operator.installed_workload_api(afresh=True)  # JobSet may have been upgraded a moment ago
    except Exception as error:
        extra = seldom(type(error).__name__)
        logger.warning("the JobSet API that is installed cannot be read", exc_info=error, extra=extra)
        return None, [f"whether JobSet is v0.10 or newer, as Gracepoint needs, could not be read just now ({error})"]
    return installed.refusal(jobset, policy.spec), [] if installed.warning is None else [installed.warning]


async def mutate_pod(request: AdmissionRequest, operator: Admission) -> Json:
    """A pod is created: sets the current address of the operator and avoids disrupted nodes.

    If the size of its gang may change, it also gets its present place. If that cannot be read, the pod is refused, and
    the Job controller creates it again.
    """
    pod = request.object
    try:
        if LABEL_POLICY in request.labels and is_injected(pod):
            pod = avoid_nodes(refresh_pod(pod, operator.settings), operator.disrupted_nodes())
            if is_elastic(pod):
                pod = resized_pod(pod, await operator.places(request.namespace, request.labels))
    except CAUSES as error:
        # The API server checks an object against its schema only after the webhooks that may change it.
        _log_unreadable(request, "pod", error)
    except Exception as error:
        logger.exception("the present size of a gang could not be read", extra=seldom(type(error).__name__))
        return unknown(request, f"the present size of the pod's gang could not be read just now ({error!r}). Try again")
    return allowed(request, pod)


async def validate_eviction(request: AdmissionRequest, operator: Admission) -> Json:
    """A pod is to be evicted: answers 429 while its gang saves.

    If anything fails here, the eviction is allowed: a drain gives up at any answer but 429.
    """
    delete_options = request.object.get("deleteOptions")
    options: Json = delete_options if isinstance(delete_options, dict) else {}
    if request.dry_run or options.get("dryRun"):
        # kubectl drain --dry-run=server sets only the latter. It asks whether the eviction would be accepted, and in
        # the end it will be. If it were held, kubectl would try again until then.
        return allowed(request, request.object)
    try:
        pod = request.name or request.object["metadata"]["name"]
        uid = (options.get("preconditions") or {}).get("uid")
        hold = await operator.evictions.attempted(request.namespace, pod, uid)
    except Exception as error:
        extra = seldom(type(error).__name__)
        logger.exception("cannot decide about an eviction, it is let through", extra=extra)
        hold = None
    return allowed(request, request.object) if hold is None else later(request, hold.message)


def _log_refusal(request: AdmissionRequest, kind: str, policy: str, message: str) -> None:
    """The user who creates the workload gets the message, too."""
    fields = {"namespace": request.namespace, "policy": policy, "why": message}
    logger.info("a workload was refused", extra=seldom(kind, **fields))


def _log_unreadable(request: AdmissionRequest, kind: str, error: Exception) -> None:
    extra = seldom(kind, namespace=request.namespace)
    logger.warning("an object cannot be read", exc_info=error, extra=extra)


async def validate_request(request: AdmissionRequest, operator: Admission) -> Json:
    """A PreemptionRequest is created: refused if its namespace has too many."""
    try:
        refusal = await operator.why_requests_are_too_many(request.namespace)
    except Exception as error:
        logger.exception("the requests of a namespace could not be counted")
        return unknown(request, f"the PreemptionRequests of the namespace could not be counted ({error!r}). Try again")
    return allowed(request, request.object) if refusal is None else refused(request, refusal)


async def validate_policy(request: AdmissionRequest, operator: Admission) -> Json:
    """A policy is to be deleted: warns if workloads use it. It is not refused, as a namespace must come to its end."""
    users = operator.users_of(request.namespace, request.name)
    if not users:
        return allowed(request, request.object)
    more = f" and {len(users) - _NAMED_USERS} more" if len(users) > _NAMED_USERS else ""
    kind = "CheckpointPolicy" if request.namespace else "ClusterCheckpointPolicy"
    warning = (
        f"{kind} {request.name} is used by {', '.join(users[:_NAMED_USERS])}{more}. They keep the settings "
        "that they were created with; new ones that name it are refused"
    )
    return allowed(request, request.object, [warning])
