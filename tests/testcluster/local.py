"""The local provider: a cluster of real nodes on this machine, without Docker.

Machines are made of Linux namespaces (``sandbox``): one for the control plane, which is also a tainted node
for DNS and JobSet, and one for each worker. All real components run in them, built from source (``parts``).

Processes: the components, which end with the control plane's machine; a guardian (``runs``). Threads: a
pool while starting or loading images, which ends before the call returns.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.testcluster import addons, cache, diagnosis, images, network, parts, runs
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.control_plane import ADMIN, PROXY, ControlPlane, node_user
from tests.testcluster.images import Image
from tests.testcluster.listing import Listing
from tests.testcluster.node import Node
from tests.testcluster.shell import run, say, wait_until


def build_everything() -> list[Image]:
    """Build what clusters are made of, unless it is in the cache; tells how it goes.

    Returns:
        The images of the cluster's own pods, and the base image.
    """
    parts.build()
    return images.system_images()


#: For a kubelet that was held back.
_NODE_READY_S = 60.0


class LocalCluster(Cluster):
    """A cluster of real nodes on this machine. Use ``create`` or ``attach``."""

    def __init__(self, record: runs.Record, *, owned: bool) -> None:
        """Use a cluster that runs; ``owned`` says that ``close`` removes it."""
        self.record = record
        self._owned = owned
        self._control_plane = ControlPlane(
            record.sandbox(addons.CONTROL_PLANE),
            record.folder / "control-plane",
            record.logs,
            record.network.node_ip(0),
        )
        self.kubeconfig = self._control_plane.kubeconfig(ADMIN)

    @classmethod
    def create(cls, name: str, *, nodes: int = 2, bound: bool = True) -> LocalCluster:
        """Start a cluster.

        Args:
            name: Its name.
            nodes: How many nodes, besides the control plane.
            bound: The cluster ends with this process, even if this is killed; else it stays until it is
            taken down.

        Raises:
            ClusterError: It did not come up; what there was of it is removed, its logs are kept.
        """
        if not 1 <= nodes <= network.MAX_NODES:
            raise ClusterError(f"a cluster has 1 to {network.MAX_NODES} nodes, not {nodes}")
        system_images = build_everything()
        begin = time.monotonic()
        runs.sweep()
        with cache.lock("clusters", timeout_s=300):
            if runs.find(name):
                raise ClusterError(f"there is a cluster {name} already: python -m tests.testcluster down --name {name}")
            record = runs.Record(
                name=name,
                cluster_id=secrets.token_hex(3),
                nodes=nodes,
                subnet=network.free_subnet(),
                owner=runs.this_process(),  # while it starts, in any case
            )
            record.save()
            cluster = cls(record, owned=bound)
            try:
                cluster._control_plane.sandbox.create(parts.program("pause"), cluster._control_plane.sandbox.name)
                record.network.connect_control_plane(cluster._control_plane.sandbox)
            except BaseException:
                runs.remove(record)
                raise
        try:
            runs.start_guardian(record)
            say(f"starting cluster {name} with {nodes} nodes; logs in {record.logs}")
            cluster._start(system_images)
            if not bound:
                cluster.record = runs.release(record)
        except BaseException:
            diagnosis.write(cluster, record.logs)
            cluster._remove_but_keep_logs()
            raise
        say(f"cluster {name} is up after {time.monotonic() - begin:.0f} s")
        return cluster

    @classmethod
    def attach(cls, name: str) -> LocalCluster:
        """Use a cluster that runs, without owning it.

        Raises:
            ClusterError: There is none of that name.
        """
        record = runs.find(name)
        if record is None or record.sandbox(addons.CONTROL_PLANE).pid is None:
            raise ClusterError(f"no cluster {name} is running; start it: python -m tests.testcluster up --name {name}")
        return cls(record, owned=False)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the worker nodes whose machines run."""
        return tuple(name for name in self._all_names() if self.record.sandbox(name).pid is not None)

    @property
    def shared_dir(self) -> Path:
        """A folder of this host, which is the same on every node."""
        path = self.record.folder / "shared"
        path.mkdir(exist_ok=True)
        path.chmod(0o1777)  # pods that are not root write here
        return path

    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; see ``Cluster.kubectl``."""
        argv: list[str | Path] = [parts.program("kubectl"), f"--kubeconfig={self.kubeconfig}", *args]
        return run(argv, stdin=stdin, timeout_s=timeout_s, check=check, env={"NO_PROXY": "*"})

    @functools.cached_property
    def _listing(self) -> Listing:
        return Listing(self.kubeconfig)

    def listed(self, *resources: str, namespace: str) -> list[dict[str, Any]]:
        """The objects of resources, without kubectl; see ``Cluster.listed``."""
        return self._listing.of(resources, namespace)

    def helm(self, *args: str, timeout_s: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run helm; see ``Cluster.helm``."""
        argv: list[str | Path] = [parts.program("helm"), f"--kubeconfig={self.kubeconfig}", *args]
        return run(argv, timeout_s=timeout_s, check=check, env={"NO_PROXY": "*"})

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
        """Build an image and load it into all nodes; see ``Cluster.build_image``."""
        image = images.build(tag, dockerfile, context, build_args, extras=extras, requirements=requirements)
        self._remember(image)
        self.load([image], self.nodes)
        return image.name

    def lose_node(self, name: str, *, delete_object: bool = False) -> None:
        """Cut the node off the network, then kill it; see ``Cluster.lose_node``."""
        node = self._node(name)
        if node.sandbox.pid is None:
            raise ClusterError(f"{name} is not running")
        self.record.network.unplug_node(self._control_plane.sandbox, name)
        node.sandbox.kill()
        if delete_object:
            self.kubectl("delete", "node", name, "--ignore-not-found")

    def restore_node(self, name: str, *, timeout_s: float = 60) -> None:
        """Start a fresh machine under the old name; see ``Cluster.restore_node``."""
        node = self._node(name)
        if node.sandbox.pid is not None:
            raise ClusterError(f"{name} is running")
        # First, as that says when the old machine ended. To remove what it has written may take seconds.
        self.kubectl("delete", "node", name, "--ignore-not-found")
        node.remove()
        self._start_node(node, self._worker_images())
        self._wait_ready([name], timeout_s)

    @contextlib.contextmanager
    def shutting_down(self, name: str) -> Iterator[None]:
        """The node's machine goes down, as its kubelet hears from logind, and stays after all in the end.

        The kubelet ends the node's pods and takes no new ones; the machine itself is up all the time.
        """
        node = self._node(name)
        node.announce_shutdown()
        try:
            yield
        finally:
            node.announce_shutdown(cancelled=True)
        self._wait_ready([name], _NODE_READY_S)

    @contextlib.contextmanager
    def silenced(self, name: str) -> Iterator[None]:
        """The node's kubelet does and says nothing inside of this; its containers run on."""
        node = self._node(name)
        try:
            node.stop_kubelet()
            yield
        finally:
            node.continue_kubelet()
        self._wait_ready([name], _NODE_READY_S)

    def restart_kubelet(self, name: str, *, down_s: float) -> None:
        """Kill the node's kubelet, and start it again after so many seconds; its containers run on."""
        node = self._node(name)
        node.kill_kubelet()
        time.sleep(down_s)
        self._start_kubelet(node)

    def restart_containerd(self, name: str, *, down_s: float) -> None:
        """Kill the node's containerd, and start it again after so many seconds; its containers run on."""
        node = self._node(name)
        node.kill_containerd()
        time.sleep(down_s)
        node.start_containerd()

    @contextlib.contextmanager
    def without_image(self, name: str) -> Iterator[None]:
        """No node has the image inside of this, so that a kubelet would pull it; containers of it run on."""
        with contextlib.ExitStack() as stack:
            for node in map(self._node, self.nodes):
                node.hide(name)
                stack.callback(node.show, name)
            yield

    @contextlib.contextmanager
    def without_addresses(self) -> Iterator[Callable[[], None]]:
        """No node has an address for another pod inside of this; pods that have one keep it.

        Yields what takes those that pods have freed meanwhile.
        """
        nodes = [self._node(name) for name in self.nodes]

        def take() -> None:
            for node in nodes:
                node.take_addresses()

        with contextlib.ExitStack() as stack:
            for node in nodes:
                stack.callback(node.free_addresses)
            take()
            yield take

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """What happens inside of this the API server has forgotten after it.

        etcd's data are put back, and the control plane and the kubelets of ``nodes`` start anew, so that they do not go
        on with later versions. Those who restore etcd should start every client anew; here kube-proxy, CoreDNS, the
        control plane's own kubelet and the pods go on, and may miss changes until the API server has come to the
        versions that they know.
        """
        copy = self._control_plane.save_etcd()
        yield
        self._control_plane.restore_etcd(copy)
        for name in self.nodes:
            self.restart_kubelet(name, down_s=0)

    @contextlib.contextmanager
    def parted(self, name: str, pairs: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Nothing comes through the node from one address of a pair to the other inside of this, in both directions."""
        node = self._node(name)
        rules = [f"-s {one} -d {other} -j DROP" for pair in pairs for one, other in (pair, pair[::-1])]
        node.sandbox.script("\n".join(f"iptables -I FORWARD {rule}" for rule in rules))
        try:
            yield
        finally:
            node.sandbox.script("\n".join(f"iptables -D FORWARD {rule}" for rule in rules))

    def close(self) -> None:
        """Remove the cluster if this object has made it for this process."""
        if self._owned:
            runs.remove(self.record)

    def _start(self, system_images: Sequence[Image]) -> None:
        names = (addons.CONTROL_PLANE, *self._all_names())
        self.record.folder.joinpath("images").mkdir()
        for image in system_images:
            if image.name in (images.PAUSE, images.BASE):
                self._remember(image)
        own = [image for image in system_images if image.name != images.BASE]
        self._control_plane.make_credentials(names)
        manifests = addons.render(self.record.folder / "manifests")
        first = self._node(addons.CONTROL_PLANE)
        first.prepare()
        workers = [self._node(name) for name in self._all_names()]
        with ThreadPoolExecutor(len(workers) + 2, "testcluster-start") as pool:
            # containerd and images need no API server; kubelet waits for it by itself
            starting = [pool.submit(self._start_first, first, own)]
            starting += [pool.submit(self._start_node, node, self._worker_images()) for node in workers]
            self._control_plane.start()
            addons.apply(self, manifests)
            for each in starting:
                each.result()
        self._wait_ready(names, 90)
        role = addons.CONTROL_PLANE_ROLE
        self.kubectl("label", "node", addons.CONTROL_PLANE, f"{role}=", "--overwrite")
        addons.wait(self)

    def _start_first(self, node: Node, own: Iterable[Image]) -> None:
        node.start_containerd()
        for image in own:
            node.load(image)
        self._start_agents(node, taint=f"{addons.CONTROL_PLANE_ROLE}:NoSchedule")

    def _start_node(self, node: Node, wanted: Iterable[Image]) -> None:
        node.sandbox.create(parts.program("pause"), node.sandbox.name, inside=self._control_plane.sandbox)
        self.record.network.connect_node(self._control_plane.sandbox, node.sandbox, node.index, node.name)
        node.prepare()
        node.start_containerd()
        for image in wanted:
            node.load(image)
        self._start_agents(node)

    def _start_agents(self, node: Node, *, taint: str = "") -> None:
        node.start_logind()
        self._start_kubelet(node, taint=taint)
        node.start_proxy(self._control_plane.kubeconfig(PROXY))

    def _start_kubelet(self, node: Node, *, taint: str = "") -> None:
        node.start_kubelet(self._control_plane.kubeconfig(node_user(node.name)), self._control_plane.ca, taint=taint)

    def load(self, wanted: Sequence[Image], names: Sequence[str]) -> None:
        """Load images into these nodes alone."""

        def load(name: str) -> None:
            for image in wanted:
                self._node(name).load(image)

        with ThreadPoolExecutor(max(len(names), 1), "testcluster-load") as pool:
            list(pool.map(load, names))

    def _wait_ready(self, names: Sequence[str], timeout_s: float) -> None:
        jsonpath = '{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status} {end}'

        def ready() -> bool:
            answer = self.kubectl("get", "nodes", f"--output=jsonpath={jsonpath}").stdout.split()
            return all(f"{name}=True" in answer for name in names)

        wait_until(f"nodes {', '.join(names)} to be ready; logs in {self.record.logs}", ready, timeout_s=timeout_s)

    def _all_names(self) -> tuple[str, ...]:
        return tuple(f"node-{index}" for index in range(1, self.record.nodes + 1))

    def _node(self, name: str) -> Node:
        names = (addons.CONTROL_PLANE, *self._all_names())
        if name not in names:
            raise ClusterError(f"there is no node {name}; there are {', '.join(names[1:])}")
        return Node(
            name=name,
            index=names.index(name),
            sandbox=self.record.sandbox(name),
            folder=self.record.folder / "nodes" / name,
            logs=self.record.logs,
            cgroup=f"{self.record.cgroup}/{name}",
            network=self.record.network,
        )

    def _remember(self, image: Image) -> None:
        """Note an image that every node gets, also one that is restored later by another process."""
        note = self.record.folder / "images" / f"{cache.digest(image.name)}.json"
        note.write_text(image.to_json())

    def _worker_images(self) -> list[Image]:
        return [Image.from_json(note.read_text()) for note in sorted((self.record.folder / "images").iterdir())]

    def _remove_but_keep_logs(self) -> None:
        kept = cache.folder("failed") / self.record.name
        shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.record.logs.rename(kept)
        runs.remove(self.record)
        say(f"the logs of the cluster that failed are in {kept}")
