"""Lets faults of every kind happen to training jobs on a real cluster, and says what each of them cost.

    python -m tests.replay --seed 1 --faults 300 --minutes 140
    python -m tests.replay --seed 1 --only 17
    python -m tests.replay --kinds storage-503 --faults 1
    python -m tests.replay --trace FILE [--minutes M]

After each fault the job must train again by itself, lose no more steps than is promised for that kind of fault, and
have one record with the right cause; no alert may fire that is not about it. In the end its losses, the order of its
data and its parameters must be those of a run that nobody disturbed, bit for bit, and nothing of it may be left. Ends
with 1 if any of that does not hold.

Results are appended to results.jsonl and ends.jsonl in build/replay. What is there already is not done again, so the
same command goes on with a replay that was cut. report.md and report.svg are made of all results; logs of what broke
something are in logs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from demo import install
from demo.narrator import Narrator
from tests import testcluster
from tests.replay import alerts, report, results, trace, volume
from tests.replay.kinds import KINDS
from tests.replay.results import Result
from tests.replay.runner import SETTINGS, Replay, checkpoints_of
from tests.replay.trace import Fault
from tests.replay.workloads import WORKLOADS
from tests.testcluster import parts
from tests.testcluster.api import Cluster, ClusterError, NotSupported
from tests.testcluster.providers import CONTEXT_VARIABLE, LOCAL, provider

_KEPT = "TESTCLUSTER_ID"
#: After so many clusters on which no fault could happen, one after another, a replay gives up.
_IN_VAIN = 3


def main() -> int:
    """Runs a part of a replay; returns 1 if something was found that must not be."""
    flags = _flags()
    faults = flags.trace_faults
    results_file, ends_file = flags.folder / results.FILE.name, flags.folder / results.ENDS.name
    done = {_identity(result) for result in results.read(results_file)}
    again = set(flags.only)
    ahead = [fault for fault in faults if (fault.fault in again if again else _identity(fault) not in done)]
    say = Narrator()
    say(f"{len(faults)} faults, {len(ahead)} to do; results in {flags.folder}")
    signal.signal(signal.SIGTERM, _interrupt)
    stopped = 0
    try:
        if ahead:
            run(
                ahead,
                say=say,
                folder=flags.folder,
                minutes=flags.minutes,
                context=flags.context,
                nodes=flags.nodes,
                registry=flags.registry,
            )
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the report says what was found until then
        if not isinstance(error, ClusterError | KeyboardInterrupt):
            traceback.print_exc()
        say(f"stopped: {error}\nlogs are in {flags.folder / 'logs'}; the same command goes on")
        stopped = 1
    of = {_identity(fault) for fault in faults}
    every = [each for each in results.read(results_file) if _identity(each) in of]
    found, redone = results.newest(every), results.redone(every)
    ends = [end for end in results.read_ends(ends_file) if end.seed in {fault.seed for fault in faults}]
    if found:
        report.write(found, ends, flags.folder, redone)
        print(report.rendered(found, ends, redone))
    return 1 if stopped or report.problems(found, ends) else 0


def _identity(of: Fault | Result) -> tuple[int, int, str, str]:
    """What a result has in common with its fault. Another version makes other faults of a seed."""
    return of.seed, of.fault, of.kind, of.workload


def run(
    ahead: Sequence[Fault],
    *,
    say: Callable[[str], None],
    folder: Path,
    minutes: float | None = None,
    context: str | None = None,
    nodes: Sequence[str] = (),
    registry: str = install.REGISTRY,
) -> None:
    """Lets faults happen on a cluster of their own, or on one that is there.

    A cluster of their own that a fault has damaged for good is replaced by a new one.

    Args:
        ahead: The faults, in their order.
        say: Where news go.
        folder: Where results go.
        minutes: No fault begins after so many minutes. None: all come.
        context: Of the cluster that is there. None: a cluster of its own, or the one that ``TESTCLUSTER_ID`` names.
        nodes: Those that may be disturbed. Empty: all.
        registry: First part of the images' names.

    Raises:
        ClusterError: There is no cluster, or nothing can be done on it, again and again; or something that the faults
            need could not be built.
    """
    parts.build(tuple(sorted({part for fault in ahead for part in WORKLOADS[fault.workload].parts})))
    until_s = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    left, in_vain = list(ahead), 0
    if context is None and provider() == LOCAL:
        alerts.build(say)
    while left and time.monotonic() < until_s:
        happened: set[Fault] = set()
        try:
            with _cluster(context) as cluster, volume.mounted(cluster, checkpoints_of(cluster)):
                if nodes:
                    cluster.kubectl("get", "node", *nodes)  # before anything is changed: they must be there
                images = install.build_images(cluster, say, registry=registry)
                install.install_operator(cluster, images.operator, SETTINGS)
                with alerts.watched(cluster, say) as watched:
                    replay = Replay(
                        cluster, images, watched, nodes=tuple(nodes) or cluster.nodes, say=say, folder=folder
                    )
                    happened = replay.happened
                    replay.prepare()
                    while (rest := [fault for fault in left if fault not in happened]) and time.monotonic() < until_s:
                        replay.job(next(trace.jobs(rest)), until_s=until_s)
        except NotSupported:  # what the user has to do first
            raise
        except (ClusterError, OSError) as error:
            in_vain = 0 if happened else in_vain + 1
            if in_vain == _IN_VAIN:
                raise
            say(f"{error}\ngoing on with a cluster that is set up again")
        left = [fault for fault in left if fault not in happened]


def _cluster(context: str | None) -> Cluster:
    name = None if context else os.environ.get(_KEPT)
    return testcluster.attach(name) if name else testcluster.open(nodes=2, context=context)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="what the trace is made from (%(default)s)")
    parser.add_argument("--faults", type=int, default=300, help="how many (%(default)s)")
    parser.add_argument("--trace", type=Path, default=None, help="a file with the faults, instead of a seed")
    parser.add_argument("--write-trace", type=Path, default=None, help="write the trace into this file, and end")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="these faults of the trace alone, again")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=None, help="a trace of these alone")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=None, help="the same of workloads")
    parser.add_argument(
        "--context",
        default=os.environ.get(CONTEXT_VARIABLE),
        help="a cluster of your kubeconfig, instead of one that is made",
    )
    parser.add_argument("--nodes", nargs="+", default=(), help="of that cluster: the nodes that may be disturbed")
    parser.add_argument(
        "--registry", default=install.REGISTRY, help="of that cluster: first part of the images' names (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=None, help="begin no fault after so many minutes")
    parser.add_argument("--folder", type=Path, default=results.FOLDER, help="where results go (%(default)s)")
    parser.add_argument("--list", action="store_true", help="say which kinds there are, and end")
    flags = parser.parse_args()
    if flags.context and len(flags.nodes) < 2:
        parser.error("--context needs --nodes with at least two nodes: these are tainted, drained and cordoned")
    if flags.list:
        for kind in KINDS.values():
            print(f"{kind.name}: {kind.about}")
        parser.exit()
    try:
        flags.trace_faults = trace.read(flags.trace, KINDS) if flags.trace else _made(flags)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for fault in flags.trace_faults if flags.trace else ():
        if flags.context and (KINDS[fault.kind].own_cluster or WORKLOADS[fault.workload].own_cluster):
            parser.error(f"--context: found {fault.kind} of a {fault.workload}, which needs a cluster of its own")
        if (reason := KINDS[fault.kind].why_not()) is not None:
            parser.error(f"{flags.trace}: {fault.kind} cannot be done: {reason}")
    if flags.write_trace:
        trace.write(flags.trace_faults, flags.write_trace)
        parser.exit()
    flags.folder.mkdir(parents=True, exist_ok=True)
    return flags


def _made(flags: argparse.Namespace) -> tuple[Fault, ...]:
    """The trace of a seed. What needs a cluster of its own is left out on another one, and so is what cannot be done.

    The latter keeps its number: what is built on a machine makes no other trace of a seed.

    Raises:
        ValueError: A kind was asked for that cannot be done.
    """
    chosen = [KINDS[name] for name in flags.kinds or KINDS]
    theirs = {kind.name: "it needs a cluster of its own" for kind in chosen if flags.context and kind.own_cluster}
    cannot = {
        kind.name: reason for kind in chosen if kind.name not in theirs and (reason := kind.why_not()) is not None
    }
    if flags.kinds and (theirs or cannot):
        raise ValueError("; ".join(f"{name} cannot be done: {reason}" for name, reason in (theirs | cannot).items()))
    for name, reason in cannot.items():
        print(f"left out: {name} cannot be done here: {reason}")
    own = {name for name, workload in WORKLOADS.items() if flags.context and workload.own_cluster}
    if refused := sorted(own.intersection(flags.workloads or ())):
        raise ValueError(f"{', '.join(refused)}: expected no --context, as it needs a cluster of its own")
    workloads = set(flags.workloads or WORKLOADS) - own
    able_to = {kind.name: workloads.intersection(kind.workloads) for kind in chosen}
    kinds = {name: able for name, able in able_to.items() if able and name not in theirs}
    able_at_all = {workload for able in kinds.values() for workload in able}
    sizes = [(workload, size) for workload, size in trace.SIZES if workload in able_at_all]
    made = trace.made(flags.seed, flags.faults, kinds, sizes=sizes)
    return tuple(fault for fault in made if fault.kind not in cannot)


def _interrupt(number: int, frame: object) -> None:
    """Lets the report be printed and the cluster be removed, undisturbed by a second signal."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt("interrupted")


if __name__ == "__main__":
    sys.exit(main())
