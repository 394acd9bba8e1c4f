"""Addresses and links of a cluster.

Every machine of a cluster has a network namespace of its own, so that ports, routes and iptables rules of
clusters and of this host never meet. A bridge in the control plane's namespace joins them; one veth pair,
the only thing that this host sees, joins the bridge to the host. Pods are routed, without encapsulation, as
on a cloud's own network.

Processes: ``ip`` and ``iptables``, to their ends. Threads: none.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass

from tests.testcluster.api import ClusterError
from tests.testcluster.sandbox import Sandbox
from tests.testcluster.shell import run

POD_CIDR = "10.244.0.0/16"
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_IP = "10.96.0.1"
DNS_IP = "10.96.0.10"
MAX_NODES = 16
_CANDIDATES = ipaddress.ip_network("10.213.0.0/16")
_BRIDGE = "nodes"


@dataclass(frozen=True)
class Network:
    """The links of one cluster: ``subnet`` is a /24 of machines, ``device`` this host's end of the veth pair."""

    subnet: str
    device: str

    def _address(self, last: int) -> str:
        return str(ipaddress.ip_network(self.subnet)[last])

    @property
    def host_ip(self) -> str:
        """This host, as pods and nodes see it."""
        return self._address(1)

    def node_ip(self, index: int) -> str:
        """A machine's address; index 0 is the control plane."""
        return self._address(10 + index)

    @staticmethod
    def pod_cidr(index: int) -> str:
        """The addresses of a machine's pods."""
        return f"10.244.{index}.0/24"

    def connect_control_plane(self, sandbox: Sandbox) -> None:
        """Make the bridge, and join it to this host."""
        run(
            [
                "ip",
                "link",
                "add",
                self.device,
                "type",
                "veth",
                "peer",
                "name",
                "uplink",
                "netns",
                str(sandbox.pid),
            ]
        )
        run(["ip", "address", "add", f"{self.host_ip}/24", "dev", self.device])
        run(["ip", "link", "set", self.device, "up"])
        sandbox.script(f"""
            ip link add {_BRIDGE} type bridge
            ip link set uplink master {_BRIDGE} up
            # what crosses the bridge has already been through the iptables of the node that sent it
            if [ -e /proc/sys/net/bridge ]; then echo 0 > /proc/sys/net/bridge/bridge-nf-call-iptables; fi
            """)
        self._configure(sandbox, 0, _BRIDGE)

    def connect_node(self, control_plane: Sandbox, sandbox: Sandbox, index: int, name: str) -> None:
        """Plug a node into the bridge; the port has the node's name."""
        link = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(sandbox.pid)]
        run(control_plane.enter(link, spaces=("net",)))  # in the host's process ids: the pid above is one of those
        control_plane.script(f"ip link set {name} master {_BRIDGE} up")
        self._configure(sandbox, index, "eth0")

    @staticmethod
    def unplug_node(control_plane: Sandbox, name: str) -> None:
        """Cut a node off: nothing that it sends, not even the end of a connection, reaches anyone."""
        control_plane.run(["ip", "link", "delete", name])

    def _configure(self, sandbox: Sandbox, index: int, device: str) -> None:
        routes = "\n".join(
            f"ip route add {self.pod_cidr(other)} via {self.node_ip(other)}"
            for other in range(MAX_NODES + 1)
            if other != index
        )
        sandbox.script(f"""
            ip link set lo up
            ip address add {self.node_ip(index)}/24 dev {device}
            ip link set {device} up
            ip route add default via {self.host_ip}
            {routes}
            echo 1 > /proc/sys/net/ipv4/ip_forward
            iptables -t nat -A POSTROUTING -s {POD_CIDR} ! -d {POD_CIDR} -j MASQUERADE
            """)


def free_subnet() -> str:
    """A /24 that this host has no route into.

    Raises:
        ClusterError: There is none.
    """
    routes = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]).stdout)
    used = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in routes
        if route["dst"] != "default" and ":" not in route["dst"]
    ]
    for candidate in _CANDIDATES.subnets(new_prefix=24):
        if not any(candidate.overlaps(network) for network in used):
            return str(candidate)
    raise ClusterError(f"this host already has routes into all of {_CANDIDATES}")


def cni_config(index: int) -> str:
    """The CNI configuration of a node.

    ``ptp`` gives each pod a routed link of its own. With a bridge, traffic of two pods of one node would
    pass by iptables, where Services live, unless the kernel has br_netfilter.
    """
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": Network.pod_cidr(index)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": "/run/cni-ipam",
    }
    plugins = [
        {"type": "ptp", "mtu": 1500, "ipam": ipam},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}, indent=2)
