"""One node: a machine of namespaces in which containerd, kubelet and kube-proxy run as they do anywhere.

The machine has its own /run, /var/lib and /var/log, so every path in it is the standard one. What it writes
lies in its folder and is removed with it.

Processes: logind's stand-in with its bus, containerd, kubelet, kube-proxy and what they start, all of which end
with the machine. Threads: none.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster import cgroups, features, logind, parts
from tests.testcluster.images import PAUSE, Image, blob, layout
from tests.testcluster.network import DNS_IP, POD_CIDR, Network, cni_config
from tests.testcluster.sandbox import Sandbox, continue_process, processes, stop_process, with_argument
from tests.testcluster.shell import log_tail, wait_until
from tests.testcluster.system import cni_folder

_TUNABLES = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
"""What kubelet wants of the kernel. It is global, so kubelet finds it set, in files over the real ones."""

#: The minor version of Kubernetes from which the kubelet has the field. Since 1.35 its default is true.
_CAN_FAIL_CGROUP_V1 = 31
_SOCKET = "/run/containerd/containerd.sock"
#: A file for each address that a pod has, named after it, and what is in those that no pod has.
_ADDRESSES, _TAKEN = "/run/cni-ipam/pods", "taken"


@dataclass(frozen=True)
class Node:
    """A node.

    Attributes:
        name: Name of the machine and of its Node object.
        index: Its place in the network; 0 is the control plane.
        sandbox: Its namespaces.
        folder: Where all that it writes lies.
        logs: The folder of its components' logs.
        cgroup: The cgroup of its pods.
        network: The network that it is plugged into.
    """

    name: str
    index: int
    sandbox: Sandbox
    folder: Path
    logs: Path
    cgroup: str
    network: Network

    def prepare(self) -> None:
        """Give the machine its own folders; needed before anything runs in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("lib", "log", "tunables"):
            (self.folder / name).mkdir(parents=True)
        covers = []
        for number, (tunable, value) in enumerate(_TUNABLES.items()):
            cover = self.folder / "tunables" / str(number)
            cover.write_text(f"{value}\n")
            covers.append(f"mount --bind {cover} /proc/sys/{tunable}")
        self.sandbox.script(
            f"""
            hostname {self.name}
            mount --make-rshared /
            mount -t tmpfs -o mode=755 tmpfs /run
            mount --bind {self.folder}/lib /var/lib
            mount --bind {self.folder}/log /var/log
            mkdir -p /var/lib/kubelet /var/lib/cni/net.d
            """
            + "\n".join(covers)
        )
        (self.folder / "lib/cni/net.d/10-pods.conflist").write_text(cni_config(self.index))
        cgroups.create(self.cgroup)

    def start_containerd(self) -> None:
        """Start containerd and wait until it answers."""
        config = self._containerd_config
        config.write_text(_CONTAINERD.format(pause=PAUSE, cni=cni_folder(), socket=_SOCKET))
        self.sandbox.spawn(["containerd", "--config", config], self._log("containerd"))
        wait_until(
            f"containerd of {self.name}",
            lambda: bool(self._ctr("version", timeout_s=5)),
            timeout_s=30,
            hint=lambda: log_tail(self._log("containerd")),
        )

    def load(self, image: Image, *, timeout_s: float = 300) -> None:
        """Put an image on this node: of what it consists of, only what the node lacks."""
        have = set(self._ctr("content", "list", "--quiet").split())
        marker = f"{image.name}-{image.manifest.removeprefix('sha256:')[:24]}"
        if marker in self._ctr("images", "list", "--quiet").split():
            return
        folder = self.folder / "import"
        folder.mkdir(exist_ok=True)
        (folder / "index.json").write_text(image.index())
        blobs = [blob(digest).relative_to(layout()) for digest in image.blobs() if digest not in have]
        pack = ["tar", "--create", "--directory", layout(), "oci-layout", *blobs, "--directory", folder, "index.json"]
        unpack = ["ctr", "--namespace=k8s.io", "images", "import", "-"]
        pipe = f"{shlex.join(map(str, pack))} | {shlex.join(unpack)}"
        self.sandbox.script(pipe, timeout_s=timeout_s)
        self._ctr("images", "tag", "--force", image.name, marker)

    def hide(self, image: str) -> None:
        """Let the node have no image of this name; what it consists of stays. ``show`` must follow."""
        self._ctr("images", "tag", "--force", image, f"{image}-hidden")
        self._ctr("images", "remove", "--sync", image)

    def show(self, image: str) -> None:
        """Give an image back that ``hide`` has taken."""
        self._ctr("images", "tag", "--force", f"{image}-hidden", image)
        self._ctr("images", "remove", f"{image}-hidden")

    def take_addresses(self) -> None:
        """Take all addresses for pods that nobody has. ``free_addresses`` must follow."""
        addresses = " ".join(map(str, ipaddress.ip_network(Network.pod_cidr(self.index)).hosts()))
        take = f'file={_ADDRESSES}/$address; [ -e "$file" ] || printf {_TAKEN} > "$file" || :'
        # With -C, a file that comes in between stays that of the pod.
        self.sandbox.script(f"mkdir -p {_ADDRESSES}; set -C; for address in {addresses}; do {take}; done")

    def free_addresses(self) -> None:
        """Free what ``take_addresses`` has taken."""
        found = f"grep --files-with-matches --line-regexp {_TAKEN} {_ADDRESSES}/*"
        self.sandbox.script(f"{found} | xargs --no-run-if-empty rm")

    def start_logind(self) -> None:
        """Start what tells the kubelet that the machine goes down; needed before the kubelet, which asks once."""
        self._log("logind").unlink(missing_ok=True)  # an earlier machine of this name has said so, too
        self.sandbox.spawn(logind.command("serve"), self._log("logind"))
        wait_until(
            f"logind of {self.name}",
            lambda: logind.READY in self._log("logind").read_text(),
            timeout_s=30,
            hint=lambda: log_tail(self._log("logind")),
        )

    def announce_shutdown(self, *, cancelled: bool = False) -> None:
        """Say to the kubelet, as logind does, that the machine goes down, or stays after all."""
        self.sandbox.run(logind.command("announce", "cancelled" if cancelled else "shutdown"))

    def stop_kubelet(self) -> None:
        """Stop the kubelet's process; the containers run on. ``continue_kubelet`` must follow."""
        stop_process(self._kubelet_flag)

    def continue_kubelet(self) -> None:
        """Let the kubelet's process go on."""
        continue_process(self._kubelet_flag)

    @property
    def _kubelet_flag(self) -> str:
        return f"--config={self._config}"

    def kill_kubelet(self) -> None:
        """Kill the kubelet's process; the containers run on. ``start_kubelet`` must follow."""
        os.kill(with_argument(self._kubelet_flag)[-1], signal.SIGKILL)

    def kill_containerd(self) -> None:
        """Kill containerd; the containers run on. ``start_containerd`` must follow."""
        for pid, argv in processes():
            if argv[:1] == ["containerd"] and str(self._containerd_config) in argv:
                os.kill(pid, signal.SIGKILL)

    @property
    def _containerd_config(self) -> Path:
        return self.folder / "containerd.toml"

    @property
    def _config(self) -> Path:
        return self.folder / "kubelet.json"

    def start_kubelet(self, kubeconfig: Path, client_ca: Path, *, taint: str = "") -> None:
        """Start kubelet and kube-proxy.

        Args:
            kubeconfig: The credentials of this node's kubelet.
            client_ca: Who vouches for the clients of kubelet, such as the API server.
            taint: A taint that the node registers with, as ``key:effect``.
        """
        self._config.write_text(json.dumps(self._kubelet_config(client_ca, taint), indent=2))
        argv: list[str | Path] = [
            parts.program("kubelet"),
            f"--config={self._config}",
            f"--kubeconfig={kubeconfig}",
        ]
        argv += [f"--hostname-override={self.name}", f"--node-ip={self.network.node_ip(self.index)}"]
        self.sandbox.spawn(argv, self._log("kubelet"))

    def start_proxy(self, kubeconfig: Path) -> None:
        """Start kube-proxy, which makes Services work on this node."""
        argv: list[str | Path] = [
            parts.program("kube-proxy"),
            f"--kubeconfig={kubeconfig}",
            "--proxy-mode=iptables",
        ]
        argv += [f"--hostname-override={self.name}", f"--cluster-cidr={POD_CIDR}"]
        argv += ["--conntrack-max-per-core=0", "--conntrack-min=0"]  # that setting is the host's
        self.sandbox.spawn(argv, self._log("kube-proxy"))

    def remove(self) -> None:
        """Kill everything on the node and remove what it has written."""
        self.sandbox.kill()
        cgroups.remove(self.cgroup)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _log(self, component: str) -> Path:
        return self.logs / f"{self.name}-{component}.log"

    def _ctr(self, *args: str, timeout_s: float = 30) -> str:
        return self.sandbox.run(["ctr", "--namespace=k8s.io", *args], timeout_s=timeout_s).stdout

    def _kubelet_config(self, client_ca: Path, taint: str) -> dict[str, object]:
        key, _, effect = taint.partition(":")
        taints: Sequence[dict[str, str]] = [{"key": key, "effect": effect}] if taint else []
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(client_ca)},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{_SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup,
            "clusterDNS": [DNS_IP],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "registerWithTaints": taints,
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            # the disk is this host's, and not the node's to tidy up
            "evictionHard": {},
            "imageGCHighThresholdPercent": 100,
            # a node that went away is noticed within 20 s; see control_plane
            "nodeStatusUpdateFrequency": "4s",
            "nodeLeaseDurationSeconds": 16,
            # when logind says so; of it the second one is for critical pods, which go last
            "shutdownGracePeriod": "40s",
            "shutdownGracePeriodCriticalPods": "10s",
            **_for_cgroup_v1(parts.part("kubernetes").version),
            "featureGates": dict.fromkeys(features.of_kubernetes(), True),
        }


def _for_cgroup_v1(version: str) -> dict[str, object]:
    """Lets a kubelet of that version run on a host with cgroup v1, as this may be one."""
    minor = int(version.split(".")[1])
    return {"failCgroupV1": False} if minor >= _CAN_FAIL_CGROUP_V1 else {}


_CONTAINERD = """\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # where root may not lower oom_score_adj (in some containers and virtual machines) no pod would start without this
  restrict_oom_score_adj = true

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "/var/lib/cni/net.d"

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""
