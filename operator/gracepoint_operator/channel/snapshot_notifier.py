"""Notifies processes of the snapshot servers that hold their parts, and takes what they report of them.

Everything here runs on the controller's event loop, as in ``channel.notifier``.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from gracepoint.wire.frames import SnapshotPlacement
from gracepoint.wire.messages import Message, SnapshotReport
from gracepoint.wire.snapshot_requests import Capability, Right
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.channel.notifier import AT_ONCE, Outgoing, Subscriber, Subscribers
from gracepoint_operator.decisions import snapshot_placement
from gracepoint_operator.decisions.snapshot_placement import Usable
from gracepoint_operator.kube.objects import Node, Pod, SnapshotServerPod
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.recording.snapshot_holdings import SnapshotHoldings
from gracepoint_operator.recording.trouble_recorder import SnapshotRecorder
from gracepoint_operator.trust.bundle import CAPABILITY_S, CapabilityKey


class _DomainsOfNodes(Mapping[str, Sequence[str]]):
    """The failure domains of nodes, by name."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes

    def __getitem__(self, name: str) -> Sequence[str]:
        return self._nodes[name].domains

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


#: Seconds for which a capability is still valid when a new one is sent.
_CAPABILITY_LEFT_S = CAPABILITY_S / 2
#: A process is sent news about other processes' servers only so often, in seconds for each of these servers: to tell a
#: thousand processes of a thousand servers takes 50 MB.
_READ_AGAIN_S = 0.01
#: All gangs are looked at again after this time, as capabilities end, and as servers have room again.
_ALL_AGAIN_S = 300.0
#: Bytes that a workload may have at one server: the servers' own limit counts.
_MOST_BYTES = 1 << 50
#: A server holds a complete snapshot and the one in progress.
_SNAPSHOTS_AT_ONCE = 2
_WHOLE_RIGHTS = frozenset({Right.WRITE, Right.READ, Right.DROP})


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What the processes of a gang are told.

    Attributes:
        write_to: By node: the servers for the parts of its processes.
        read_from: The servers that may have values.
        reasons: By node: why these are fewer than the policy has copies.
        doomed: The nodes that go away, as only the gang knows.
        servers_version: Of the servers of which it was chosen; see ``SnapshotNotifier``.
    """

    write_to: Mapping[str, dict[str, str]]
    read_from: dict[str, str]
    reasons: Mapping[str, str]
    doomed: Set[str]
    servers_version: int


#: The lists of servers that were encoded last, with their texts.
_ENCODED: collections.deque[tuple[dict[str, str], str]] = collections.deque(maxlen=8)


class _SharedPlacement(SnapshotPlacement):
    """A placement whose servers to read from are encoded once for all processes of a gang: there may be thousands.

    They are written on the channel's loop alone, and so is the memory of what was encoded.
    """

    def to_json(self) -> str:
        text = next((text for servers, text in _ENCODED if servers is self.read_from), None)
        if text is None:
            text = json.dumps(self.read_from, separators=(",", ":"))
            _ENCODED.append((self.read_from, text))
        rest = Message.to_json(dataclasses.replace(self, read_from={}))
        return rest.replace('"read_from":{}', f'"read_from":{text}', 1)


def _nodes(gang: GangSnapshot) -> set[str]:
    """The nodes of the gang's processes."""
    return {pod.node for pod in gang.processes if pod.node}


def _doomed(gang: GangSnapshot) -> frozenset[str]:
    """The nodes that go away, as the preemptions of the gang say."""
    doomed = [preemption.spec.nodes for preemption in gang.preemptions if not preemption.phase.ended]
    nodes = _nodes(gang) if doomed else set()
    # A preemption that names all nodes is about the workload, and says nothing of the nodes.
    return frozenset(node for names in doomed if not nodes <= set(names) for node in names)


def _waits(subscriber: Subscriber) -> bool:
    """True if no placement was sent to the subscriber yet."""
    return subscriber.hello.takes_snapshots and subscriber.placement is None


def _has(subscriber: Subscriber, capability: str, write: dict[str, str], read: dict[str, str], reason: str) -> bool:
    """True if a placement with these was sent to the subscriber last."""
    if subscriber.placement is None:
        return False
    sent, _ = subscriber.placement
    return (sent.capability, sent.write_to, sent.read_from, sent.reason) == (capability, write, read, reason)


class SnapshotNotifier:
    """Notifies processes of the snapshot servers that hold their parts, and takes what they report of them.

    ``look`` is called once a second. It sends each process a placement if it is new to it, or has changed: a process
    that has connected, a server or a node that comes, goes or gets a signal, a capability that is about to end. If a
    gang is decided about because of a signal, it does so in the same moment (``notify``), unless the signal changes
    nothing of what its processes were told.

    The capability that a process gets is for the workload and the attempt that its pod has in the cluster's own record,
    not for those that it says.

    Args:
        cache: What is known of the cluster.
        subscribers: The pods that are connected to this replica.
        servers: Know the servers, and what they hold.
        recorder: Records what is safe.
        metrics: Counts placements.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        cache: ClusterCache,
        subscribers: Subscribers,
        servers: SnapshotHoldings,
        recorder: SnapshotRecorder,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._subscribers = subscribers
        self._servers = servers
        self._recorder = recorder
        self._keys = servers.keys
        self._metrics = metrics
        self._clock = clock
        self._due: set[str] = set()  # UIDs of workloads
        self._all_at = 0.0
        self._signing: tuple[CapabilityKey, ...] = ()  # the keys when all gangs were looked at last
        self._usable = Usable(())
        self._servers_version = 0  # grows with each change of ``_usable``
        self._writable: dict[str, SnapshotServerPod] = {}  # by node: the servers to which anybody may write
        self._interested: dict[str, set[str]] = {}  # by node: UIDs of the workloads to which its server matters
        self._lacking: set[str] = set()  # UIDs of the workloads that have fewer copies than they are to have
        self._plans: dict[str, _Plan] = {}  # by UID of the workload
        self._capabilities: dict[tuple[str, int], tuple[str, float]] = {}  # by workload and attempt: text, end
        self._part_bytes: dict[str, int] = {}  # by UID of the workload: of its largest part

    def notify(self, gang: GangSnapshot) -> None:
        """Notifies a gang that is decided about at the next look.

        At once if there may be a signal, and nodes have become doomed, servers have changed, or a process has none yet.
        """
        self._due.add(gang.workload_uid)
        if not gang.suspects:
            return
        self._follow_servers()
        plan = self._plans.get(gang.workload_uid)
        is_current = plan is not None and plan.servers_version == self._servers_version and plan.doomed == _doomed(gang)
        if not is_current or any(map(_waits, self._subscribers.of_workload(gang.workload_uid))):
            self._place(gang)

    async def look(self) -> None:
        """Notifies the gangs of which something may have changed, and has what has ended dropped."""
        self._servers.look(self.lives)
        await asyncio.sleep(0)
        self._recorder.look(self._subscribers.is_connected)
        if not self._servers.is_known:
            return
        self._follow_servers()
        now = self._clock()
        if now >= self._all_at or self._keys.keys != self._signing:
            self._all_at, self._signing = now + _ALL_AGAIN_S, self._keys.keys
            self._forget_ended()
            self._due.update(filter(self.lives, self._cache.objects.workloads))
        due, self._due = self._due, set()
        for workload_uid in due:
            takes = any(each.hello.takes_snapshots for each in self._subscribers.of_workload(workload_uid))
            if takes or self.lives(workload_uid):
                await asyncio.sleep(0)  # a gang may have thousands of processes
                self._place(self._cache.gang(workload_uid))

    def _follow_servers(self) -> None:
        """Takes what has changed of servers and their nodes."""
        index = self._cache.snapshot_servers
        if not index.changed:
            return
        changed, index.changed = index.changed, set()
        self._due |= self._lacking.union(*(self._interested.get(node, ()) for node in changed))
        nodes, doomed = self._cache.objects.nodes, self._cache.doomed_nodes()
        for node in changed:
            usable = [server for server in index.on(node) if server.serves and not server.ending]
            if usable and node in nodes and node not in doomed:
                self._writable[node] = usable[-1]
            else:
                self._writable.pop(node, None)
        if self._writable.keys() != self._usable.nodes:
            self._usable = Usable(self._writable, self._usable)
            self._servers_version += 1

    def take(self, pod: Pod, report: SnapshotReport) -> None:
        """Takes the report of a process."""
        self._servers.reported(pod.workload_uid, pod.namespace, report.servers)
        self._part_bytes[pod.workload_uid] = max(report.bytes, self._part_bytes.get(pod.workload_uid, 0))
        self._recorder.take(pod, report)

    def lives(self, workload_uid: str) -> bool:
        """Returns whether a workload exists, has not finished, and has a policy that asks for snapshots."""
        workload = self._cache.objects.workloads.get(workload_uid)
        if workload is None or workload.finished or workload.deleted:
            return False
        policy = self._cache.policies.get((workload.namespace, workload.policy))
        return policy is not None and policy.spec.checkpoint.memory is not None

    def _forget_ended(self) -> None:
        self._part_bytes = {uid: size_bytes for uid, size_bytes in self._part_bytes.items() if self.lives(uid)}
        self._plans = {uid: plan for uid, plan in self._plans.items() if self.lives(uid)}
        self._lacking = {uid for uid in self._lacking if self.lives(uid)}
        self._interested.clear()  # all gangs are looked at now
        now = self._clock()
        self._capabilities = {key: kept for key, kept in self._capabilities.items() if kept[1] > now}

    def _place(self, gang: GangSnapshot) -> None:
        """Sends the subscribers of a gang what is new to them."""
        uids = {pod.uid: pod for pod in gang.processes}
        subscribers = [
            subscriber
            for subscriber in self._subscribers.of_workload(gang.workload_uid)
            if subscriber.hello.takes_snapshots and subscriber.hello.pod_uid in uids
        ]
        if not uids or not self._servers.is_known:
            return
        self._follow_servers()
        if not self.lives(gang.workload_uid) or gang.policy is None or gang.policy.spec.checkpoint.memory is None:
            self._plans.pop(gang.workload_uid, None)
            reason = "the policy asks for no snapshots any more"
            for subscriber in subscribers:
                self._send(subscriber, self._placement(subscriber, "", {}, {}, reason))
            return
        copies = gang.policy.spec.checkpoint.memory.copies
        doomed = _doomed(gang)
        chosen = self._chosen(gang, copies, doomed)
        address = self._servers.settings.address
        written = {self._writable[node].uid for nodes in chosen.values() for node in nodes}
        # Also if all of them are connected to the other replica: after a restart they may come to this one.
        self._servers.placed(gang.workload_uid, gang.processes[0].namespace, written)
        read = {server.node: address(server) for server in self._servers.holding(gang.workload_uid)}
        before = self._plans.get(gang.workload_uid)
        if before is not None and read == before.read_from:
            read = before.read_from  # the same object: thousands of placements are compared with it
        for node in {*chosen, *read}:
            self._interested.setdefault(node, set()).add(gang.workload_uid)
        servers = len(self._cache.snapshot_servers.by_uid)
        reasons = {node: snapshot_placement.shortfall(len(nodes), copies, servers) for node, nodes in chosen.items()}
        write = {node: {each: address(self._writable[each]) for each in nodes} for node, nodes in chosen.items()}
        plan = self._plans[gang.workload_uid] = _Plan(write, read, reasons, doomed, self._servers_version)
        if not subscribers:
            return
        if len(subscribers) > AT_ONCE:
            asyncio.get_running_loop().call_soon(self._tell, gang.workload_uid, plan, subscribers, 0)
        else:
            self._tell(gang.workload_uid, plan, subscribers, 0)
        lacking = next(filter(None, reasons.values()), "")
        self._recorder.lacks(gang.workload_uid, lacking)
        if lacking:
            self._lacking.add(gang.workload_uid)
        else:
            self._lacking.discard(gang.workload_uid)

    def _tell(self, workload_uid: str, plan: _Plan, subscribers: Sequence[Subscriber], begin: int) -> None:
        """Tells the subscribers from ``begin`` on. Other work of the loop runs between hundreds of them."""
        if self._plans.get(workload_uid) is not plan:
            return  # a newer one is being told
        capabilities: dict[int, str | None] = {}  # by attempt
        for subscriber in subscribers[begin : begin + AT_ONCE]:
            pod = self._cache.objects.pods.get(subscriber.hello.pod_uid)
            if pod is None or pod.workload_uid != workload_uid:
                continue  # gone, or labelled as of another workload, since the slice before
            if pod.restart_attempt not in capabilities:
                capabilities[pod.restart_attempt] = self._capability(pod)
            text = capabilities[pod.restart_attempt]
            write, reason = plan.write_to.get(pod.node, {}), plan.reasons.get(pod.node, "it has no node")
            if text is not None and not _has(subscriber, text, write, plan.read_from, reason):
                self._send(subscriber, self._placement(subscriber, text, write, plan.read_from, reason))
        if begin + AT_ONCE < len(subscribers):
            loop = asyncio.get_running_loop()
            loop.call_soon(self._tell, workload_uid, plan, subscribers, begin + AT_ONCE)

    def _chosen(self, gang: GangSnapshot, copies: int, doomed: Set[str]) -> dict[str, tuple[str, ...]]:
        """The nodes whose servers hold the parts of each node of the gang."""
        uid, objects = gang.workload_uid, self._cache.objects
        room_bytes = _SNAPSHOTS_AT_ONCE * self._part_bytes.get(uid, 0)
        return snapshot_placement.place(
            _nodes(gang),
            self._usable,
            _DomainsOfNodes(objects.nodes),
            copies,
            uid,
            doomed=doomed,
            has_room=lambda node: self._servers.has_room(uid, self._writable[node].uid, room_bytes),
        )

    def _capability(self, pod: Pod) -> str | None:
        """The capability of a pod's attempt. None: none can be made, as no key is known, or the pod has no attempt."""
        now, key = self._clock(), (pod.workload_uid, pod.restart_attempt)
        text, until_at = self._capabilities.get(key, ("", 0.0))
        is_known = any(text.startswith(f"v1.{each.id}.") for each in self._keys.keys)  # the Secret may be made anew
        if (until_at - now < _CAPABILITY_LEFT_S or not is_known) and pod.restart_attempt >= 0:
            until_at = now + CAPABILITY_S
            capability = Capability(
                namespace=pod.namespace,
                workload=pod.workload_uid,
                attempt=pod.restart_attempt,
                rights=_WHOLE_RIGHTS,
                until=int(until_at),
                max_bytes=_MOST_BYTES,
            )
            text = self._keys.write(capability, now) or ""
            if text:
                self._capabilities[key] = (text, until_at)
        return text or None

    def _placement(
        self, subscriber: Subscriber, capability: str, write: dict[str, str], read: dict[str, str], reason: str
    ) -> SnapshotPlacement:
        return _SharedPlacement(
            pod_uid=subscriber.hello.pod_uid,
            session=subscriber.hello.session,
            capability=capability,
            server_name=self._servers.server_name,
            write_to=write,
            read_from=read,
            reason=reason,
        )

    def _send(self, subscriber: Subscriber, placement: SnapshotPlacement) -> None:
        """Sends a placement if it is new. What is news about other processes' servers alone may wait for more."""
        now = self._clock()
        if subscriber.placement is not None:
            before, at = subscriber.placement
            if placement == before:
                return
            only_others = dataclasses.replace(before, read_from=placement.read_from) == placement
            if only_others and now - at < _READ_AGAIN_S * len(placement.read_from):
                self._due.add(subscriber.hello.workload_uid)
                return
        subscriber.placement = (placement, now)
        subscriber.send(Outgoing(lambda: placement))
        self._metrics.snapshot_placements.inc()
