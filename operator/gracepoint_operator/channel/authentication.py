"""Who is calling: a pod, shown by its bound service-account token and by the cache.

The token contains the pod's UID. The API server says whether the token is valid and has our audience. A review is
cached for some seconds, so that not each report of a gang costs one. That the pod exists and runs is checked against
the cache every time, before the token is reviewed. Acknowledgements from a pod with an open stream need no review
(``service``).

So a caller that wants to load the API server must name a running pod of a workload, and gets one review at a time for
it. All callers together get ``_REVIEWS_AT_ONCE``, so that threads of ``KubeClient`` stay free. What the answer to an
eviction waits for goes first: when a replica is gone, thousands of pods come to the other one. Invalid tokens are
cached too. The controller's event loop owns the authenticator. A caller that waits for its turn delays nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import weakref
from collections.abc import Callable
from enum import StrEnum

from gracepoint.wire import names
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import client
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.workloads import ANY_NAME

_REMEMBER_S = 15.0
_REMEMBER_BAD_S = 5.0
_REVIEWS_AT_ONCE = 4
_LONGEST_TOKEN = 4096
_POD_UID = "authentication.kubernetes.io/pod-uid"
_USER_PREFIX = "system:serviceaccount:"


class AuthenticationFailure(StrEnum):
    """Why a request was refused; a label of the metric."""

    NO_TOKEN = "no_token"
    BAD_TOKEN = "bad_token"  # not authenticated, expired, or for another audience
    NOT_A_POD = "not_a_pod"  # good, but not bound to a pod
    OTHER_POD = "other_pod"  # the body speaks for another pod, namespace, workload or attempt
    UNKNOWN_POD = "unknown_pod"  # no such pod of a workload is alive
    STOPPED_SESSION = "stopped_session"  # a newer session of the same pod came, or another is connected
    UNKNOWN_PREEMPTION = "unknown_preemption"
    BAD_MESSAGE = "bad_message"
    NOT_READY = "not_ready"  # this replica does not know the cluster yet, or cannot review tokens


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a valid token says."""

    namespace: str
    pod_uid: str


class RequestRefused(Exception):
    """A request on the channel that is not served; ``status`` is the HTTP status."""

    def __init__(self, status: int, reason: AuthenticationFailure, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Authenticator:
    """Checks callers.

    Args:
        api: Reviews tokens.
        cache: Has the pods.
        clock: Seconds since the epoch.
        remember_at_most: So many tokens are remembered.
    """

    def __init__(
        self, api: KubeClient, cache: ClusterCache, clock: Callable[[], float], remember_at_most: int = 20_000
    ) -> None:
        self._remember_at_most = remember_at_most
        self._api = api
        self._cache = cache
        self._clock = clock
        self._reviewed: dict[
            bytes, tuple[float, Identity | RequestRefused]
        ] = {}  # by digest: expiry in seconds since the epoch, outcome
        self._at_once = asyncio.Semaphore(_REVIEWS_AT_ONCE)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by pod UID

    async def admit(self, authorization: str, pod_uid: str) -> Pod:
        """Returns the running pod that calls, if the message is of this pod.

        Args:
            authorization: The Authorization header.
            pod_uid: The UID in the message.

        Raises:
            RequestRefused: It is another pod, or the token cannot be reviewed now.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise RequestRefused(
                401, AuthenticationFailure.NO_TOKEN, "expected the header Authorization: Bearer <token>"
            )
        self.living(pod_uid)  # before the review, so that only running pods of workloads cause reviews
        identity = await self._review(token.strip(), pod_uid)
        if identity.pod_uid != pod_uid:
            raise RequestRefused(
                403,
                AuthenticationFailure.OTHER_POD,
                f"pod_uid: found {pod_uid!r}, expected {identity.pod_uid!r}, to which the token is bound",
            )
        pod = self.living(pod_uid)  # again: the pod may have ended during the review
        if pod.namespace != identity.namespace:
            raise _unknown_pod(pod_uid, f"one in {identity.namespace!r}, as the token says")
        return pod

    def living(self, pod_uid: str) -> Pod:
        """Returns the pod if it exists and runs. Does not check the caller.

        Raises:
            RequestRefused: It does not exist, or has finished.
        """
        pod = self._cache.objects.pods.get(pod_uid)
        if pod is None or pod.finished:
            raise _unknown_pod(pod_uid, f"a running pod of a {ANY_NAME}")
        workload = self._cache.objects.workloads.get(pod.workload_uid)
        if workload is not None and workload.namespace != pod.namespace:
            raise _unknown_pod(pod_uid, f"a pod in the namespace of the {ANY_NAME} that its label names")
        return pod

    async def _review(self, token: str, pod_uid: str) -> Identity:
        if len(token) > _LONGEST_TOKEN:
            message = f"the token: found {len(token)} characters, expected at most {_LONGEST_TOKEN}"
            raise RequestRefused(401, AuthenticationFailure.BAD_TOKEN, message)
        digest = hashlib.sha256(token.encode()).digest()
        turn = self._turns.setdefault(pod_uid, asyncio.Lock())
        async with turn:
            until_at, outcome = self._reviewed.get(digest, (0.0, None))
            if outcome is None or self._clock() >= until_at:
                async with self._at_once:
                    await self._api.let_urgent_first()
                    outcome = await self._ask(token)
                remember_s = _REMEMBER_S if isinstance(outcome, Identity) else _REMEMBER_BAD_S
                if len(self._reviewed) >= self._remember_at_most:
                    self._reviewed.clear()
                self._reviewed[digest] = (self._clock() + remember_s, outcome)
        if isinstance(outcome, RequestRefused):
            raise RequestRefused(outcome.status, outcome.reason, str(outcome))
        return outcome

    async def _ask(self, token: str) -> Identity | RequestRefused:
        try:
            status = await self._api.review_token(token, names.TOKEN_AUDIENCE)
        except client.KubeError as error:
            message = f"the token could not be reviewed; try again ({error})"
            raise RequestRefused(503, AuthenticationFailure.NOT_READY, message) from error
        try:
            return _read_review(status)
        except RequestRefused as refusal:
            return refusal


def _unknown_pod(pod_uid: str, expected: str) -> RequestRefused:
    return RequestRefused(403, AuthenticationFailure.UNKNOWN_POD, f"pod_uid: found {pod_uid!r}, expected {expected}")


def _read_review(status: client.JsonObject) -> Identity:
    audience = names.TOKEN_AUDIENCE
    if not status.get("authenticated") or audience not in (status.get("audiences") or ()):
        reason = status.get("error") or f"it is expired, or not for the audience {audience!r}"
        raise RequestRefused(401, AuthenticationFailure.BAD_TOKEN, f"the token is not good: {reason}")
    user = status.get("user") or {}
    username = str(user.get("username") or "")
    uids = (user.get("extra") or {}).get(_POD_UID) or []
    if not username.startswith(_USER_PREFIX) or len(uids) != 1:
        message = "the token is not bound to a pod; expected a projected service-account token"
        raise RequestRefused(403, AuthenticationFailure.NOT_A_POD, message)
    return Identity(namespace=username.removeprefix(_USER_PREFIX).partition(":")[0], pod_uid=uids[0])
