"""What a test cluster can do, whoever provides it.

Starts no thread and no process.
"""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class ClusterError(Exception):
    """Something that the cluster was asked for did not happen; the message says what and where to look."""


class NotSupported(ClusterError):
    """This provider cannot do what was asked; the message says what to do instead."""


class Cluster(ABC):
    """A running Kubernetes cluster with JobSet in it.

    Use it as a context manager: leaving it removes what this process has started, and nothing else.
    """

    kubeconfig: Path
    """Credentials of a cluster administrator."""

    @property
    @abstractmethod
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that exist now."""

    @property
    @abstractmethod
    def shared_dir(self) -> Path:
        """A folder that is the same on this machine and on every node, for hostPath volumes and for tests to read."""

    @abstractmethod
    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl against this cluster.

        Raises:
            ClusterError: It failed (unless ``check`` is false) or took longer than ``timeout_s``.
        """

    def listed(self, *resources: str, namespace: str) -> list[dict[str, Any]]:
        """The objects of resources, such as ``pods`` or ``jobs.batch``.

        Raises:
            ClusterError: The API server refused it, or did not answer.
        """
        answer = self.kubectl("get", ",".join(resources), f"--namespace={namespace}", "--output=json")
        found: list[dict[str, Any]] = json.loads(answer.stdout)["items"]
        return found

    @abstractmethod
    def helm(self, *args: str, timeout_s: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run helm against this cluster. Raises as ``kubectl`` does."""

    @abstractmethod
    def build_image(
        self,
        tag: str,
        dockerfile: Path,
        context: Path,
        build_args: Mapping[str, str] | None = None,
        *,
        extras: Sequence[str] = (),
        requirements: Sequence[str] = (),
    ) -> str:
        """Build a Dockerfile and put the image on every node, also on those that come later.

        What is already built or on a node is not built or sent again.

        Args:
            tag: Name of the image, such as ``gracepoint.test/operator:dev``.
            dockerfile: The Dockerfile; it may take its base from ``ARG BASE``.
            context: The folder that it copies from.
            build_args: Further build arguments.
            extras: Optional dependencies of the pyproject.toml in ``context`` that the image installs with
            pip.
            requirements: Anything else that the image installs with pip.

        Returns:
            The name that pods use for the image; use it with ``imagePullPolicy: IfNotPresent``.
        """

    @abstractmethod
    def lose_node(self, name: str, *, delete_object: bool = False) -> None:
        """Make a node vanish as a preempted machine does: no goodbye, no closed connection, just silence.

        Args:
            name: The node.
            delete_object: Delete the Node object too, as a cloud's node controller does some time later.
        """

    @abstractmethod
    def restore_node(self, name: str, *, timeout_s: float = 60) -> None:
        """Bring a fresh machine of that name, and wait until it is ready."""

    @abstractmethod
    def close(self) -> None:
        """Give up the cluster; remove it if this object made it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
