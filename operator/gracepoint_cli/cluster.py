"""The cluster as commands see it: synchronous calls, the kubeconfig's namespace, and errors that say what to do.

A ``Cluster`` owns an event loop and the threads of its client. Leaving its context ends both. ``find`` looks for a
workload by the name that a user gives, among the kinds that the operator knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import yaml

from gracepoint.wire.messages import printable
from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli import CommandError, ExitCode, NotAllowed
from gracepoint_operator.cache.resource_stores import PolicyStore
from gracepoint_operator.kube.client import KubeClient, KubeError, NotFound, Refused, Unavailable
from gracepoint_operator.kube.objects import (
    CLUSTER_POLICIES,
    NAMESPACES,
    PODS,
    POLICIES,
    Kind,
    owner_uid,
    read_labels,
    true_conditions,
)
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, default_of
from gracepoint_operator.resources.policy import DEFAULT_LONGEST_HOLD_S
from gracepoint_operator.workloads import (
    ANY_NAME_OR_MAKER,
    BY_NAME,
    MAKERS,
    TYPES,
    Workload,
    WorkloadMaker,
    WorkloadType,
    membership_of,
)

Json = dict[str, Any]
_T = TypeVar("_T")

_NAME = "gracepoint-cli"
_FORBIDDEN = "HTTP 403"


class Cluster:
    """One cluster, by a context of a kubeconfig.

    Args:
        kubeconfig: Path of the kubeconfig, or several as in KUBECONFIG. None: KUBECONFIG, else ``~/.kube/config``, else
            the service account of the pod.
        context: Name of a context. None: the current one.
        as_user: The user to act as. None: the one of the configuration.
        request_timeout_s: Seconds for one request. None: a few, and more for lists.
        as_groups: The groups of that user.

    Raises:
        CommandError: There is no usable configuration, or there are groups without a user.
    """

    def __init__(
        self,
        kubeconfig: str | None = None,
        context: str | None = None,
        as_user: str | None = None,
        request_timeout_s: float | None = None,
        as_groups: Sequence[str] | None = None,
    ) -> None:
        if as_groups and as_user is None:
            todo = "Name one with --as: the API server takes no groups by themselves"
            raise CommandError("found --as-group, expected a user, too", todo, ExitCode.USAGE)
        path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        configured = kubeconfig or context or any(map(os.path.exists, path.split(os.pathsep)))
        in_pod = not configured and "KUBERNETES_SERVICE_HOST" in os.environ
        self._context: Json = {} if in_pod else _read_context(path, context)
        try:
            with _logged_errors() as login:
                self._client = KubeClient.connect(
                    None if in_pod else path,
                    context,
                    name=_NAME,
                    as_user=as_user,
                    as_groups=as_groups or (),
                    request_timeout_s=request_timeout_s,
                )
        except (KubeError, OSError, ValueError) as error:
            reason = error.__cause__ or error
            raise CommandError(
                f"no cluster: {'the service account of this pod' if in_pod else path}: {reason}",
                "Name a kubeconfig (--kubeconfig) and a context (--context)",
            ) from error
        if login:
            self._client.close()
            raise CommandError(
                f"no cluster: the login program that {path} names for the context has failed: {'; '.join(login)}",
                "Install it, or log in again, until this answers: kubectl get namespaces",
            )
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._runner.close()

    @property
    def namespace(self) -> str:
        """The namespace of the context."""
        return str(self._context.get("namespace") or "default")

    @property
    def server(self) -> str:
        return self._client.credentials().server

    def get(self, kind: Kind, namespace: str | None, name: str, *, todo: str = "") -> Json:
        """Returns an object.

        Raises:
            CommandError: There is none, or it cannot be read. If there is none, the error gives ``todo`` as advice.
        """
        body = self.find(kind, namespace, name)
        if body is None:
            where = f" in the namespace {namespace!r}" if namespace else ""
            raise CommandError(f"{kind.plural}: found none named {name!r}{where} at {self.server}", todo)
        return body

    def find(self, kind: Kind, namespace: str | None, name: str) -> Json | None:
        """Returns an object. None if there is none, or if the cluster does not have its kind."""
        try:
            return _shown(self._run(self._client.get(kind, namespace, name)))
        except NotFound:
            return None

    def list(self, kind: Kind, namespace: str | None, *, labels: str | None = None) -> list[Json]:
        """Returns the objects of a kind in a namespace, or in all. Empty if the cluster does not have the kind."""
        try:
            return _shown(self._run(self._client.list(kind, label_selector=labels, namespace=namespace)).items)
        except NotFound:
            return []

    def create(self, kind: Kind, namespace: str, body: Json) -> Json:
        return self._run(self._client.create(kind, namespace, body))

    def merge(self, kind: Kind, namespace: str, name: str, body: Json) -> Json:
        return self._run(self._client.merge(kind, namespace, name, body))

    def delete(self, kind: Kind, body: Json) -> None:
        """Deletes an object as it was read. It is no error if it does not exist any more."""
        try:
            self._run(self._client.delete(kind, body))
        except NotFound:
            return

    def path(self, path: str) -> Json:
        """Returns what the API server answers under a path that is no object's, for example ``/version``."""
        prefix, _, name = path.rpartition("/")
        return _shown(self._run(self._client.get(Kind(prefix, name), None, "")))

    def _run(self, call: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._runner.run(call)
        except NotFound:
            raise
        except Unavailable as error:
            raise CommandError(
                f"the API server {self.server} does not answer: {_short(error)}",
                "Check the network, the VPN and the context (kubectl config current-context)",
            ) from error
        except Refused as error:
            kind = NotAllowed if _FORBIDDEN in str(error) else CommandError
            raise kind(f"the API server refused: {_short(error)}", _right(str(error))) from error
        except KubeError as error:
            raise CommandError(f"the API server: {_short(error)}") from error


class _Collector(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collects the errors that the client's package logs instead of raising them: a login program that fails."""
    collector, root = _Collector(), logging.getLogger()
    root.addHandler(collector)
    try:
        yield collector.messages
    finally:
        root.removeHandler(collector)


def _shown(value: _T) -> _T:
    """An object with all texts as a terminal may get them: anybody may have written into it."""
    match value:
        case str():
            return cast(_T, printable(value))
        case dict():
            return cast(_T, {printable(key): _shown(item) for key, item in value.items()})
        case list():
            return cast(_T, [_shown(item) for item in value])
    return value


def _short(error: KubeError) -> str:
    """Returns the reason. If the connection failed, only the system's text: the caller's message names the server."""
    system = re.search(r"\[Errno -?\d+\] ([\w ]+)", str(error)) if isinstance(error, Unavailable) else None
    return system[1] if system else str(error)[:600]


def _right(message: str) -> str:
    if "HTTP 401" in message:
        return "Log in again: the credentials of the context have expired or are wrong"
    if _FORBIDDEN in message:
        return (
            "Ask for a role: `view` in the namespace reads everything here, `edit` also requests drills. "
            "Nodes and the operator's own objects need a role of the cluster"
        )
    return ""


def _read_context(path: str, name: str | None) -> Json:
    """Returns the context of the kubeconfig. Of several files, the first that has a value counts, as in kubectl."""
    contexts: dict[str, Json] = {}
    current = name
    for part in path.split(os.pathsep):
        if not part or not os.path.exists(part):
            continue
        try:
            config = yaml.safe_load(Path(part).read_text(encoding="utf-8")) or {}
            if not isinstance(config, dict):
                raise CommandError(f"{part}: expected a kubeconfig, found a {type(config).__name__}")
            for item in config.get("contexts") or []:
                contexts.setdefault(item["name"], item.get("context") or {})
            current = current or config.get("current-context")
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise CommandError(f"{part}: expected a kubeconfig: {' '.join(str(error).split())}") from error
    if not contexts:
        raise CommandError(
            f"no cluster: found no kubeconfig with a context at {path}",
            "Name one with --kubeconfig or KUBECONFIG, or log in to your cluster first",
        )
    if current is None:
        raise CommandError(
            f"no cluster: {path} has no current context",
            f"Name one of these with --context: {', '.join(sorted(contexts))}",
        )
    if current not in contexts:
        raise CommandError(
            f"no cluster: found no context {current!r} in {path}",
            f"Name one of these with --context: {', '.join(sorted(contexts))}",
        )
    return contexts[current]


_KINDS: tuple[WorkloadType | WorkloadMaker, ...] = (*TYPES, *MAKERS)


@dataclasses.dataclass(frozen=True)
class Named:
    """A workload as a user names it: KIND/NAME as kubectl writes it, or NAME alone.

    The kinds are those that the operator knows, and those whose controllers make such workloads.

    Attributes:
        kind: Its kind, or the kind of what makes it, as in the API. None: any.
    """

    kind: str | None
    name: str

    @property
    def of_workload(self) -> str | None:
        """The kind of the workload itself. None: any."""
        kinds = {maker.name: maker.makes.name for maker in MAKERS}
        return self.kind if self.kind is None else kinds.get(self.kind, self.kind)


@dataclasses.dataclass(frozen=True)
class WorkloadMatch:
    """A workload of the cluster.

    Attributes:
        type: What the operator knows of its kind.
        body: The object, with its kind.
        maker: The kind of the object that made it, for example TrainJob. Empty if its user created it.
    """

    type: WorkloadType
    body: Json
    maker: str = ""

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])

    @property
    def title(self) -> str:
        """How messages call it, for example ``JobSet llm``."""
        return f"{self.type.name} {self.name}" + (f" of the {self.maker} {self.name}" if self.maker else "")

    def read(self) -> Workload:
        """Returns what the operator reads of it.

        Raises:
            CommandError: A part of it is not of the schema.
        """
        try:
            return self.type.read(self.body)
        except Unreadable as error:
            raise CommandError(f"the {self.title} cannot be read: {error}") from error


def parse(text: str) -> Named:
    """Reads KIND/NAME or NAME. The kind may be singular, plural or with its group, in any case, as for kubectl.

    Raises:
        CommandError: The kind is not known, or there is no name.
    """
    written, slash, name = text.rpartition("/")
    if not slash:
        return Named(None, text)
    kind_name, _, group = written.lower().partition(".")
    for candidate in _KINDS:
        if (
            kind_name in (candidate.name.lower(), candidate.kind.plural)
            and group in ("", candidate.kind.group)
            and name
        ):
            return Named(candidate.name, name)
    kinds = ", ".join(f"{candidate.name.lower()}/NAME" for candidate in _KINDS)
    raise CommandError(f"found {text!r}, expected NAME or one of {kinds}", code=ExitCode.USAGE)


def made_by(body: Mapping[str, Any]) -> str:
    """Returns the kind of the object that made a workload. Empty if its user created it."""
    reference = owner(body)
    return next((maker.name for maker in MAKERS if maker.name == reference.get("kind")), "")


def called(kind: str, name: str, maker: str = "") -> str:
    """Returns how a user names a workload on the command line."""
    return f"{(maker or kind).lower()}/{name}"


def owner(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the reference to the object that controls this one. Empty if there is none."""
    references = body["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})


#: Conditions of a maker that has ended. Its workload may have been deleted.
_ENDED = {"Complete", "Failed"}
_TO_LIST = "To see the jobs there are: kubectl gracepoint status -A"


def find(cluster: Cluster, namespace: str, text: str, *, todo: str = _TO_LIST) -> WorkloadMatch:
    """Returns the workload that a user names.

    Args:
        cluster: The cluster.
        namespace: The namespace.
        text: What the user wrote.
        todo: Advice if there is none.

    Raises:
        CommandError: There is none, there are several, or it cannot be read.
    """
    named = parse(text)
    refused: list[NotAllowed] = []
    matches = [
        WorkloadMatch(candidate, {**body, "kind": candidate.name}, made_by(body))
        for candidate in TYPES
        if named.kind in (None, candidate.name)
        if (body := _look(cluster, candidate, namespace, named, refused)) is not None
    ]
    if len(matches) > 1:
        kinds = " and a ".join(item.type.name for item in matches)
        choice = " or ".join(f"{item.type.name.lower()}/{named.name}" for item in matches)
        raise CommandError(f"found a {kinds} named {named.name!r}", f"Say which: {choice}", ExitCode.USAGE)
    if matches:
        _belongs_to_no_other(matches[0])
        return matches[0]
    for maker in MAKERS:
        if named.kind in (None, maker.name):
            maker_body = _look(cluster, maker, namespace, named, refused)
            if maker_body is not None:
                return _made_by(cluster, maker, maker_body)
    kind = named.kind or ANY_NAME_OR_MAKER
    message = f"found no {kind} named {named.name!r} in the namespace {namespace!r} at {cluster.server}"
    raise CommandError(
        "; ".join([message, *(f"not all kinds could be looked at: {reason}" for reason in refused[:1])]), todo
    )


def listed(cluster: Cluster, namespace: str | None) -> tuple[list[Json], list[str]]:
    """Returns the workloads under a policy, with their kinds, and why some kinds could not be listed."""
    bodies_found: list[Json] = []
    problems: list[str] = []
    for workload_type in TYPES:
        try:
            bodies = cluster.list(workload_type.kind, namespace, labels=workload_type.selector)
        except NotAllowed as error:
            problems.append(f"{workload_type.name}s are not shown: {error}")
            continue
        bodies_found += [{**body, "kind": workload_type.name} for body in bodies]
    return bodies_found, problems


def without_workload(cluster: Cluster, namespace: str | None, workloads: list[Json]) -> list[tuple[str, str]]:
    """Returns the makers (such as TrainJobs) under a policy that have no workload under a policy.

    Each with its name on the command line, and with what that means. Makers that have ended are left out.
    """
    uids = {str(owner(body).get("uid", "")) for body in workloads}
    unmade = []
    for maker in MAKERS:
        try:
            bodies = cluster.list(maker.kind, namespace, labels=LABEL_POLICY)
        except NotAllowed:
            continue  # a cluster that lacks the kind refuses those who may not read everything
        for body in bodies:
            meta = body["metadata"]
            if meta["uid"] not in uids and not _ENDED & true_conditions(body.get("status") or {}).keys():
                reason = (
                    f"it has no {maker.makes.name} under a policy, so it is not protected. Its controller says why: "
                    f"kubectl describe {maker.name.lower()} {meta['name']} -n {meta['namespace']}"
                )
                unmade.append((called(maker.name, meta["name"]), reason))
    return unmade


def completed(cluster: Cluster, namespace: str, incomplete: str) -> list[str]:
    """Returns the names of workloads under a policy that complete what a user has begun to type."""
    written, slash, prefix = incomplete.rpartition("/")
    if not slash:
        bodies, _ = listed(cluster, namespace)
        return sorted({name for body in bodies if (name := str(body["metadata"]["name"])).startswith(prefix)})
    named = parse(f"{written}/x")
    kinds = [workload_type for workload_type in TYPES if workload_type.name == named.of_workload]
    bodies = [
        body
        for workload_type in kinds
        for body in cluster.list(workload_type.kind, namespace, labels=workload_type.selector)
    ]
    names = (str(body["metadata"]["name"]) for body in bodies if named.kind in (made_by(body), named.of_workload))
    return sorted(f"{written}/{name}" for name in names if name.startswith(prefix))


def pods_of(cluster: Cluster, namespace: str, kind: str, name: str, uid: str) -> list[Json]:
    """Returns the pods of a workload that exist now."""
    labels = BY_NAME[kind].record_labels(name, uid)
    return cluster.list(PODS, namespace, labels=",".join(f"{key}={value}" for key, value in labels.items()))


def _look(
    cluster: Cluster, kind: WorkloadType | WorkloadMaker, namespace: str, named: Named, refused: list[NotAllowed]
) -> Json | None:
    """Returns the object of that name. None if there is none, or if one of several kinds may not be read."""
    try:
        return cluster.find(kind.kind, namespace, named.name)
    except NotAllowed as error:
        if named.kind is not None:
            raise
        # A cluster may lack the kind. It then refuses those who may not read everything.
        refused.append(error)
        return None


def _belongs_to_no_other(match: WorkloadMatch) -> None:
    """Raises if a part of a workload was named, such as a Job of a JobSet."""
    meta = match.body["metadata"]
    belongs = membership_of(read_labels(meta)).workload_uid
    if belongs in ("", meta["uid"]):
        return
    reference = owner(match.body)
    kind, name = str(reference.get("kind", "")), str(reference.get("name", ""))
    raise CommandError(
        f"the {match.title} belongs to the {kind} {name}", f"Name that one: {called(kind, name)}", ExitCode.USAGE
    )


def _made_by(cluster: Cluster, maker: WorkloadMaker, body: Json) -> WorkloadMatch:
    meta, made_type = body["metadata"], maker.makes
    body_of_made = cluster.find(made_type.kind, meta["namespace"], meta["name"])
    if body_of_made is None or owner_uid(body_of_made["metadata"]) != meta["uid"]:
        raise CommandError(
            f"the {maker.name} {meta['name']} has no {made_type.name} yet",
            f"Its controller says why: kubectl describe {maker.name.lower()} {meta['name']} -n {meta['namespace']}",
        )
    return WorkloadMatch(made_type, {**body_of_made, "kind": made_type.name}, maker.name)


def applied_policy(cluster: Cluster, namespace: str, name: str | None) -> CheckpointPolicy | None:
    """Returns the policy that applies to workloads of a namespace, under the limits of administrators.

    Args:
        cluster: The API server. If its user may not read what is not in the namespace, that is left out.
        namespace: The namespace.
        name: The policy that a workload names. None: it names none, and gets the default.

    Raises:
        CommandError: The policy cannot be used, or the API server does not answer.
    """
    store = PolicyStore(DEFAULT_LONGEST_HOLD_S)
    try:
        try:
            of_cluster = [_cluster_policy(body) for body in cluster.list(CLUSTER_POLICIES, None)]
            labels = read_labels(cluster.get(NAMESPACES, None, namespace)["metadata"]) if of_cluster else {}
        except NotAllowed:
            of_cluster, labels = [], {}
        for policy in of_cluster:
            store.put_cluster(policy)
        store.put_labels(namespace, labels)
        if name is None:
            default = default_of(of_cluster, labels)
            name = None if default is None else default.name
        if name and (body := cluster.find(POLICIES, namespace, name)) is not None:
            store.put((namespace, name), CheckpointPolicy.of(body))
    except Unreadable as error:
        raise CommandError(f"the policy {name!r} cannot be used: {error}", code=ExitCode.BAD) from error
    return store.get((namespace, name)) if name else None


def _cluster_policy(body: Json) -> ClusterCheckpointPolicy:
    try:
        return ClusterCheckpointPolicy.of(body)
    except Unreadable as error:
        text = f"the ClusterCheckpointPolicy {body['metadata']['name']!r} cannot be used: {error}"
        raise CommandError(text, code=ExitCode.BAD) from error
