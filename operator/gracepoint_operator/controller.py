"""The operator's heart: one event loop on which everything is known, decided and told.

Who runs where: kopf watches on the main thread and hands each object over with ``feed``; the core's loop
runs on a thread of its own (``server.py``), so that neither kopf's work nor its pauses delay a notice, and is
the only one that touches ``World``, subscribers, receipts. Calls to the API run in ``Kube``'s threads. On the
loop:

* ``feed`` -> ``World``, and in the loop's next round ``decide`` -> ``Deliverer``: without an await, once for all
  events that waited, as a thousand pods that start at once are a thousand events of one JobSet;
* ``Sweeper.run``: at start until it succeeded once (until then nothing is decided, and nobody served), then now
  and then, and of a kind as soon as its watch may have missed something; after it every JobSet goes through ``decide``;
* ``_tick``: once a second, for what only time brings about: epochs under way that expire, those that were held back,
  requests for JobSets that do not come; and for hints to pods that have connected, which may be a thousand at once;
* ``Pruner.run``: now and then deletes records that ended long ago;
* ``loop_lag.measure``: how late this loop is;
* ``_check``: one task for each JobSet whose deleted pod is suspect; ends with its answer.

``run`` ends when it is cancelled: its tasks are cancelled, and what is to be recorded gets some seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import tenacity

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.resource_versions import version_of
from gracepoint_operator.cache.resync import Swept, look_afresh, put
from gracepoint_operator.cache.sweeper import Sweeper
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.channel.authentication import Authenticator
from gracepoint_operator.channel.hints import HintNotifier
from gracepoint_operator.channel.notifier import Notifier
from gracepoint_operator.channel.reports import ReportHandler
from gracepoint_operator.channel.routes import Channel
from gracepoint_operator.channel.subscribers import Subscribers
from gracepoint_operator.decisions import rate_limit, request_answers
from gracepoint_operator.decisions.decide import Check, Wait, decide
from gracepoint_operator.decisions.request_answers import Answer
from gracepoint_operator.decisions.retention import Limits
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.left_out import LeftOut
from gracepoint_operator.observability import loop_lag
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.recording.acknowledgements import Acknowledgements
from gracepoint_operator.recording.first_seen_writer import FirstSeenWriter
from gracepoint_operator.recording.garbage_collector import GarbageCollector
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.recording.preemption_writer import PreemptionWriter
from gracepoint_operator.recording.request_writer import RequestWriter
from gracepoint_operator.resources import PreemptionSpec
from gracepoint_operator.signals import BUILT_IN, Row
from gracepoint_operator.webhooks.eviction_hold import EvictionHold

log = logging.getLogger(__name__)

TICK_S = 1.0
_CHECK_WITHIN_S = 2.0
_CHECK_AGAIN_S = 0.25
_LAST_WRITES_S = 2.0
#: For so long a JobSet may be on its way that somebody asked something for: both may be of one file.
_WORKLOAD_COMES_S = 5.0


class Controller:
    """All parts of one replica, put together. Made anywhere; used on the loop that runs ``run``.

    Args:
        api: The API server.
        metrics: Shared with the health port.
        clock: Seconds since the epoch.
        replica: This replica's name.
        write_interval_s: Pause between two writes of one object to the API.
        rows: The disruption catalogue, in the order in which its rows are tried.
        likely_gangs_per_minute: How many are told at most of signals that are not sure; see ``throttle``.
        replicas: How many replicas share that.
        kept: How long, and how many, Preemptions that have ended are kept.
        sightings: Namespace and name of the ConfigMap of ``recollection``.
    """

    def __init__(
        self,
        api: KubeClient,
        metrics: Metrics,
        clock: Callable[[], float],
        replica: str,
        write_interval_s: float = 1.0,
        rows: Sequence[Row] = BUILT_IN,
        likely_gangs_per_minute: int = rate_limit.DEFAULT_LIKELY_GANGS_PER_MINUTE,
        replicas: int = 1,
        kept: Limits = Limits(),  # noqa: B008  immutable
        sightings: tuple[str, str] | None = None,
    ) -> None:
        self._api = api
        self._metrics = metrics
        self._likely_gangs_per_minute = likely_gangs_per_minute
        self._replicas = replicas
        self.world = ClusterCache(clock, rows, LeftOut(metrics.count_left_out))
        self.watches = WatchState(metrics)
        self.watches.on_gap = self._note_gap
        self.subscribers = Subscribers()
        self._clock = clock
        self._receipts = Acknowledgements()
        self._policies = PolicyWriter(api, self.world, metrics, clock, write_interval_s)
        self._recorder = PreemptionWriter(
            api, self.world, self._receipts, self._policies, metrics, clock, replica, write_interval_s
        )
        self.deliverer = Notifier(self.world, self.subscribers, self._receipts, self._recorder, metrics, clock)
        self.intake = ReportHandler(
            api, self.world, self.deliverer, self._receipts, self._recorder, self._policies, metrics, clock
        )
        self.evictions = EvictionHold(api, self.world, self._take, self._react, lambda: self.ready, metrics, clock)
        self._hinter = HintNotifier(self.subscribers)
        gate = Authenticator(api, self.world, clock)
        self.channel = Channel(gate, self.subscribers, self.deliverer, self.intake, metrics, replica)
        self._recollection = FirstSeenWriter(api, self.world, sightings, metrics, write_interval_s)
        self._pruner = GarbageCollector(api, self.world, lambda: self.ready, metrics, clock, kept)
        self._requests = RequestWriter(api, metrics, write_interval_s)
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._held_back: set[str] = set()  # JobSets with an epoch that has to wait; decided about again each second
        self._affected: set[str] = set()  # JobSets to be decided about in the loop's next round
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper = Sweeper(api, self.world, self.watches, self._drop, self._recollection.recall, self._after_sweep)

    @property
    def ready(self) -> bool:
        """True once the cluster is known and decisions are made."""
        return self.deliverer.ready

    def feed(self, kind: kinds.Kind, event: str | None, body: JsonObject) -> None:
        """Hands over what a watch brought. Callable from any thread.

        Args:
            kind: Of what kind the object is.
            event: ADDED, MODIFIED, DELETED; None for an object of a listing.
            body: The object; not changed afterwards by anybody.
        """
        loop = self._loop
        if loop is None:
            raise RuntimeError("core: found no running loop, expected run() to have begun before feed()")
        loop.call_soon_threadsafe(self._take, kind, event, body)

    async def run(self) -> None:
        """Runs until cancelled."""
        self._loop = asyncio.get_running_loop()
        self.channel.settle(self._loop)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweeper.run(), name="sweep")
                tasks.create_task(self._tick(), name="tick")
                tasks.create_task(self._pruner.run(), name="pruner")
                tasks.create_task(loop_lag.measure(self._metrics), name="loop lag")
        finally:
            for task in list(self._checks.values()):
                task.cancel()
            await asyncio.gather(
                *(
                    scribe.close(_LAST_WRITES_S)
                    for scribe in (self._recorder, self._policies, self._requests, self._recollection)
                )
            )

    def _take(self, kind: kinds.Kind, event: str | None, body: JsonObject) -> None:
        if event == "DELETED":
            affected = self._drop(body["metadata"]["uid"], version_of(body["metadata"]))
        else:
            affected = put(self.world, kind, body, listed=event is None)
        if not self.ready:
            return
        if kind is kinds.PREEMPTIONS and affected:
            self._follow(body)
        self._note_policy(kind, body)
        if affected and not self._affected:
            asyncio.get_running_loop().call_soon(self._react_to_all)
        self._affected |= affected
        if affected and self._sweeper.complete:
            self._recollection.touch()

    def _react_to_all(self) -> None:
        affected, self._affected = self._affected, set()
        self._react(affected)

    def _drop(self, uid: str, version: int = 0) -> set[str]:
        """Forgets an object and all that is kept for it."""
        place = self.world.place(uid)
        self.subscribers.forget(uid)  # if it is a pod
        self._policies.forget(uid)  # if it is a JobSet
        if place is not None and place[0] is kinds.PREEMPTIONS:
            self._receipts.forget(place[1:])
            self._recorder.forget(place[1:])
            self._requests.forget(place[1:])
        return self.world.drop(uid, version)

    def _follow(self, body: JsonObject) -> None:
        """Tells of what the twin decided, and adds what only we know to what it wrote."""
        epoch = self.world.epochs.get((body["metadata"]["namespace"], body["metadata"]["name"]))
        if epoch is not None:
            self.deliverer.tell(epoch)
            self._recorder.follow(body)

    def _note_policy(self, kind: kinds.Kind, body: JsonObject) -> None:
        meta = body["metadata"]
        if kind is kinds.POLICIES:
            self._policies.touch(meta["namespace"], meta["name"])
        elif kind is kinds.JOBSETS:
            self._policies.touch(meta["namespace"], (meta.get("labels") or {}).get(LABEL_POLICY, ""))

    def _react(self, workload_uids: Iterable[str]) -> None:
        for uid in workload_uids:
            try:
                self._decide(uid)
            except Exception:
                log.exception("a JobSet could not be decided about", extra=about(workload_uid=uid))

    def _decide(self, uid: str) -> None:
        now, waits = self._clock(), False
        gang = self.world.gang(uid)
        self._hinter.tell(gang)
        for decision in decide(gang, now, self._is_held_back):
            match decision:
                case Check():
                    if uid not in self._checks:
                        self._checks[uid] = asyncio.create_task(self._check(decision), name=f"check {uid}")
                case Answer():
                    self._requests.answer(decision)
                case Wait():
                    waits = True
                case _:
                    self.deliverer.carry_out(decision)
        if not waits:
            self._held_back.discard(uid)
        elif uid not in self._held_back:
            self._held_back.add(uid)
            log.warning(
                "a gang is not told yet, as many were of signals that are not sure", extra=about(workload_uid=uid)
            )

    def _is_held_back(self, spec: PreemptionSpec) -> bool:
        late = self.world.latest_epochs(rate_limit.WINDOW_S)
        return rate_limit.holds_back(spec, late, self._recorder.made, self._likely_gangs_per_minute, self._replicas)

    async def _check(self, decision: Check) -> None:
        """Asks the API whether a deletion is ordinary life. If it does not answer in time, the pod is believed."""
        uid = decision.workload.uid
        again = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(client.KubeError),
            wait=tenacity.wait_fixed(_CHECK_AGAIN_S),
            before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
        )
        try:
            async with asyncio.timeout(_CHECK_WITHIN_S):
                await again(look_afresh, self._api, self.world, decision.workload, decision.jobs, decision.pod_uids)
        except TimeoutError:
            log.warning(
                "no fresh look in time, pods that are deleted are taken for disrupted",
                extra=about(workload=decision.workload.name, waited_s=_CHECK_WITHIN_S),
            )
            self.world.mark_checked(decision.pod_uids)
        finally:
            del self._checks[uid]
        self._react([uid])

    def _after_sweep(self, swept: Swept) -> None:
        if not self.ready:
            log.info("ready", extra=about(nodes=len(self.world.nodes), pods=len(self.world.pods)))
        if self._sweeper.complete:
            self.world.forget_recalled()
            self._recollection.touch()
        self.deliverer.ready = True
        for namespace, name in {*self.world.policies, *self.world.unreadable_policies()}:
            self._policies.touch(namespace, name)
        self._react(self.world.workload_uids())
        for epoch in self.world.epochs.values():
            if epoch.status.phase is None or swept.rewound:
                self._recorder.touch(epoch)

    def _note_gap(self, kind: kinds.Kind) -> None:
        """Events of the kind may have been missed. Callable from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._sweeper.look_again, kind)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.ready:
                joined, self.deliverer.joined = self.deliverer.joined, set()
                self._react(self.world.disrupted_workload_uids() | self._held_back | joined)
                self._answer_homeless()

    def _answer_homeless(self) -> None:
        for request in self.world.homeless_requests():
            if self._clock() - request.created_at > _WORKLOAD_COMES_S:
                self._requests.answer(request_answers.without_workload(request))
