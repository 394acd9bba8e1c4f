"""The provider for people with Docker or Podman: a cluster made by kind, whose nodes are containers.

It takes published images, for nodes (kind's own), for JobSet and for ``python:3.11-slim-bookworm``, so it needs the
internet the first time, and builds no part of Kubernetes.

Processes: kind, docker or podman, kubectl and helm, to their ends. Threads: none. A cluster outlives this process if
the process is killed; ``python -m tests.testcluster down`` removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.testcluster import addons, cache, engines, parts
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.engines import Engine
from tests.testcluster.parts import progress
from tests.testcluster.shell import run, say, wait_until

PREFIX = "gracepoint-"
"""First part of the names that kind knows these clusters by."""
NETWORK = "kind"
"""Name that kind gives to the network of all its nodes."""
_TOOLS = ("kind", "kubectl", "helm")
_ROLE = addons.CONTROL_PLANE_ROLE
_CREATE_S = 900
_READY_S = 300
NODE_IMAGE_VARIABLE = "TESTCLUSTER_NODE_IMAGE"
"""Image of the nodes in place of kind's own, such as one of a mirror."""
JOBSET_VARIABLE = "TESTCLUSTER_JOBSET_MANIFEST"
"""File or URL of JobSet's manifests in place of the published ones."""
#: Where root may not lower oom_score_adj, as in some containers and virtual machines, no pod would start without this.
_CONTAINERD = '[plugins."io.containerd.grpc.v1.cri"]\n  restrict_oom_score_adj = true\n'
_JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/{version}/manifests.yaml"
#: A lost worker must not take JobSet's controller with it. If it were patched after it was applied, a second pod would
#: wait for the certificate of the first one.
_POD = "/spec/template/spec"
_ON_CONTROL_PLANE = [
    {"op": "add", "path": f"{_POD}/nodeSelector", "value": {_ROLE: ""}},
    {"op": "add", "path": f"{_POD}/tolerations", "value": [{"key": _ROLE, "operator": "Exists"}]},
]


def why_not_kind() -> str | None:
    """Why kind cannot make a cluster on this machine, with the fix; None if it can."""
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    engine, reasons = engines.find()
    problems = []
    if missing:
        problems.append(f"{', '.join(missing)}: not found (kind.sigs.k8s.io, kubernetes.io/docs/tasks/tools, helm.sh)")
    if engine is None:
        problems.append(f"no container engine: {reasons}")
    return "; ".join(problems) or None


def names() -> list[str]:
    """Names of the clusters that were made here and not removed."""
    return sorted(path.name for path in cache.folder("kind").iterdir() if path.is_dir())


def remove(name: str) -> None:
    """Removes a cluster, whoever made it.

    Raises:
        ClusterError: No container engine answers.
    """
    engine, reasons = engines.find()
    if engine is None:
        raise ClusterError(f"no container engine to remove cluster {name} of kind with: {reasons}")
    KindCluster(name, engine, owned=True).close()


class KindCluster(Cluster):
    """A cluster made by kind. Use ``create`` or ``attach``."""

    def __init__(self, name: str, engine: Engine, *, owned: bool) -> None:
        """Use a cluster that runs; ``owned`` says that ``close`` removes it."""
        self.name = f"{PREFIX}{name}"
        self._engine = engine
        self._owned = owned
        self._folder = cache.folder("kind", name)
        self.kubeconfig = self._folder / "kubeconfig"

    @classmethod
    def create(cls, name: str, *, nodes: int = 2, bound: bool = True) -> KindCluster:
        """Make a cluster with JobSet.

        Args:
            name: Its name.
            nodes: How many workers, besides the control plane.
            bound: ``close`` removes it.

        Raises:
            ClusterError: kind cannot run here, or the cluster did not come up; what there was of it is removed.
        """
        reason = why_not_kind()
        engine = engines.find()[0]
        if reason or engine is None:
            raise ClusterError(f"kind cannot run here: {reason}")
        cluster = cls(name, engine, owned=bound)
        if cluster.name in cluster._kind("get", "clusters").split():
            raise ClusterError(f"there is a cluster {name} already: python -m tests.testcluster down --name {name}")
        begin = time.monotonic()
        configuration = cluster._folder / "cluster.json"
        configuration.write_text(json.dumps(cluster.configuration(nodes), indent=2))
        try:
            with progress(f"kind makes cluster {cluster.name} by {engine.name}, with {nodes} workers"):
                cluster._kind(
                    *("create", "cluster", f"--name={cluster.name}", f"--config={configuration}"),
                    *(f"--kubeconfig={cluster.kubeconfig}", f"--wait={_READY_S}s"),
                    timeout_s=_CREATE_S,
                )
            cluster._add_jobset()
        except BaseException:
            cluster._remove()
            raise
        say(f"cluster {cluster.name} is up after {time.monotonic() - begin:.0f} s; KUBECONFIG={cluster.kubeconfig}")
        return cluster

    @classmethod
    def attach(cls, name: str) -> KindCluster:
        """Use a cluster that runs, without owning it.

        Raises:
            ClusterError: There is none of that name.
        """
        engine, reasons = engines.find()
        if engine is None:
            raise ClusterError(f"no container engine: {reasons}")
        cluster = cls(name, engine, owned=False)
        if not cluster.nodes or not cluster.kubeconfig.exists():
            raise ClusterError(f"kind has no cluster {cluster.name} that runs")
        return cluster

    def configuration(self, nodes: int) -> dict[str, Any]:
        """What kind is asked for: every node has the shared folder under the same path."""
        folder = str(self.shared_dir)
        mounts = [{"hostPath": folder, "containerPath": folder}]
        image = os.environ.get(NODE_IMAGE_VARIABLE)
        same: dict[str, Any] = {"extraMounts": mounts} | ({"image": image} if image else {})
        roles = ("control-plane", *["worker"] * nodes)
        return {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "nodes": [{"role": role, **same} for role in roles],
            "containerdConfigPatches": [_CONTAINERD],
        }

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the workers whose containers run."""
        return self._engine.containers(*self._labels)

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of the workers that do not run, for ``restore_node``."""
        return tuple(sorted({*self._engine.containers(*self._labels, stopped=True)} - {*self.nodes}))

    @property
    def shared_dir(self) -> Path:
        """A folder of this machine, mounted into every node."""
        path = self._folder / "shared"
        path.mkdir(exist_ok=True)
        path.chmod(0o1777)  # pods that are not root write here
        return path

    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run this machine's kubectl; see ``Cluster.kubectl``."""
        argv = ["kubectl", f"--kubeconfig={self.kubeconfig}", *args]
        return run(argv, stdin=stdin, timeout_s=timeout_s, check=check)

    def helm(self, *args: str, timeout_s: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run this machine's helm; see ``Cluster.helm``."""
        return run(["helm", f"--kubeconfig={self.kubeconfig}", *args], timeout_s=timeout_s, check=check)

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
        """Build an image by the engine and load it into all workers; see ``Cluster.build_image``.

        ``extras`` and ``requirements`` are not needed: the build downloads what it installs.
        """
        with progress(f"{self._engine.name} builds image {tag}"):
            image = self._engine.build(tag, dockerfile, context, build_args or {})
        self._load(tag, image)
        return tag

    def lose_node(self, name: str, *, delete_object: bool = False) -> None:
        """Cut the node off the network, then kill it; see ``Cluster.lose_node``."""
        if name not in self.nodes:
            raise ClusterError(f"{name} is not running; running are {', '.join(self.nodes) or 'none'}")
        # First the network: nothing of what dies then can say goodbye.
        self._engine.ask("network", "disconnect", "--force", NETWORK, name)
        self._engine.ask("kill", name)
        if delete_object:
            self.kubectl("delete", "node", name, "--ignore-not-found")

    def restore_node(self, name: str, *, timeout_s: float = 60) -> None:
        """Start the same container again, which keeps its disk and its images; see ``Cluster.restore_node``."""
        if name not in self.lost:
            raise ClusterError(f"{name} is not a worker that was lost; lost are {', '.join(self.lost) or 'none'}")
        self.kubectl("delete", "node", name, "--ignore-not-found")
        self._engine.ask("network", "connect", NETWORK, name)
        self._engine.ask("start", name)
        template = '--output=jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        wait_until(
            f"node {name} to be ready",
            lambda: self.kubectl("get", "node", name, template).stdout == "True",
            timeout_s=timeout_s,
            every_s=1,
        )

    def close(self) -> None:
        """Remove the cluster if this object has made it for this process."""
        if self._owned:
            self._remove()

    @property
    def _labels(self) -> tuple[str, str]:
        return f"io.x-k8s.kind.cluster={self.name}", "io.x-k8s.kind.role=worker"

    def _kind(self, *args: str, timeout_s: float = 120) -> str:
        env = {"KIND_EXPERIMENTAL_PROVIDER": self._engine.name}
        return run(["kind", *args], timeout_s=timeout_s, env=env).stdout

    def _add_jobset(self) -> None:
        manifests = os.environ.get(JOBSET_VARIABLE) or _JOBSET.format(version=parts.part("jobset").version)
        folder = self._folder / "jobset"
        folder.mkdir(exist_ok=True)
        if Path(manifests).exists():  # kustomize reads files of its own folder, and URLs
            manifests = Path(shutil.copy(manifests, folder)).name
        target = {"kind": "Deployment", "name": "jobset-controller-manager"}
        patches = [{"target": target, "patch": json.dumps(_ON_CONTROL_PLANE)}]
        (folder / "kustomization.yaml").write_text(json.dumps({"resources": [manifests], "patches": patches}))
        self.kubectl("apply", "--server-side", f"--kustomize={folder}", timeout_s=120)
        addons.wait(self, timeout_s=_READY_S)

    def _load(self, tag: str, image: str) -> None:
        """Send an image to the workers that do not have it yet."""
        note = self._folder / f"{cache.digest(tag)}.json"
        had = json.loads(note.read_text()) if note.exists() else {}
        there = set(had.get("nodes", ())) if had.get("image") == image else set()
        workers = {*self.nodes, *self.lost}
        missing = sorted({*self.nodes} - there)
        if not missing:
            return
        archive = self._folder / f"{image}.tar"
        with progress(f"loading image {tag} into {', '.join(missing)}"):
            self._engine.save(tag, archive)
            target = (f"--name={self.name}", f"--nodes={','.join(missing)}")
            self._kind("load", "image-archive", str(archive), *target, timeout_s=600)
        note.write_text(json.dumps({"image": image, "nodes": sorted((there | {*missing}) & workers)}))
        archive.unlink()

    def _remove(self) -> None:
        for node in self.nodes[:1]:  # what pods wrote belongs to their users
            with contextlib.suppress(ClusterError):
                self._engine.ask("exec", node, "find", self.shared_dir, "-mindepth", "1", "-delete")
        self._kind("delete", "cluster", f"--name={self.name}", f"--kubeconfig={self.kubeconfig}")
        shutil.rmtree(self._folder, ignore_errors=True)
