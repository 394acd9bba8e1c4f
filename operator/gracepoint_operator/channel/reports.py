"""Handles the messages of gangs: acknowledgements, reports, forecasts, resumptions, stalls, troubles.

Everything here runs on the controller's event loop, each message in the task of its request. A message waits for the
API server only if it names a preemption that is not known here. The last report of a gang also waits shortly until it
is written. Everything else that follows from a message goes to the notifier and the writers, which are not waited for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

from gracepoint.wire.messages import (
    Acknowledgement,
    Forecast,
    Mode,
    Phase,
    Report,
    Resumption,
    SaveEvery,
    SnapshotReport,
    Stall,
    Subscription,
    Trouble,
)
from gracepoint_operator import signals
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.relister import refresh_workload
from gracepoint_operator.channel.notifier import Notifier
from gracepoint_operator.decisions import effective_signals, preemption_status
from gracepoint_operator.decisions.effective_signals import Timed
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.logs import about, seldom
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord, preemption_name
from gracepoint_operator.recording.writers import Writers
from gracepoint_operator.workloads import ANY_NAME

logger = logging.getLogger(__name__)

_OTHER_REPLICA_BACKOFF = client.RetryPauses(0.1, 0.2)
_LAST_REPORT_S = 1.0  # the gang does not wait longer for an API server that does not answer


class UnknownPreemption(Exception):
    """A message names a preemption that does not exist, or is not of the pod's workload."""


class ReportHandler:
    """Handles messages.

    Args:
        api: Asked only about preemptions that are not known here.
        cache: What is known of the cluster. Preemptions are stored in it.
        notifier: Notifies pods of what a message changed.
        writers: Write what follows from a message to the API server.
        metrics: Gets latencies.
        clock: Seconds since the epoch.
        on_end: Called with the UID of a workload whose gang reports the end of a preemption.

    Attributes:
        on_snapshots: Called with a pod and its report of snapshots. Nothing happens where there are no servers.
        other_replica_s: How many seconds the record of a preemption may come after the first message about it: another
            replica may have notified the pod.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        notifier: Notifier,
        writers: Writers,
        metrics: Metrics,
        clock: Callable[[], float],
        on_end: Callable[[Iterable[str]], None],
    ) -> None:
        self._api = api
        self._cache = cache
        self._notifier = notifier
        self._writers = writers
        self.other_replica_s = 2.0
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self.on_snapshots: Callable[[Pod, SnapshotReport], None] = lambda pod, report: None

    async def take(
        self, pod: Pod, message: Acknowledgement | Report | Forecast | Resumption | SnapshotReport | Stall | Trouble
    ) -> SaveEvery | None:
        """Handles a message of a running pod. Returns the answer, if there is one.

        Raises:
            UnknownPreemption: It names a preemption that does not exist.
        """
        if not isinstance(message, Acknowledgement | SnapshotReport | Stall | Trouble):
            self._writers.policies.goodput.take_times(pod, message.session, message.spent)
        match message:
            case Acknowledgement():
                self._acknowledged(pod, await self._find(pod, message.preemption))
            case Report():
                await self._report(pod, message)
            case Forecast():
                self._writers.policies.forecast(message)
                self._commit_evacuated(pod, lambda before: preemption_status.is_saved_since(before, message.spent))
                return self._writers.policies.goodput.answer(message)
            case Resumption():
                self._resumed(pod, message)
            case SnapshotReport():
                self.on_snapshots(pod, message)
            case Stall():
                self._stalled(pod, message)
            case Trouble():
                self._writers.troubles.take(pod, message)
        return None

    def subscribed(self, pod: Pod, hello: Subscription) -> None:
        """A process of a running pod has connected."""
        self._writers.policies.goodput.take_times(pod, hello.session, hello.spent)
        self._writers.policies.goodput.stalled(pod, hello.stalled_s)

    def _acknowledged(self, pod: Pod, preemption: PreemptionRecord) -> None:
        now = self._clock()
        notified_at = self._writers.acknowledgements.notified_at(preemption.key, pod.uid)
        if self._writers.acknowledgements.acknowledged(preemption.key, pod, now) and notified_at is not None:
            self._metrics.notice_to_ack_s.observe(max(now - notified_at, 0.0))
        self._writers.preemptions.touch_entry(preemption)

    async def _report(self, pod: Pod, report: Report) -> None:
        if report.preemption:
            preemption = await self._named(pod, report)
        else:
            placed = await self._place(pod, report)
            if placed is None:
                return
            preemption = placed
        now = self._clock()
        notified_at = self._writers.acknowledgements.notified_at(preemption.key, pod.uid)
        if notified_at is not None:
            notice_s = notified_at - preemption.spec.observed_at.timestamp()
        else:  # the other replica notified the pod, or nobody did
            notice_s = preemption.timing("noticeSent") or 0.0
        after = preemption_status.reported(preemption, report, notice_s, now)
        if preemption.phase.ended and after.phase is not report.phase:
            logger.warning(
                "a report came after its preemption had ended",
                extra=seldom(report.phase, preemption=preemption.name, phase=preemption.phase, reported=report.phase),
            )
        self._notifier.store_and_notify(dataclasses.replace(preemption, status=after))
        if report.phase in (Phase.COMMITTED, Phase.PROMOTED):
            self._commit_evacuated(pod, lambda before: preemption_status.is_saved_by(before, report))
        if report.phase.ended:
            self._on_end([preemption.spec.workload.uid])
            # The gang exits when it gets the answer. If this replica died now, nobody else would know the outcome.
            await self._writers.preemptions.settled(preemption, _LAST_REPORT_S)

    def _stalled(self, pod: Pod, message: Stall) -> None:
        stalled = self._writers.stalls.take(pod, message)
        for preemption in self._cache.preemptions.of_workload(pod.workload_uid, pod.namespace):
            status = preemption_status.with_stalls(preemption.status, stalled, message.stage, self._clock())
            if preemption.includes(pod) and status != preemption.status:
                self._notifier.store_and_notify(dataclasses.replace(preemption, status=status))

    def _commit_evacuated(self, pod: Pod, is_saved: Callable[[PreemptionRecord], bool]) -> None:
        """A gang has saved to storage. What was evacuated in its start before is saved then, too."""
        before = (
            preemption
            for preemption in reversed(self._cache.preemptions.of_workload(pod.workload_uid, pod.namespace))
            if not preemption.includes(pod)
        )
        newest = next(before, None)
        if newest is not None and is_saved(newest):
            status = preemption_status.saved_since(newest.status)
            self._notifier.store_and_notify(dataclasses.replace(newest, status=status))

    def _resumed(self, pod: Pod, message: Resumption) -> None:
        self._writers.stalls.resumed(message.workload_uid)
        if not message.training:  # a gang that has just started
            self._writers.troubles.resumed(message.workload_uid)
        if (saved_for := message.saved_for) is not None:
            self._writers.policies.goodput.take_times(pod, saved_for.session, saved_for.spent, of_former=True)
        now = self._clock()
        # The gang may already be disrupted again, in another preemption.
        before = [
            preemption
            for preemption in reversed(self._cache.preemptions.of_workload(message.workload_uid, pod.namespace))
            if not preemption.includes(pod)
        ]
        for preemption in before:
            is_latest, status = preemption is before[0], preemption.status
            if is_latest and preemption.spec.mode is Mode.ENFORCE:
                status = preemption_status.resumed(preemption, message, now)
            current = dataclasses.replace(preemption, status=status)
            may_prove = is_latest or _names(message, preemption)
            if may_prove and preemption_status.proves_commit(current, message, self._disrupted(preemption, message)):
                logger.warning(
                    "a checkpoint was committed without a report", extra=about(preemption=preemption.name, pod=pod.name)
                )
                status = preemption_status.proven_committed(current, message, now)
                self._on_end([message.workload_uid])
            if status != preemption.status:
                self._notifier.store_and_notify(dataclasses.replace(preemption, status=status))

    def _disrupted(self, preemption: PreemptionRecord, message: Resumption) -> str:
        """The session of the start before the one that resumes, if the preemption came to it. Empty: not known."""
        at = preemption.spec.observed_at.timestamp()
        return self._writers.policies.goodput.session_before(message.workload_uid, message.session, at)

    async def _named(self, pod: Pod, report: Report) -> PreemptionRecord:
        """The preemption that a report names.

        This operator notified the gang of it. If all replicas ended before one of them recorded that, only the gang
        knows of it. Then the record is made from the report.
        """
        try:
            return await self._find(pod, report.preemption)
        except UnknownPreemption:
            gang = await self._refreshed_gang(pod)
            if (existing := self._cache.preemptions.records.get((pod.namespace, report.preemption))) is not None:
                return existing  # made meanwhile, by another report
            if gang is None or self._preemption_about(pod) is not None:
                raise
            preemption = self._new_preemption(gang, pod, report, signals.REPORTED_BEFORE)
            if preemption is None or preemption.name != report.preemption:
                raise
            logger.warning(
                "a notice without a record, which is made from the report",
                extra=about(preemption=preemption.name, pod=pod.name),
            )
        # Nobody knows any more which pods the signal was about. The gang's primary process reports for all.
        preemption = dataclasses.replace(preemption, spec=preemption.spec.model_copy(update={"nodes": [], "pods": []}))
        self._cache.preemptions.put(preemption)
        return preemption

    async def _find(self, pod: Pod, name: str) -> PreemptionRecord:
        """The preemption that a message names.

        The other replica may have notified the pod a moment ago, and may be about to create the object. So the method
        waits for it shortly.
        """
        key = (pod.namespace, name)
        cached = self._cache.preemptions.records.get(key)
        if cached is not None and cached.spec.workload.uid == pod.workload_uid:
            return cached  # at once: all pods of a gang acknowledge at about the same time
        try:
            preemption = await _OTHER_REPLICA_BACKOFF.retried(
                self._fetch, key, on=client.NotFound, within_s=self.other_replica_s
            )
        except (client.NotFound, client.Refused) as error:
            raise UnknownPreemption(f"preemption: found {name!r}, which is not there") from error
        if preemption.spec.workload.uid != pod.workload_uid:
            raise UnknownPreemption(f"preemption: found {name!r}, expected one of the pod's {ANY_NAME}")
        return preemption

    async def _fetch(self, key: tuple[str, str]) -> PreemptionRecord:
        if key not in self._cache.preemptions.records:
            body = await self._api.get(objects.PREEMPTIONS, *key)
            self._cache.put(objects.PREEMPTIONS, body, listed=True)
            if (reason := self._cache.unreadable_objects.why(body["metadata"]["uid"])) is not None:
                raise UnknownPreemption(f"preemption: found {key[1]!r}, which cannot be read ({reason})")
        if key not in self._cache.preemptions.records:
            raise client.NotFound(f"{key}: it was deleted in between")
        return self._cache.preemptions.records[key]

    async def _place(self, pod: Pod, report: Report) -> PreemptionRecord | None:
        """The preemption of a report that names none. None if the SIGTERM was not a disruption."""
        if (existing := self._preemption_about(pod)) is not None:
            return existing
        gang = await self._refreshed_gang(pod)
        if (existing := self._preemption_about(pod)) is not None:  # made meanwhile: by another report, or for a signal
            return existing
        preemption = None if gang is None else self._new_preemption(gang, pod, report, signals.REPORTED_BY_GANG)
        if gang is None or preemption is None or gang.is_ordinary_life(pod):
            logger.info(
                "a gang ends without a disruption", extra=seldom(report.phase, pod=pod.name, phase=report.phase)
            )
            return None
        self._cache.preemptions.put(preemption)
        return preemption

    async def _refreshed_gang(self, pod: Pod) -> GangSnapshot | None:
        """The pod's gang after its workload and its Job were read again; None if the workload is not known."""
        workload = self._cache.objects.workloads.get(pod.workload_uid)
        if workload is None:
            return None
        await refresh_workload(self._api, self._cache, workload, [pod.job_name])
        return self._cache.gang(pod.workload_uid)

    def _new_preemption(self, gang: GangSnapshot, pod: Pod, report: Report, text: str) -> PreemptionRecord | None:
        """A new preemption of which the gang alone knows; None if its workload is gone, or has no policy any more."""
        if gang.workload is None or gang.policy is None:
            return None
        # The stages of a report count from the notice. Nothing else is known of the notice.
        notified_at = self._clock() - max((timing.max_s for timing in report.stages.values()), default=0.0)
        notified_at = max(notified_at, pod.created_at)
        signal = signals.reported_by_gang(pod, report.cause, text)
        timed = [Timed(signal, notified_at)]
        spec = effective_signals.begun(gang.workload, gang.policy, gang.preemptions, gang.pods, timed, self._clock())
        name = preemption_name(gang.workload.name, gang.workload.uid, spec.epoch)
        return PreemptionRecord(pod.namespace, name, None, spec, preemption_status.noticed(len(gang.processes), spec))

    def _preemption_about(self, pod: Pod) -> PreemptionRecord | None:
        """The preemption that a report without a name is about. None: there is none from which the gang would exit."""
        preemptions = reversed(self._cache.preemptions.of_workload(pod.workload_uid, pod.namespace))
        latest = next(
            (
                preemption
                for preemption in preemptions
                if preemption.asks_to_leave or preemption.spec.mode is Mode.OBSERVE
            ),
            None,
        )
        about_it = latest is not None and latest.includes(pod) and not _left_the_gang_training(latest)
        return latest if about_it else None


def _names(message: Resumption, preemption: PreemptionRecord) -> bool:
    return message.saved_for is not None and message.saved_for.preemption == preemption.name


def _left_the_gang_training(preemption: PreemptionRecord) -> bool:
    """True if the preemption ended and its gang continued. What the gang reports by itself later is another disruption.

    A preemption that only the gang knew of may expire before the gang's last report, which is still about it.
    """
    return preemption.phase is Phase.RETRACTED or (
        preemption.phase is Phase.EXPIRED and preemption.spec.signal not in signals.KNOWN_TO_GANG
    )
