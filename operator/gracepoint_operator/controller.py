"""The controller: all parts of one replica, and the event loop on which they decide and notify.

kopf watches in separate threads and hands each object over with ``feed``. The controller's loop runs in another
thread (``server``), so that neither kopf's work nor its pauses delay a notice. Only this loop touches the cache, the
subscribers and the acknowledgements. Requests to the API server run in the threads of ``KubeClient``. On the loop:

* ``feed`` -> ``ClusterCache``, and in the loop's next iteration ``Reconciler`` -> ``Notifier``, without an await
  between the two (``DecisionQueue``). All events that wait are handled at once: a thousand pods that start together are
  a thousand events of one workload. What is recorded of a large gang comes in later iterations;
* ``Relister.run``: lists the cluster at start, then now and then, and lists a kind when its watch may have missed
  something. Nothing is decided, and nobody is served, before the first list. After each one every workload is decided
  about;
* ``_tick``: once a second, for what depends on time alone: workloads whose next decision is due, preemptions that were
  held back, requests for workloads that do not exist, hints to pods that have connected, and snapshot servers;
* twice a minute: ``GarbageCollector`` deletes records that ended long ago, ``ConnectionWriter`` counts which pods are
  connected, and ``MissingPolicies`` looks for workloads without a policy;
* ``LoopLag.measure``: how late this loop is;
* ``WorkloadRefresh``: one task for each workload with a deleted pod whose cause is unclear. It ends with the API
  server's answer.

``run`` ends when it is cancelled. Its tasks are cancelled then, and pending writes get some seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence, Set

from gracepoint.wire import names
from gracepoint_operator.cache.cluster_cache import ClusterCache, ObjectReading, UnreadableObjects
from gracepoint_operator.cache.indexes import version_of
from gracepoint_operator.cache.relister import ALWAYS, Relister, Swept, WorkloadRefresh
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.channel.authentication import Authenticator
from gracepoint_operator.channel.notifier import Notifier, Subscribers, TrustNotifier
from gracepoint_operator.channel.reports import ReportHandler
from gracepoint_operator.channel.service import Channel
from gracepoint_operator.channel.snapshot_notifier import SnapshotNotifier
from gracepoint_operator.decisions.decide import (
    DEFAULT_LIKELY_GANGS_PER_MINUTE,
    WINDOW_S,
    Answer,
    Check,
    Wait,
    decide,
    holds_back,
    next_decision_at,
    sees_signals,
)
from gracepoint_operator.decisions.policy_conditions import PodRights
from gracepoint_operator.event_loop import LoopLag
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.recording import connection_writer, garbage_collector, trouble_recorder
from gracepoint_operator.recording.connection_writer import ConnectionWriter
from gracepoint_operator.recording.event_recorder import EndedPods, EventRecorder
from gracepoint_operator.recording.first_seen_writer import FirstSeenWriter
from gracepoint_operator.recording.garbage_collector import GarbageCollector, Limits
from gracepoint_operator.recording.kueue_writer import KueueWriter
from gracepoint_operator.recording.pod_writer import PodProtector, SidecarEnder
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.recording.preemption_writer import AcknowledgementLog, PreemptionWriter, RequestWriter
from gracepoint_operator.recording.replica_lease import ReplicaLease
from gracepoint_operator.recording.snapshot_holdings import SnapshotHoldings, SnapshotSettings
from gracepoint_operator.recording.trouble_recorder import (
    MissingPolicies,
    RecorderContext,
    SnapshotRecorder,
    StallRecorder,
    TroubleRecorder,
)
from gracepoint_operator.recording.wait_recorder import LostPods, WaitRecorder
from gracepoint_operator.recording.writers import Writers
from gracepoint_operator.resources import CheckpointPolicy, PreemptionSpec
from gracepoint_operator.resources.policy import DEFAULT_LONGEST_HOLD_S
from gracepoint_operator.signals import BUILT_IN, Row
from gracepoint_operator.trust.certificates import CapabilityKeys
from gracepoint_operator.webhooks.admission import EvictionHold
from gracepoint_operator.workloads import BY_PLACE, Workload

logger = logging.getLogger(__name__)

#: The loop does other work after this time. Both times are CPU time of the loop's thread.
SLICE_S = 0.005
#: A decision that takes longer is followed by a rest of its workload, this number of times as long.
_LONG_S = 0.02
_REST = 4
#: Seconds until a workload is decided about again after an error.
_AGAIN_S = 1.0
#: Other work of the loop comes between the steps of a decision about a gang with more pods: a step with 4,000 takes
#: about 10 ms. Each step then looks at the gang anew, as it may have changed.
MANY_PODS = 512

#: A decision about a workload, step by step. Its first step carries out what was decided. It returns when the workload
#: has to be decided about again without an event, in seconds since the epoch. None: only after an event.
Steps = Generator[None, None, float | None]


@dataclasses.dataclass(frozen=True)
class ControllerSettings:
    """What administrators set for one replica.

    Attributes:
        replica: This replica's name.
        namespace: The operator's own namespace, where replicas show each other that they live.
        namespaces: The namespaces that are watched. Empty: all.
        replicas: Number of replicas.
        rows: The disruption catalogue, in the order in which its rows are tried.
        likely_gangs_per_minute: At most this number of gangs is notified of signals that are not certain, by all
            replicas together; see ``decide.holds_back``.
        kept: How many Preemptions that have ended are kept, and for how long.
        first_seen_place: Namespace and name of the ConfigMap of ``FirstSeenWriter``. None: nothing is kept.
        rights: What the operator may do to pods.
        longest_hold_s: Evictions are held for at most so many seconds, whatever a policy says.
        watches_devices: Whether the taints of devices are watched. The operator needs the right to do so.
        snapshots: Where the snapshot servers are. None: there are none, and nothing of them is watched.
        write_interval_s: Pause between two writes of one object to the API.
        tick_s: Pause between two looks at what depends on the time alone, in seconds.
    """

    replica: str
    namespace: str = "default"
    namespaces: Collection[str] = ()
    replicas: int = 1
    rows: Sequence[Row] = BUILT_IN
    likely_gangs_per_minute: int = DEFAULT_LIKELY_GANGS_PER_MINUTE
    kept: Limits = dataclasses.field(default_factory=Limits)
    first_seen_place: tuple[str, str] | None = None
    rights: PodRights = dataclasses.field(default_factory=PodRights)
    longest_hold_s: float = DEFAULT_LONGEST_HOLD_S
    watches_devices: bool = False
    snapshots: SnapshotSettings | None = None
    write_interval_s: float = 1.0
    tick_s: float = 1.0


class DecisionQueue:
    """The workloads to decide about, by UID: soon after an event, and when time alone may change a decision.

    Decisions are made in slices, so that nothing else on the loop waits for long: after a list there is something to
    decide about every workload. Such a round waits for the workloads with events. A decision that was begun is ended
    before the next one begins; a slice may end between two of its steps. If a decision takes long, as for a gang of
    thousands of pods, the next one about the same workload waits for a multiple of that time: while these pods start,
    each has an event. The queue has no task; its callbacks end with the loop.

    Args:
        decide: Decides about a workload.
        clock: Seconds since the epoch.
    """

    def __init__(self, decide: Callable[[str], Steps], clock: Callable[[], float]) -> None:
        self._decide = decide
        self._clock = clock
        self._begun: dict[str, tuple[Steps, float]] = {}  # what is left of a decision, and the CPU time that it took
        self._waiting: dict[str, None] = {}  # in the order of their events
        self._round: dict[str, None] = {}  # after all that wait
        self._resting: dict[str, bool] = {}  # True: it is to be decided about after its rest
        self._due_at: dict[str, float] = {}
        self._times: list[tuple[float, str]] = []  # a heap; only entries that are in _due_at count
        self._scheduled = False

    def add(self, uids: Iterable[str]) -> None:
        """Decides about these workloads in the loop's next iterations."""
        for uid in uids:
            if uid in self._resting:
                self._resting[uid] = True
            else:
                self._waiting[uid] = None
        self._schedule()

    def add_round(self, uids: Iterable[str]) -> None:
        """Decides about these workloads when nothing else waits."""
        self._round.update(dict.fromkeys(uids))
        self._schedule()

    def add_due(self) -> None:
        """Adds the workloads for which it is time. Call it regularly."""
        now = self._clock()
        while self._times and self._times[0][0] <= now:
            at, uid = heapq.heappop(self._times)
            if self._due_at.get(uid) == at:
                del self._due_at[uid]
                self.add([uid])

    def decide_now(self, uid: str) -> None:
        """Decides about a workload, and carries that out before this method returns. Further steps come soon after."""
        while uid in self._begun:  # one that was decided before
            self._step(uid)
        self._begin(uid)
        self._step(uid)
        self._schedule()

    def _begin(self, uid: str) -> None:
        self._waiting.pop(uid, None)
        self._round.pop(uid, None)
        self._begun[uid] = (self._decide(uid), 0.0)

    def _step(self, uid: str) -> float:
        """Makes one step of a decision. Returns the CPU time that all its steps took."""
        steps, worked_s = self._begun[uid]
        began_s = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            del self._begun[uid]
            self._note_due(uid, end.value)
        except Exception:
            del self._begun[uid]
            logger.exception("a workload could not be decided about", extra=about(workload_uid=uid))
            self._note_due(uid, self._clock() + _AGAIN_S)
        worked_s += time.thread_time() - began_s
        if uid in self._begun:
            self._begun[uid] = (steps, worked_s)
        return worked_s

    def _note_due(self, uid: str, at: float | None) -> None:
        if at is None:
            self._due_at.pop(uid, None)
        elif self._due_at.get(uid) != at:
            self._due_at[uid] = at
            heapq.heappush(self._times, (at, uid))

    def _schedule(self) -> None:
        if not self._scheduled and (self._begun or self._waiting or self._round):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Decides for one slice of time."""
        self._scheduled = False
        until_s = time.thread_time() + SLICE_S
        while queue := self._begun or self._waiting or self._round:
            uid = next(iter(queue))
            if queue is not self._begun:
                self._begin(uid)
            worked_s = self._step(uid)
            if uid not in self._begun and worked_s > _LONG_S:
                # An event may have come between its steps; in a rest that goes on, it is noted there.
                self._resting[uid] = uid in self._waiting or self._resting.get(uid, False)
                self._waiting.pop(uid, None)
                asyncio.get_running_loop().call_later(_REST * worked_s, self._rested, uid)
            if uid in self._begun or time.thread_time() >= until_s:
                break  # only a decision about a large gang has several steps, and the next one takes long
        self._schedule()

    def _rested(self, uid: str) -> None:
        if self._resting.pop(uid, False):
            self.add([uid])


class Reconciler:
    """Decides about one workload at a time, and hands each decision to the part that carries it out.

    Args:
        api: Asked why pods were deleted.
        cache: What is known of the cluster.
        notifier: Carries out decisions about preemptions, and sends hints.
        writers: Write what was decided to the API server.
        clock: Seconds since the epoch.
        settings: How many gangs are notified of signals that are not certain.
        snapshot_notifier: Sends placements of snapshots. None: there are no servers.

    Attributes:
        queue: When each workload is decided about.
        workload_refresh: Reads workloads again whose pods were deleted.
        held_back: UIDs of workloads with a preemption that has to wait. They are to be decided about each second.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        notifier: Notifier,
        writers: Writers,
        clock: Callable[[], float],
        settings: ControllerSettings,
        snapshot_notifier: SnapshotNotifier | None = None,
    ) -> None:
        self._cache = cache
        self._snapshot_notifier = snapshot_notifier
        self._notifier = notifier
        self._writers = writers
        self._clock = clock
        self._settings = settings
        self.held_back: set[str] = set()
        self.queue = DecisionQueue(self.decide, clock)
        self.workload_refresh = WorkloadRefresh(api, cache, self.queue.decide_now)

    def decide(self, uid: str) -> Steps:
        """Decides about a workload."""
        now = self._clock()
        gang = self._cache.gang(uid)
        if self._note_seen(gang, now):
            gang = self._cache.gang(uid)
        self._carry_out(uid, gang, now)
        # What follows is only recorded: no notice waits for it.
        if gang.workload is not None and gang.workload.finished:
            self._writers.finish(uid)
        has_many = len(gang.pods) > MANY_PODS
        if has_many:
            yield
            gang = self._cache.gang(uid)
        self._writers.sidecars.look(gang)
        observe_at = self._writers.policies.goodput.observe(gang)
        if has_many:
            yield
            gang = self._cache.gang(uid)
        look_at = self._writers.waits.observe(gang)
        if has_many and self._snapshot_notifier is not None:
            yield
            gang = self._cache.gang(uid)
        namespace = None if gang.workload is None else gang.workload.namespace
        preemptions = tuple(self._cache.preemptions.of_workload(uid, namespace))
        # What a snapshot has computed about its pods is kept, if nothing was decided.
        decided = gang if preemptions == gang.preemptions else dataclasses.replace(gang, preemptions=preemptions)
        if self._snapshot_notifier is not None:
            self._snapshot_notifier.notify(decided)
        others = (self._writers.pods.protect(decided), self._writers.kueue.look(decided))
        times = (next_decision_at(decided, now), observe_at, look_at, *others)
        return min((at for at in times if at is not None), default=None)

    def _note_seen(self, gang: GangSnapshot, now: float) -> bool:
        """Notes that this replica has seen the signals of preemptions of which it learned from their records.

        Returns whether that is new of any.
        """
        is_new = False
        for preemption in gang.preemptions:
            may_be_retracted = preemption.spec.cancelable and not preemption.phase.ended
            is_unseen = preemption.learned_at is not None and not preemption.seen
            if may_be_retracted and is_unseen and sees_signals(gang, preemption, now):
                self._cache.preemptions.note_seen(preemption.key)
                is_new = True
        return is_new

    def _carry_out(self, uid: str, gang: GangSnapshot, now: float) -> None:
        waits = False
        self._notifier.hints.notify(gang)
        for decision in decide(gang, now, self._is_held_back):
            match decision:
                case Check():
                    self.workload_refresh.begin(decision.workload, decision.jobs, decision.pod_uids)
                case Answer():
                    self._writers.requests.answer(decision)
                case Wait():
                    waits = True
                case _:
                    self._notifier.carry_out(decision)
        if not waits:
            self.held_back.discard(uid)
        elif uid not in self.held_back:
            self.held_back.add(uid)
            logger.warning(
                "a gang is not notified yet, as many were of signals that are not certain",
                extra=about(workload_uid=uid),
            )

    def notify_hints(self, uid: str) -> None:
        """Notifies new subscribers of a workload of the hints that they have missed, and of their snapshot servers."""
        gang = self._cache.gang(uid)
        self._notifier.hints.notify(gang)
        if self._snapshot_notifier is not None:
            self._snapshot_notifier.notify(gang)

    def _is_held_back(self, spec: PreemptionSpec) -> bool:
        latest = self._cache.latest_preemptions(WINDOW_S)
        limit, replicas = self._settings.likely_gangs_per_minute, self._settings.replicas
        return holds_back(spec, latest, self._writers.preemptions.made, limit, replicas)


_LAST_WRITES_S = 2.0
_LEAVES_S = 1.0


class Controller:
    """All parts of one replica. It can be created in any thread. It is used on the loop that runs ``run``.

    Args:
        api: The API server.
        metrics: Metrics of this replica, which the health port shows.
        clock: Seconds since the epoch.
        settings: What administrators set.
        on_ready: Called once, when the cluster is known.

    Attributes:
        api: The API server.
        urgent_api: The same, for what an answer to the API server waits for: it does not wait for writes.
        metrics: Metrics of this replica.
        watched: The kinds that are watched.
        cache: What this replica knows of the cluster.
        watches: The state of each watch.
        subscribers: The pods that are connected to this replica.
        writers: Write to the API server.
        notifier: Notifies subscribers.
        reports: Handles the messages of pods.
        evictions: Answers the eviction webhook.
        channel: The routes for pods.
        trust_notifier: Notifies pods of the authorities to trust.
    """

    def __init__(
        self,
        api: KubeClient,
        metrics: Metrics,
        clock: Callable[[], float],
        settings: ControllerSettings,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.api = api
        self.urgent_api = api.apart()
        self.metrics = metrics
        self._clock = clock
        self._tick_s = settings.tick_s
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limits: dict[str, float] = {}  # the longest holds that administrators have set, as last shown
        # No object has a name with capitals.
        metrics.longest_hold_s.labels(set_by="evictions.longestHoldSeconds").set(settings.longest_hold_s)

        # What is known.
        snapshots = settings.snapshots
        self.watched = ALWAYS | (objects.DEVICES if settings.watches_devices else set())
        self.watched |= {objects.SNAPSHOT_SERVERS} if snapshots is not None else set()
        left_out = UnreadableObjects(metrics.count_left_out)
        self.cache = ClusterCache(
            clock,
            settings.rows,
            left_out,
            settings.longest_hold_s,
            spread=() if snapshots is None else snapshots.spread,
            installation="" if snapshots is None else snapshots.installation,
        )
        self.watches = WatchState(
            metrics,
            namespaces=settings.namespaces,
            on_gap=self._note_gap,
            namespace_of={objects.SNAPSHOT_SERVERS: settings.namespace},
        )
        self.subscribers = Subscribers()

        # What is written.
        events = EventRecorder(api, clock, settings.replica)
        lease = ReplicaLease(api, clock, settings.replica, settings.namespace, self._policies_age_s)
        policies = PolicyWriter(api, self.cache, lease, metrics, clock, settings.write_interval_s, settings.rights)
        context = RecorderContext(self.cache, policies, events, metrics, clock, settings.write_interval_s)
        self.writers = self._new_writers(settings, context)
        self.connection_writer = ConnectionWriter(
            self.cache, self.subscribers.pod_uids, lease, policies, events, metrics, clock
        )
        self.missing_policies = MissingPolicies(context)

        # What is decided, and who is notified.
        self.notifier = Notifier(
            self.cache, self.subscribers, self.writers.acknowledgements, self.writers.preemptions, metrics, clock
        )
        self.trust_notifier = TrustNotifier(self.subscribers)
        self.capability_keys = CapabilityKeys()
        self.snapshot_holdings, self.snapshot_notifier = self._new_snapshots(settings)
        self._reconciler = Reconciler(
            api, self.cache, self.notifier, self.writers, clock, settings, self.snapshot_notifier
        )
        self._decisions = self._reconciler.queue
        self.evictions = EvictionHold(
            self.urgent_api, self.cache, self._take_body, self._decisions.decide_now, self._is_ready, metrics, clock
        )

        # What pods report.
        self.reports = ReportHandler(
            api, self.cache, self.notifier, self.writers, metrics, clock, on_end=self._decisions.add
        )
        if self.snapshot_notifier is not None:
            self.reports.on_snapshots = self.snapshot_notifier.take
        authenticator = Authenticator(api, self.cache, clock)
        self.channel = Channel(
            authenticator,
            self.subscribers,
            self.notifier,
            self.reports,
            metrics,
            settings.replica,
            self.trust_notifier,
        )

        # What is listed, and what is deleted.
        self._relister = Relister(
            api,
            self.cache,
            self.watches,
            self._drop,
            self.writers.first_seen.recall,
            self._after_sweep,
            self.watched,
        )
        self._garbage_collector = GarbageCollector(
            api, self.cache, metrics, clock, settings.kept, self._drop, settings.namespaces
        )

    def _new_snapshots(self, settings: ControllerSettings) -> tuple[SnapshotHoldings | None, SnapshotNotifier | None]:
        """Returns what knows the snapshot servers, and what places snapshots. None if there are no servers."""
        if settings.snapshots is None:
            return None, None
        name = settings.snapshots.server_name(settings.namespace)
        servers = SnapshotHoldings(
            self.cache.snapshot_servers,
            settings.snapshots,
            name,
            self.capability_keys,
            lambda: self.trust_notifier.authorities,
            self.metrics,
            self._clock,
        )
        notifier = SnapshotNotifier(
            self.cache,
            self.subscribers,
            servers,
            self.writers.snapshots,
            self.metrics,
            self._clock,
        )
        return servers, notifier

    def _new_writers(self, settings: ControllerSettings, context: RecorderContext) -> Writers:
        api, cache, metrics, clock = self.api, self.cache, self.metrics, self._clock
        policies, events, interval_s = context.policy_writer, context.events, context.interval_s
        acknowledgements = AcknowledgementLog()
        lost_pods = LostPods(api, events, metrics, clock, allowed=settings.rights.deletes)
        preemptions = PreemptionWriter(api, cache, acknowledgements, policies, events, metrics, interval_s)
        return Writers(
            acknowledgements=acknowledgements,
            preemptions=preemptions,
            policies=policies,
            stalls=StallRecorder(context),
            troubles=TroubleRecorder(context),
            waits=WaitRecorder(context, api, preemptions, lost_pods),
            requests=RequestWriter(api, metrics, interval_s),
            pods=PodProtector(api, cache, metrics, clock, interval_s, allowed=settings.rights.protects),
            sidecars=SidecarEnder(api, cache, metrics, interval_s, allowed=settings.rights.deletes),
            first_seen=FirstSeenWriter(api, cache, settings.first_seen_place, metrics, clock, interval_s),
            kueue=KueueWriter(api, cache, metrics, clock, interval_s),
            ended_pods=EndedPods(cache, events, metrics, interval_s),
            snapshots=SnapshotRecorder(context),
        )

    @property
    def ready(self) -> bool:
        """True once the cluster is known and decisions are made."""
        return self.notifier.ready

    def _is_ready(self) -> bool:
        return self.ready

    def _policies_age_s(self) -> float:
        return self.watches.ages().get(objects.POLICIES, 0.0)

    def why_not_ready(self) -> str | None:
        """Returns what keeps the cluster from being known. None: it is known."""
        if self.ready:
            return None
        lacking = sorted(kind.plural for kind in self._relister.unserved if self.watches.is_absent(kind))
        if not lacking:
            return "the cluster is not known yet"
        return (
            f"the API server does not serve {', '.join(lacking)} as {names.GROUP}/{names.API_VERSION}; "
            "install the CRDs of this version (crds.install of the chart)"
        )

    def feed(self, kind: objects.Kind, event: str | None, body: JsonObject) -> None:
        """Reads an object from a watch and hands over what was read. Callable from any thread.

        Args:
            kind: The object's kind.
            event: ADDED, MODIFIED or DELETED. None for an object from a list.
            body: The object.
        """
        loop = self._loop
        if loop is None:
            raise RuntimeError("controller: found no running loop, expected run() to have begun before feed()")
        if event == "DELETED":
            loop.call_soon_threadsafe(self._take_deletion, body["metadata"]["uid"], version_of(body["metadata"]))
        elif (reading := self.cache.reader.read(kind, body)) is not None:
            loop.call_soon_threadsafe(self._take, reading, event)

    async def run(self) -> None:
        """Runs until cancelled."""
        self._loop = asyncio.get_running_loop()
        self.channel.settle(self._loop)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._relister.run(), name="sweep")
                tasks.create_task(self._tick(), name="tick")
                for name, every_s, look in (
                    ("garbage collector", garbage_collector.PASS_S, self._garbage_collector.look),
                    ("connections", connection_writer.EVERY_S, self.connection_writer.look),
                    ("missing policies", trouble_recorder.EVERY_S, self.missing_policies.look),
                ):
                    tasks.create_task(self._each(every_s, look), name=name)
                tasks.create_task(LoopLag(self.metrics, "controller").measure(), name="loop lag")
        finally:
            self._reconciler.workload_refresh.cancel()
            if self.snapshot_holdings is not None:
                await self.snapshot_holdings.close()
            # Before the writers: it takes the condition Connected out of the last writes of the policy writer.
            await self.connection_writer.close(_LEAVES_S)
            await self.writers.close(_LAST_WRITES_S)

    def _take_body(self, kind: objects.Kind, body: JsonObject) -> None:
        """Like ``feed`` for an object that was modified, on the controller's loop."""
        if (reading := self.cache.reader.read(kind, body)) is not None:
            self._take(reading, "MODIFIED")

    def _take(self, reading: ObjectReading, event: str | None) -> None:
        policy_before, workload_before = self._readable_policy(reading), self.cache.objects.workloads.get(reading.uid)
        # A watch can report a change of an object before the first list has brought it. What the object has then may
        # be older than the event.
        listed = event is None or (event == "MODIFIED" and reading.uid not in self.cache.uids(reading.kind))
        affected = self.cache.store(reading, listed=listed)
        if not self.ready:
            return
        if reading.kind in (objects.CLUSTER_POLICIES, objects.NAMESPACES):
            self._follow_limits()
        if reading.kind is objects.PREEMPTIONS and affected:
            self._follow(reading)
        self._note_policy(reading, policy_before)
        if isinstance(reading.value, Workload):
            self._note_workload(reading.value, workload_before)
        if isinstance(reading.value, objects.Pod):
            self.writers.ended_pods.see(reading.value, reading.marks)
        self._decide_soon(affected)

    def _take_deletion(self, uid: str, version: int) -> None:
        place = self.cache.place(uid)
        affected = self._drop(uid, version)
        if place is not None and place[0] is objects.CLUSTER_POLICIES:
            self._follow_limits()
        self._decide_soon(affected)

    def _decide_soon(self, affected: Set[str]) -> None:
        if not (affected and self.ready):
            return
        self._decisions.add(affected)
        self.writers.first_seen.touch(complete=self._relister.complete)

    def _drop(self, uid: str, version: int = 0) -> set[str]:
        """Forgets an object and everything that is kept for it."""
        place = self.cache.place(uid)
        if place is not None and place[0] in BY_PLACE and (workload := self.cache.objects.workloads.get(uid)):
            self.writers.policies.touch(workload.namespace, workload.policy)
        elif place is not None and place[0] is objects.POLICIES:
            self.writers.policies.touch(*place[1:])
        self.subscribers.forget(uid)
        self.writers.forget(uid, place)
        return self.cache.drop(uid, version)

    def _follow(self, reading: ObjectReading) -> None:
        """Notifies pods of what the other replica decided, and adds to its record what only this replica knows."""
        preemption = self.cache.preemptions.records.get(reading.key)
        if preemption is not None and isinstance(reading.value, PreemptionRecord):
            self.notifier.notify(preemption)
            self.writers.preemptions.follow(reading.value)

    def _readable_policy(self, reading: ObjectReading) -> CheckpointPolicy | None:
        """The policy of that name as it was known before ``reading``. None: it was not known, or could not be read."""
        if reading.kind is not objects.POLICIES or reading.key in self.cache.unreadable_policies():
            return None
        return self.cache.policies.get(reading.key)

    def _note_policy(self, reading: ObjectReading, before: CheckpointPolicy | None) -> None:
        if isinstance(reading.value, CheckpointPolicy):
            self.writers.follow(reading.value)
        if reading.kind is objects.POLICIES:
            # Replicas that answered each other's writes of a status would never stop.
            now = self._readable_policy(reading)
            if before is None or now is None or (before.uid, before.generation) != (now.uid, now.generation):
                self.writers.policies.touch(*reading.key)

    def _note_workload(self, workload: Workload, before: Workload | None) -> None:
        for policy in {workload.policy} | ({before.policy} if before is not None else set()):
            self.writers.policies.touch(workload.namespace, policy)

    def _follow_limits(self, *, of_all: bool = False) -> None:
        """Shows the limits for evictions, logs what has changed, and writes the statuses that it matters to soon.

        Also of policies that are a default and have no object yet. Each is a request to the API server.

        Args:
            of_all: True if every status is written.
        """
        if not (of_all or self.cache.policies.has_changed):
            return  # as after most events of namespaces
        changed = self.cache.policies.take_changed()
        before, self._limits = self._limits, dict(self.cache.policies.limits())
        for name in before.keys() - self._limits.keys():
            logger.warning("the hold of evictions is not limited any more", extra=about(set_by=name))
            self.metrics.longest_hold_s.remove(name)
        for name, seconds in self._limits.items():
            if before.get(name) != seconds:
                message = "the hold of evictions is limited" if seconds else "no eviction is held"
                logger.warning(message, extra=about(set_by=name, longest_hold_s=seconds))
                self.metrics.longest_hold_s.labels(set_by=name).set(seconds)
        named_policies = self.cache.objects.named_policies()
        for namespace, name in {*self.cache.policies, *self.cache.unreadable_policies(), *named_policies}:
            if of_all or changed((namespace, name)):
                self.writers.policies.touch(namespace, name)

    def _after_sweep(self, swept: Swept) -> None:
        if self._relister.unserved:
            return
        is_first = not self.ready
        if is_first:
            logger.info("ready", extra=about(nodes=len(self.cache.objects.nodes), pods=len(self.cache.objects.pods)))
            self._on_ready()
        if self._relister.complete:
            self.cache.first_seen.forget_recalled()
        self.writers.first_seen.touch(complete=self._relister.complete)
        self.notifier.ready = True
        self._follow_limits(of_all=is_first or swept.rewound)
        for workload in map(self.cache.objects.workloads.get, swept.affected):
            if workload is not None:
                self.writers.policies.touch(workload.namespace, workload.policy)
        if is_first or swept.whole:
            self._decisions.add_round(self.cache.workload_uids())
        else:
            self._decisions.add(swept.affected)
        for preemption in self.cache.preemptions.records.values():
            if preemption.status.phase is None or swept.rewound:
                self.writers.preemptions.touch(preemption)

    def _note_gap(self, kind: objects.Kind, any_event: bool) -> None:
        """Lists the kind again, because events of it may have been missed. Callable from any thread.

        Without ``any_event``, only deletions may have been missed.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(functools.partial(self._relister.look_again, kind, in_full=any_event))

    async def _each(self, seconds: float, look: Callable[[], Awaitable[object]]) -> None:
        """Looks again and again, while the cluster is known. Runs until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if self.ready:
                await look()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            if self.ready:
                self._decisions.add_due()
                self._decisions.add(self._reconciler.held_back)
                if self.snapshot_notifier is not None:
                    await self.snapshot_notifier.look()
                self.writers.requests.answer_homeless(self.cache.homeless_requests(), self._clock())
                workload_uids, self.notifier.joined = self.notifier.joined, set()
                for workload_uid in workload_uids:
                    self._reconciler.notify_hints(workload_uid)
                    await asyncio.sleep(0)  # after the loss of a replica these are all workloads
