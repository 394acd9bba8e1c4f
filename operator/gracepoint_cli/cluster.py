"""The cluster as commands see it: synchronous calls, the kubeconfig's namespace, and errors that say what to do.

A ``Cluster`` owns an event loop and the threads of its client. Leaving its context ends both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import yaml

from gracepoint.wire.codec import printable
from gracepoint_cli.errors import CommandError, ExitCode, NotAllowed
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.errors import KubeError, NotFound, Refused, Unavailable
from gracepoint_operator.kube.kinds import Kind

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
            with _heard() as login:
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
        found = self.find(kind, namespace, name)
        if found is None:
            where = f" in the namespace {namespace!r}" if namespace else ""
            raise CommandError(f"{kind.plural}: found none named {name!r}{where} at {self.server}", todo)
        return found

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
        prefix, _, last = path.rpartition("/")
        return _shown(self._run(self._client.get(Kind(prefix, last), None, "")))

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
def _heard() -> Iterator[list[str]]:
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
