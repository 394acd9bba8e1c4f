"""The provider for a cluster that exists already, such as kind's or one in a cloud.

It uses the context it was told to and nothing else; it makes nothing and removes nothing. Processes:
kubectl and helm of this machine, to their ends. Threads: none.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.testcluster import cache
from tests.testcluster.api import Cluster, NotSupported
from tests.testcluster.shell import run

SHARED_DIR_VARIABLE = "TESTCLUSTER_SHARED_DIR"


class ExistingCluster(Cluster):
    """A cluster named by a context of the user's kubeconfig."""

    def __init__(self, context: str) -> None:
        """Use the context of that name.

        Raises:
            ClusterError: There is no such context, or its cluster does not answer.
        """
        self._context = context
        view = ["kubectl", "config", "view", "--minify", "--flatten", f"--context={context}"]
        answer = run(view)  # a file of its own: whatever uses it can reach no other cluster
        self.kubeconfig = cache.folder("existing") / f"{cache.digest(context)}.kubeconfig"
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(answer.stdout)
        run(["kubectl", f"--kubeconfig={self.kubeconfig}", f"--context={context}", "get", "--raw=/readyz"])

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that pods may be scheduled to."""
        template = "{range .items[?(!@.spec.unschedulable)]}{.metadata.name} {end}"
        selector = "--selector=!node-role.kubernetes.io/control-plane"
        return tuple(self.kubectl("get", "nodes", selector, f"--output=jsonpath={template}").stdout.split())

    @property
    def shared_dir(self) -> Path:
        """The folder that ``TESTCLUSTER_SHARED_DIR`` names, which the user shares with all nodes."""
        value = os.environ.get(SHARED_DIR_VARIABLE)
        if not value or not Path(value).is_dir():
            raise NotSupported(
                f"set {SHARED_DIR_VARIABLE} to a folder with the same path on this machine and on every node of "
                f"{self._context} (for kind: extraMounts)" + (f"; found none at {value}" if value else "")
            )
        return Path(value).absolute()

    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run this machine's kubectl; see ``Cluster.kubectl``."""
        argv = ["kubectl", f"--kubeconfig={self.kubeconfig}", f"--context={self._context}", *args]
        return run(argv, stdin=stdin, timeout_s=timeout_s, check=check)

    def helm(self, *args: str, timeout_s: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run this machine's helm; see ``Cluster.helm``."""
        argv = ["helm", f"--kubeconfig={self.kubeconfig}", f"--kube-context={self._context}", *args]
        return run(argv, timeout_s=timeout_s, check=check)

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
        """Not supported: how images reach this cluster is the user's to know."""
        raise NotSupported(
            f"cannot put images on the nodes of {self._context}: "
            f"docker build --tag {tag} --file {dockerfile} {context}; "
            f"then push it to a registry of that cluster (for kind: kind load docker-image {tag})"
        )

    def lose_node(self, name: str, *, delete_object: bool = False) -> None:
        """Not supported: the machine is not ours."""
        raise NotSupported(f"delete the machine of {name} with the tool that made it (for kind: docker kill {name})")

    def restore_node(self, name: str, *, timeout_s: float = 60) -> None:
        """Not supported: the machine is not ours."""
        raise NotSupported(
            f"make the machine of {name} again with the tool that made it (for kind: docker start {name})"
        )

    def close(self) -> None:
        """Do nothing: the cluster was there before."""
