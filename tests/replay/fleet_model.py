"""The model of a fleet: one training job, its faults and its saves, as discrete events. No cluster, no clock.

Faults come at random, at any time: also while the job restarts. A fault is the moment at which a node goes. An
announced one is known before, so that a save may come first. After each fault the job restores the newest state that
is left, and what it had trained beyond that is lost. All policies meet the same faults.

Between two faults nothing is simulated: which save was the last one to be complete follows from the time.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections.abc import Generator, Iterable
from typing import Any

import simpy

#: No interval is longer, even if nothing is ever lost.
LONGEST_INTERVAL_S = 3600.0
#: Of a deadline, the library leaves so much for what comes after the save (docs/deadline.md).
_RESERVE_S = 2.0
#: Weights and both moments of Adam in float32 (docs/snapshots.md).
BYTES_PER_PARAMETER = 12

_Steps = Generator[Any, Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured here, what others have published, and what is assumed. One value for all policies.

    Attributes:
        restart_s: From the last save to the first step on the cluster of the tests: docs/benchmarks.md, "From the
            commit to the next step".
        lost_node_s: How much longer it takes if a node is off: measured with 11 lost nodes, ``node-off`` less
            ``taint``.
        heartbeat_s: How long until an agent of one's own sees that: NVRx's default ``heartbeat_timeout``.
        stop_s_per_host: Until all hosts stand still at one step: docs/scale.md, 3.8 s at 4,096 processes.
        recreate_s_per_host: Creating all pods again: 130 s at 5,000 nodes, measured by DaoCloud.
        in_place_s: Restarting in place instead: 10 s there.
        program_start_s: Assumed: devices, collectives, compiled programs, the first batch.
        save_factor: A save to a bucket, over its bytes at the bandwidth: docs/benchmarks.md, "Object stores".
        restore_factor: The same for a restore: 1.42 / 1.30 there.
        block_factor: How long a save stops training, over a copy to host memory: there, "Saving and restoring".
        write_slows: How much slower training is while a save or a snapshot is written: the bound of CheckFreq.
        host_copy_bytes_per_s: Assumed: from the devices of a host to its memory.
        host_storage_bytes_per_s: Assumed: between a host and storage, 100 Gbit/s.
        snapshot_bytes_per_s: Gracepoint's snapshots between two hosts, over TLS: ``python -m benchmarks.snapshots``, a
            second of one core for each GiB.
        peer_bytes_per_s: Copies between two hosts over the network of the training: 400 Gbit/s, as in Gemini.
        both_copies: Assumed: share of the faults that take both copies of a part.
        step_s: Assumed.
        grace_s: Kubernetes' default for a pod that gets SIGTERM.
    """

    restart_s: float = 4.96
    lost_node_s: float = 77.3 - 6.9
    heartbeat_s: float = 30.0
    stop_s_per_host: float = 3.8 / 4096
    recreate_s_per_host: float = 130 / 5000
    in_place_s: float = 10.0
    program_start_s: float = 60.0
    save_factor: float = 1.24
    restore_factor: float = 1.09
    block_factor: float = 1.10
    write_slows: float = 0.035
    host_copy_bytes_per_s: float = 100e9
    host_storage_bytes_per_s: float = 12.5e9
    snapshot_bytes_per_s: float = 1e9
    peer_bytes_per_s: float = 50e9
    both_copies: float = 0.01
    step_s: float = 10.0
    grace_s: float = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """A job and what it runs on.

    Attributes:
        hosts: How many, with 8 accelerators each.
        parameters: Of the model. The state is sharded over all hosts.
        storage_bytes_per_s: Of all hosts together.
        mttf_s: Mean time between two faults of the job.
        announced: Share of the faults that are announced.
        notice_s: How long before.
    """

    hosts: int
    parameters: float
    storage_bytes_per_s: float
    mttf_s: float
    announced: float
    notice_s: float = 120.0

    @property
    def state_bytes(self) -> float:
        return self.parameters * BYTES_PER_PARAMETER


class FinalSave(enum.Enum):
    """What is saved before an announced end."""

    NONE = "nothing"
    ONE_HOST = "the host that gets SIGTERM writes the whole state"
    SIGTERM = "all hosts save the same step, after the SIGTERM"
    NOTICE = "all hosts save the same step, before the deadline"


class Copies(enum.Enum):
    """Which copies there are in the memory of hosts, each part in that of two."""

    NONE = "none"
    SNAPSHOTS = "over TLS, in servers beside the job"
    NETWORK = "over the network of the training, at no cost to it"


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is done about faults.

    Attributes:
        name: Its name in tables.
        assumes: What the model has of it.
        source: Where that is from.
        final_save: What is saved before an announced end.
        copies: Which copies there are in memory.
        in_place: Whether living processes stay, and a spare host takes the place of a lost one.
    """

    name: str
    assumes: str
    source: str
    final_save: FinalSave = FinalSave.NONE
    copies: Copies = Copies.NONE
    in_place: bool = False


POLICIES = (
    Policy(
        "Gracepoint",
        "All hosts save one step before the end, if the notice is long enough; all pods start again.",
        "docs/benchmarks.md, docs/deadline.md",
        final_save=FinalSave.NOTICE,
    ),
    Policy(
        "Gracepoint, snapshots",
        "The same, and each part is in the memory of two hosts, over TLS; if storage is too slow, so is the last step.",
        "docs/snapshots.md, docs/deadline.md",
        final_save=FinalSave.NOTICE,
        copies=Copies.SNAPSHOTS,
    ),
    Policy(
        "periodic saves",
        "Saves in the background at the best interval; a notice changes nothing.",
        "CheckFreq, https://www.usenix.org/conference/fast21/presentation/mohan",
    ),
    Policy(
        "SIGTERM, one node",
        "The node that goes writes the whole state alone; so each node must hold all of it.",
        "Kubernetes' grace period of 30 s; the state on each node is the best case",
        final_save=FinalSave.ONE_HOST,
    ),
    Policy(
        "SIGTERM, all nodes",
        "A SIGTERM makes all hosts save one step, within the pod's grace period.",
        "https://orbax.readthedocs.io/en/latest/guides/checkpoint/preemption_checkpointing.html",
        final_save=FinalSave.SIGTERM,
    ),
    Policy(
        "copies in memory",
        "At each step, own host and a peer get a copy at no cost to training; all pods start again.",
        "Gemini, https://doi.org/10.1145/3600006.3613145; GKE's Multi-Tier Checkpointing",
        copies=Copies.NETWORK,
    ),
    Policy(
        "in-place restarts",
        "The same copies; living processes stay, a spare host is ready, an agent sees a death in 30 s.",
        "https://nvidia.github.io/nvidia-resiliency-ext/inprocess; https://arxiv.org/abs/2509.16293",
        copies=Copies.NETWORK,
        in_place=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class Tier:
    """A place that states are kept in.

    Attributes:
        interval_s: From one save to the next.
        cost_s: Training that a save costs.
        durable_s: From its begin until it may be restored.
        restore_s: How long a restore takes.
    """

    interval_s: float
    cost_s: float
    durable_s: float
    restore_s: float

    def newest_s(self, age_s: float) -> float | None:
        """Returns when the newest complete save began, in seconds of a start that trains for ``age_s``; None: none."""
        count = math.floor((age_s - self.durable_s + self.cost_s) / self.interval_s)
        return count * self.interval_s if count > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What a policy costs a job of one fleet.

    Attributes:
        storage: Saves to storage.
        memory: Copies in the memory of hosts. None: there are none.
        final_save_s: How long training stands still to save before an announced end. None: that does not fit.
        evacuates: Whether that save goes to memory.
        restart_s: From an end to the begin of the restore.
        unseen_s: How much longer it takes if the end was not announced.
        both_copies: Share of the faults that take both copies in memory.
    """

    storage: Tier
    memory: Tier | None = None
    final_save_s: float | None
    evacuates: bool = False
    restart_s: float
    unseen_s: float
    both_copies: float = 0.0

    @property
    def speed(self) -> float:
        """Share of the time between faults in which no save stops training."""
        return 1 - sum(tier.cost_s / tier.interval_s for tier in (self.storage, self.memory) if tier is not None)


def best_interval_s(cost_s: float, mttf_s: float) -> float:
    """Returns the interval from one save to the next that costs least, by Daly (2006), within ``LONGEST_INTERVAL_S``.

    Args:
        cost_s: Training that a save costs.
        mttf_s: Mean time between two faults that cost what was not saved.
    """
    if math.isinf(mttf_s):
        return LONGEST_INTERVAL_S
    if cost_s >= 2 * mttf_s:
        return mttf_s + cost_s
    root = math.sqrt(cost_s / (2 * mttf_s))
    return min(LONGEST_INTERVAL_S, math.sqrt(2 * cost_s * mttf_s) * (1 + root / 3 + root**2 / 9))


def costs(policy: Policy, fleet: Fleet, figures: Figures) -> Costs:
    """Returns what ``policy`` costs in ``fleet``, with its best intervals."""
    part_bytes = fleet.state_bytes / fleet.hosts
    storage_bytes_per_s = min(fleet.storage_bytes_per_s, fleet.hosts * figures.host_storage_bytes_per_s)
    block_s = figures.block_factor * part_bytes / figures.host_copy_bytes_per_s
    final_save_s = _final_save_s(policy, fleet, figures, storage_bytes_per_s)
    evacuates = final_save_s is None and policy.copies is Copies.SNAPSHOTS
    if evacuates:
        sent_s = figures.stop_s_per_host * fleet.hosts + part_bytes / figures.snapshot_bytes_per_s
        final_save_s = sent_s if figures.step_s + sent_s <= fleet.notice_s - _RESERVE_S else None
    losing = 1.0 if final_save_s is None else 1.0 - fleet.announced
    memory = None
    if policy.copies is not Copies.NONE:
        snapshots = policy.copies is Copies.SNAPSHOTS
        sent_s = part_bytes / (figures.snapshot_bytes_per_s if snapshots else figures.peer_bytes_per_s)
        cost_s = block_s + figures.write_slows * sent_s if snapshots else 0.0
        best_s = best_interval_s(cost_s, _mean_s(fleet.mttf_s, losing))
        memory = Tier(max(figures.step_s, sent_s, best_s), cost_s, block_s + sent_s, sent_s)
        losing *= figures.both_copies
    write_s = figures.save_factor * fleet.state_bytes / storage_bytes_per_s
    read_s = figures.restore_factor * fleet.state_bytes / storage_bytes_per_s
    cost_s = block_s + figures.write_slows * write_s
    best_s = best_interval_s(cost_s, _mean_s(fleet.mttf_s, losing))
    start_s = figures.restart_s + figures.recreate_s_per_host * fleet.hosts + figures.program_start_s
    return Costs(
        storage=Tier(max(write_s, best_s), cost_s, block_s + write_s, read_s),
        memory=memory,
        final_save_s=final_save_s,
        evacuates=evacuates,
        restart_s=figures.in_place_s if policy.in_place else start_s,
        unseen_s=figures.heartbeat_s if policy.in_place else figures.lost_node_s,
        both_copies=figures.both_copies,
    )


def _mean_s(mttf_s: float, share: float) -> float:
    return mttf_s / share if share else math.inf


def _final_save_s(policy: Policy, fleet: Fleet, figures: Figures, storage_bytes_per_s: float) -> float | None:
    """Returns how long the save before an announced end takes. None: there is none, or it does not fit."""
    if policy.final_save is FinalSave.NONE:
        return None
    left_s, stop_s = min(fleet.notice_s, figures.grace_s), figures.stop_s_per_host * fleet.hosts
    if policy.final_save is FinalSave.ONE_HOST:
        storage_bytes_per_s, stop_s = min(storage_bytes_per_s, figures.host_storage_bytes_per_s), 0.0
    elif policy.final_save is FinalSave.NOTICE:
        left_s = fleet.notice_s - _RESERVE_S
    takes_s = stop_s + figures.save_factor * fleet.state_bytes / storage_bytes_per_s
    return takes_s if figures.step_s + takes_s <= left_s else None


@dataclasses.dataclass(frozen=True)
class Fault:
    """A node goes.

    Attributes:
        after_s: Seconds since the fault before it.
        announced: Whether it is announced.
        both_copies: Whether it takes both copies of a part.
    """

    after_s: float
    announced: bool
    both_copies: bool = False


def random_faults(mttf_s: float, announced: float, both_copies: float, *, count: int, seed: int) -> list[Fault]:
    """Returns faults with the given shares, and with exponentially distributed times between them.

    The times and the shares are exact, and their order is random: so another seed changes little. The same seed gives
    the same ones to all policies.
    """
    source = random.Random(seed)

    def places() -> list[float]:
        return source.sample([(number + 0.5) / count for number in range(count)], count)

    return [
        Fault(-mttf_s * math.log(1 - after), which < announced, copies < both_copies)
        for after, which, copies in zip(places(), places(), places(), strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where the time of a job went. In the rest of it, training stood still.

    Attributes:
        wall_s: All of it.
        kept_s: Training whose results were kept.
        lost_s: Training whose results were lost.
    """

    wall_s: float
    kept_s: float
    lost_s: float

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.wall_s + other.wall_s, self.kept_s + other.kept_s, self.lost_s + other.lost_s)

    @property
    def goodput(self) -> float:
        """Share of the time in which the job trained what was kept."""
        return self.kept_s / self.wall_s

    @property
    def lost(self) -> float:
        """Share of the time in which it trained what was lost."""
        return self.lost_s / self.wall_s


def simulate(of: Costs, faults: Iterable[Fault], *, only_in_training: bool = False) -> Outcome:
    """Returns where the time of a job goes, until it trains again after the last fault.

    Args:
        of: What faults and saves cost.
        faults: When they come.
        only_in_training: The time between two faults counts while the job trains, as in a replay. Otherwise they come
            while it restarts, too.
    """
    return _Run(of, faults, only_in_training).run()


class _Run:
    """One job. Work is counted in seconds of undisturbed training."""

    def __init__(self, of: Costs, faults: Iterable[Fault], only_in_training: bool) -> None:
        self._costs, self._faults, self._only_in_training = of, faults, only_in_training
        self._env = simpy.Environment()
        self._next_fault, self._training = self._env.event(), self._env.event()
        self._work_s = self._lost_s = self._stored_s = self._copied_s = 0.0

    def run(self) -> Outcome:
        self._env.process(self._job())
        self._env.run(until=self._env.process(self._fault_after_fault()))
        return Outcome(self._env.now, self._work_s, self._lost_s)

    def _fault_after_fault(self) -> _Steps:
        for fault in self._faults:
            if self._only_in_training:
                yield self._training
            yield self._env.timeout(fault.after_s)
            reached, self._next_fault, self._training = self._next_fault, self._env.event(), self._env.event()
            reached.succeed(fault)
        yield self._training  # what the last one has cost counts

    def _job(self) -> _Steps:
        restore_s, unseen_s = 0.0, 0.0
        while True:
            fault = yield from self._fault_within(unseen_s + self._costs.restart_s + restore_s)
            if fault is None:
                fault = yield from self._train()
                if fault.announced and self._costs.final_save_s is not None:
                    fault = (yield from self._save(self._costs.final_save_s)) or fault
            restore_s = self._go_back(fault)
            unseen_s = 0.0 if fault.announced else self._costs.unseen_s

    def _fault_within(self, seconds: float) -> _Steps:
        """Returns the fault that came, or None if ``seconds`` have passed without one."""
        fault = self._next_fault
        yield self._env.timeout(seconds) | fault if seconds < math.inf else fault
        return fault.value if fault.triggered else None

    def _train(self) -> _Steps:
        """Returns the fault that has ended it."""
        began_s = self._env.now
        self._training.succeed()
        fault = yield from self._fault_within(math.inf)
        age_s, speed, before_s = self._env.now - began_s, self._costs.speed, self._work_s
        self._work_s += speed * age_s
        stored_s = self._costs.storage.newest_s(age_s)
        if stored_s is not None:
            self._stored_s = before_s + speed * stored_s
        copied_s = None if self._costs.memory is None else self._costs.memory.newest_s(age_s)
        if copied_s is not None:
            self._copied_s = before_s + speed * copied_s
        return fault

    def _save(self, seconds: float) -> _Steps:
        """Saves before an announced end. Returns the fault that came meanwhile, if one came."""
        other = yield from self._fault_within(seconds)
        if other is None and self._costs.evacuates:
            self._copied_s = self._work_s
        elif other is None:
            self._stored_s = self._work_s
        return other

    def _go_back(self, fault: Fault) -> float:
        """Goes back to the newest state that is left, and returns how long it takes to restore."""
        if fault.both_copies:
            self._copied_s = 0.0
        kept_s = max(self._stored_s, self._copied_s)
        self._lost_s += self._work_s - kept_s
        self._work_s = kept_s
        memory = self._costs.memory if self._copied_s > self._stored_s else None
        return (memory or self._costs.storage).restore_s
