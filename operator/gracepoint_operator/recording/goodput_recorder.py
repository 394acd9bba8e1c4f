"""Keeps the accounts of where the time of each workload goes.

Everything here runs on the controller's event loop. Only the copy for the metrics waits, so that others can run
meanwhile. ``observe`` is called whenever a workload is decided about, ``take_times`` with what a process reports. What
changes an account is kept as a list of changes. The policy writer puts them into the policy's status (``entries``),
where the account is, and says when that is written (``written``). Both replicas do so: to take a change a second time
changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

from gracepoint.wire.messages import Forecast, SaveEvery, Spent
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.goodput import accounts, pods_seen
from gracepoint_operator.goodput.accounts import GoodputLedger, stages, suggested
from gracepoint_operator.goodput.life import (
    BlockedTimes,
    Category,
    PodsObservation,
    ProcessTimes,
    StallTimes,
    process_times,
    stall_times,
)
from gracepoint_operator.goodput.pods_seen import LastLook
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.logs import seldom
from gracepoint_operator.metrics import AccountRow, Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.resources import CheckpointPolicy, WorkloadForecast, WorkloadGoodput
from gracepoint_operator.workloads import Workload

logger = logging.getLogger(__name__)

#: Workloads in a policy's status; the limit in its schema.
_ENTRIES = 50
#: Changes of one account that wait to be written. While the API server is out of reach, more are dropped.
_WAITING = 1000
#: A large gang is looked at less often: after this many seconds for each of its pods. While it starts, each of its pods
#: changes several times, and each time the gang is decided about.
_PER_POD_S = 0.0005
#: If that is less than this, it is looked at every time.
_AT_ONCE_S = 0.01
#: An entry in which nothing has changed is written again after this time, if the status is written anyway.
_OLD_S = 300.0
#: So many accounts are copied in one turn of the event loop: some milliseconds.
_COPIED_AT_ONCE = 50


@dataclasses.dataclass(frozen=True)
class _End:
    """The workload has finished."""

    at_ms: int


_Change = PodsObservation | ProcessTimes | StallTimes | BlockedTimes | _End


@dataclasses.dataclass
class _Account:
    """What is known here of one workload in addition to the policy's status.

    Attributes:
        begun: The ledger as it began here. Used if there is no entry.
        newest: The newest entry that this replica has written. None if it has written none.
        base: The entry that was read last, and what it says.
        waiting: The changes that are not written, oldest first.
        handed: How many of these are being written.
        known: What was seen of the current life.
        rests_until: Until when the pods are not looked at again, in seconds since the epoch.
    """

    begun: GoodputLedger
    newest: WorkloadGoodput | None = None
    base: tuple[WorkloadGoodput, GoodputLedger] | None = None
    waiting: list[_Change] = dataclasses.field(default_factory=list)
    handed: int = 0
    known: LastLook | None = None
    rests_until: float = 0.0

    def read(self, entry: WorkloadGoodput | None) -> GoodputLedger:
        """Returns what an entry says together with the changes that wait."""
        if entry is None:
            ledger = self.begun
        elif self.base is not None and self.base[0] is entry:
            ledger = self.base[1]
        else:
            ledger = accounts.read(entry)
            self.base = (entry, ledger)
        return _with_changes(ledger, self.waiting)


class GoodputRecorder:
    """Keeps the accounts of where the time of each workload goes.

    Args:
        cache: What is known of the cluster, with the statuses of the policies.
        changed: Called with namespace and name of a policy whose accounts have changed, and whether that is more than
            figures.
        metrics: Shows the accounts.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        cache: ClusterCache,
        changed: Callable[[str, str, bool], None],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._changed = changed
        self._clock = clock
        self._accounts: dict[str, _Account] = {}  # by the workload's UID
        metrics.copy_accounts = self._copy

    def observe(self, gang: GangSnapshot) -> float | None:
        """Looks at the pods of a gang. Returns when to look again even if nothing changes. None: there is no need."""
        workload = gang.workload
        if workload is None or gang.policy is None or not workload.injected or workload.deleted:
            return None
        account = self._accounts.get(workload.uid)
        if account is None:
            account = self._accounts[workload.uid] = _Account(pods_seen.begun(gang, self._now_ms()))
        if self._clock() < account.rests_until:
            return account.rests_until
        return self._look(gang, workload, gang.policy, account)

    def _look(
        self, gang: GangSnapshot, workload: Workload, policy: CheckpointPolicy, account: _Account
    ) -> float | None:
        now_ms = self._now_ms()
        pause_s = len(gang.pods) * _PER_POD_S
        account.rests_until = now_ms / 1000 + pause_s if pause_s > _AT_ONCE_S else 0.0
        ledger = self._ledger(account, policy, workload.uid)
        look = pods_seen.look(gang, ledger.current, account.known, now_ms, before=ledger.trained_before)
        account.known = look.last_look
        for observation in look.observations:
            ledger = self._change(account, workload, ledger, observation)
        if workload.finished:
            self._change(account, workload, ledger, _End(now_ms))
            if account.waiting:  # figures, which the other replica did not know when it wrote the end
                self._changed(workload.namespace, workload.policy, True)
        return None if look.again_ms is None else look.again_ms / 1000

    def take_times(self, pod: Pod, session: str, spent: Spent | None, *, of_former: bool = False) -> None:
        """Takes the times that a process of a pod reports.

        Args:
            pod: The pod.
            session: The session that it reports.
            spent: What it says. None: nothing, as older libraries.
            of_former: True if the session is of a former start, which its pod's process has found in the checkpoint.
        """
        if spent is not None:
            self._take(pod, process_times(spent, session, pod, self._clock(), of_former=of_former), spent)

    def stalled(self, pod: Pod, stalled_s: float | None) -> None:
        """Takes that a process of a pod has passed no step for so many seconds. None: it does not stall."""
        if stalled_s is not None:
            self._take(pod, stall_times(stalled_s, pod, self._clock()), stalled_s)

    def blocked(self, workload_uid: str, since: float, until: float | None) -> None:
        """Takes that a gang is blocked since a time, or was until another. In seconds since the epoch."""
        account, (workload, policy) = self._accounts.get(workload_uid), self._workload(workload_uid)
        if account is not None and workload is not None and policy is not None:
            until_ms = None if until is None else round(until * 1000)
            change = BlockedTimes(since_ms=round(since * 1000), until_ms=until_ms)
            self._change(account, workload, self._ledger(account, policy, workload_uid), change)

    def unblocked(self, workload_uid: str, until: float) -> None:
        """Takes that a gang is not blocked, whatever the replica before has written."""
        account, (_, policy) = self._accounts.get(workload_uid), self._workload(workload_uid)
        since_ms = (
            None if account is None or policy is None else self._ledger(account, policy, workload_uid).blocked_since_ms
        )
        if since_ms is not None:
            self.blocked(workload_uid, since_ms / 1000, until)

    def _take(self, pod: Pod, change: ProcessTimes | StallTimes | None, report: object) -> None:
        if change is None:
            extra = seldom(type(report).__name__, pod=pod.name, said=str(report))
            logger.warning("a process reported impossible times", extra=extra)
            return
        uid = pod.workload_uid
        if uid not in self._accounts:
            # A replica that has just started hears processes before it decides about their gang.
            self.observe(self._cache.gang(uid))
        account, (workload, policy) = self._accounts.get(uid), self._workload(uid)
        if workload is None or account is None or policy is None:
            return
        if isinstance(change, ProcessTimes) or self._needs_look(change, account, self._ledger(account, policy, uid)):
            # The pod may be of a life that was not seen yet.
            self._look(self._cache.gang(uid), workload, policy, account)
        self._change(account, workload, self._ledger(account, policy, uid), change)

    def _needs_look(self, stall: StallTimes, account: _Account, ledger: GoodputLedger) -> bool:
        """Returns whether a gang is looked at before it is noted that it stalls.

        All its processes may report a stall at once. If a report changes nothing in the present ledger, the pods need
        not be read first: an attempt that is found then has not trained yet.
        """
        return self._clock() >= account.rests_until and ledger.with_observation(stall) != ledger

    def session_before(self, workload_uid: str, session: str, by: float) -> str:
        """Returns the session of the start of a workload right before that of a session.

        Empty if it is not known, or if the pods of that start were made after ``by``, in seconds since the epoch.
        """
        account, (_, policy) = self._accounts.get(workload_uid), self._workload(workload_uid)
        if account is None or policy is None:
            return ""
        return self._ledger(account, policy, workload_uid).session_before(session, round(by * 1000))

    def answer(self, message: Forecast) -> SaveEvery | None:
        """Returns how often a gang should save. None if it does not want to know, or if that is not known."""
        account, (_, policy) = self._accounts.get(message.workload_uid), self._workload(message.workload_uid)
        if not message.takes_interval or account is None or policy is None:
            return None
        ledger = self._ledger(account, policy, message.workload_uid)
        interval = suggested(ledger, self._now_ms(), at_least_s=max(0.0, message.save_s))
        return None if interval is None else SaveEvery(every_s=round(interval.interval_s, 1))

    def forget(self, workload_uid: str) -> None:
        """The workload is gone."""
        self._accounts.pop(workload_uid, None)

    def entries(
        self,
        policy: CheckpointPolicy,
        workloads: Sequence[Workload],
        forecasts: Iterable[WorkloadForecast],
    ) -> list[WorkloadGoodput] | None:
        """Returns the accounts for the status of a policy as it was just read. None if there are none.

        A status has room for ``_ENTRIES``. If there are more workloads, those that have finished make room for others.
        """
        now_ms = self._now_ms()
        save_s = {forecast.uid: forecast.save_seconds for forecast in forecasts}
        by_uid = {workload.uid: workload for workload in workloads}
        entries = {entry.uid: entry for entry in policy.status.goodput or () if entry.uid in by_uid}
        new = [uid for uid in by_uid.keys() - entries.keys() if uid in self._accounts and self._accounts[uid].waiting]
        finished = sorted((entry for entry in entries.values() if entry.finished), key=lambda entry: entry.until)
        too_many = len(entries) + len(new) - _ENTRIES
        for gone in finished[: max(0, too_many)]:
            del entries[gone.uid]
        for uid in [*entries, *sorted(new)[: max(0, _ENTRIES - len(entries))]]:
            entry: WorkloadGoodput | None = entries.get(uid)
            account = self._accounts.get(uid)
            if account is None or not (account.waiting or (entry is not None and _is_old(entry, now_ms))):
                continue
            account.handed = len(account.waiting)
            newest = account.newest if entry is None else entry
            ledger = account.read(newest)
            if newest is None or accounts.read(newest) != ledger or _is_old(newest, now_ms):
                newest = accounts.written(ledger, by_uid[uid], now_ms, save_s=save_s.get(uid, 0.0))
                account.newest = newest
            entries[uid] = newest
        if not entries and policy.status.goodput is None:
            return None
        return sorted(entries.values(), key=lambda entry: entry.name)

    def written(self, workloads: Iterable[Workload]) -> None:
        """The entries of these workloads are in the status."""
        for workload in workloads:
            if (account := self._accounts.get(workload.uid)) is not None:
                del account.waiting[: account.handed]
                account.handed = 0

    def _workload(self, uid: str) -> tuple[Workload | None, CheckpointPolicy | None]:
        """The workload with this UID and its policy, as far as they are there, without a snapshot of its gang."""
        workload = self._cache.objects.workloads.get(uid)
        return workload, None if workload is None else self._cache.policies.get((workload.namespace, workload.policy))

    def _ledger(self, account: _Account, policy: CheckpointPolicy, uid: str) -> GoodputLedger:
        """The account with everything that is known here."""
        entry = next((entry for entry in policy.status.goodput or () if entry.uid == uid), None)
        if account.newest is not None and (entry is None or entry.until < account.newest.until):
            entry = account.newest  # the watch has not brought it yet
        return account.read(entry)

    def _change(self, account: _Account, workload: Workload, ledger: GoodputLedger, change: _Change) -> GoodputLedger:
        after = _with_changes(ledger, [change])
        if after != ledger:
            if _repeats(change, account):
                account.waiting[-1] = change
            else:
                account.waiting.append(change)
            if len(account.waiting) > _WAITING:
                del account.waiting[0]
                account.handed = max(0, account.handed - 1)
            self._changed(workload.namespace, workload.policy, stages(after) != stages(ledger))
        return after

    async def _copy(self) -> Callable[[], Iterable[AccountRow]]:
        """Copies the accounts, some at a time. The figures are computed from the copy, on any thread."""
        ledgers: list[tuple[str, str, GoodputLedger]] = []
        for key in self._cache.policies:
            if (policy := self._cache.policies.get(key)) is None:
                continue  # deleted meanwhile
            for entry in policy.status.goodput or ():
                if (account := self._accounts.get(entry.uid)) is not None:
                    ledgers.append((policy.namespace, entry.name, self._ledger(account, policy, entry.uid)))
                    if len(ledgers) % _COPIED_AT_ONCE == 0:
                        await asyncio.sleep(0)
        now_ms = self._now_ms()

        def rows() -> Iterable[AccountRow]:
            for namespace, workload, ledger in ledgers:
                spent = ledger.spent(now_ms)
                for category in Category:
                    yield namespace, workload, category.value, spent.get(category, 0) / 1000

        return rows

    def _now_ms(self) -> int:
        return round(self._clock() * 1000)


def _repeats(change: _Change, account: _Account) -> bool:
    """Returns whether a change has all that the newest waiting one has: a process reports sums since its start."""
    newest = account.waiting[-1] if len(account.waiting) > account.handed else None
    if not (isinstance(change, ProcessTimes) and isinstance(newest, ProcessTimes)):
        return False
    return (change.session, change.attempt, change.created_ms) == (newest.session, newest.attempt, newest.created_ms)


def _with_changes(ledger: GoodputLedger, changes: Iterable[_Change]) -> GoodputLedger:
    for change in changes:
        ledger = ledger.with_end(change.at_ms) if isinstance(change, _End) else ledger.with_observation(change)
    return ledger


def _is_old(entry: WorkloadGoodput, now_ms: int) -> bool:
    return entry.finished is None and now_ms / 1000 - entry.until.timestamp() > _OLD_S
