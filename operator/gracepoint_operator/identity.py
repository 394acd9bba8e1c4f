"""Who is calling: a pod, shown by its bound service-account token and by our own view of the cluster.

The token says the pod's UID; the API server says whether the token is good, and for our audience. A review
is remembered for some seconds, so that a gang's reports do not each cost one; that the pod is there and alive
is asked of our own view every time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from enum import StrEnum

from gracepoint.wire import names
from gracepoint_operator import kube
from gracepoint_operator.kube import Kube
from gracepoint_operator.objects import Pod
from gracepoint_operator.world import World

_REMEMBER_S = 15.0
_REMEMBER_AT_MOST = 20_000
_POD_UID = "authentication.kubernetes.io/pod-uid"
_USER_PREFIX = "system:serviceaccount:"


class Reason(StrEnum):
    """Why a request was refused; a label of the metric."""

    NO_TOKEN = "no_token"
    BAD_TOKEN = "bad_token"  # not authenticated, expired, or for another audience
    NOT_A_POD = "not_a_pod"  # good, but not bound to a pod
    OTHER_POD = "other_pod"  # the body speaks for another pod, namespace, JobSet or attempt
    UNKNOWN_POD = "unknown_pod"  # no such pod of a JobSet is alive
    STOPPED_SESSION = "stopped_session"  # a newer session of the same pod is there
    UNKNOWN_PREEMPTION = "unknown_preemption"
    BAD_MESSAGE = "bad_message"
    NOT_READY = "not_ready"  # this replica does not know the cluster yet, or cannot review tokens


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a good token says."""

    namespace: str
    pod_uid: str


class RequestRefused(Exception):
    """A request on the channel that is not served; ``status`` is the HTTP status."""

    def __init__(self, status: int, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Gate:
    """Checks callers.

    Args:
        api: Reviews tokens.
        world: Knows the pods.
        clock: Seconds since the epoch.
    """

    def __init__(self, api: Kube, world: World, clock: Callable[[], float]) -> None:
        self._api = api
        self._world = world
        self._clock = clock
        self._reviewed: dict[bytes, tuple[float, Identity]] = {}

    async def admit(self, authorization: str, pod_uid: str) -> Pod:
        """The live pod that calls, if it is the one that the message speaks for.

        Args:
            authorization: The header.
            pod_uid: The UID in the message.

        Raises:
            RequestRefused: It is not, or one cannot know.
        """
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise RequestRefused(401, Reason.NO_TOKEN, "expected the header Authorization: Bearer <token>")
        identity = await self._review(token.strip())
        if identity.pod_uid != pod_uid:
            raise RequestRefused(
                403,
                Reason.OTHER_POD,
                f"pod_uid: found {pod_uid!r}, expected {identity.pod_uid!r}, to which the token is bound",
            )
        pod = self._world.pods.get(pod_uid)
        if pod is None or pod.finished or pod.namespace != identity.namespace:
            raise RequestRefused(
                403,
                Reason.UNKNOWN_POD,
                f"pod_uid: found {pod_uid!r}, expected a running pod of a JobSet in {identity.namespace!r}",
            )
        return pod

    async def _review(self, token: str) -> Identity:
        digest = hashlib.sha256(token.encode()).digest()
        now = self._clock()
        known = self._reviewed.get(digest)
        if known is not None and now - known[0] < _REMEMBER_S:
            return known[1]
        try:
            status = await self._api.review_token(token, names.TOKEN_AUDIENCE)
        except kube.KubeError as error:
            message = f"the token could not be reviewed; try again ({error})"
            raise RequestRefused(503, Reason.NOT_READY, message) from error
        identity = _read_review(status)
        if len(self._reviewed) >= _REMEMBER_AT_MOST:
            self._reviewed.clear()
        self._reviewed[digest] = (now, identity)
        return identity


def _read_review(status: kube.JsonObject) -> Identity:
    audience = names.TOKEN_AUDIENCE
    if not status.get("authenticated") or audience not in (status.get("audiences") or ()):
        why = status.get("error") or f"it is expired, or not for the audience {audience!r}"
        raise RequestRefused(401, Reason.BAD_TOKEN, f"the token is not good: {why}")
    user = status.get("user") or {}
    username = str(user.get("username") or "")
    uids = (user.get("extra") or {}).get(_POD_UID) or []
    if not username.startswith(_USER_PREFIX) or len(uids) != 1:
        message = "the token is not bound to a pod; expected a projected service-account token"
        raise RequestRefused(403, Reason.NOT_A_POD, message)
    return Identity(namespace=username.removeprefix(_USER_PREFIX).partition(":")[0], pod_uid=uids[0])
