"""``python -m demo``: the command line of the demo."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path

from demo.install import REGISTRY
from demo.narrator import Narrator
from demo.object_store import SCHEMES
from demo.story import SNAPSHOT_STEPS, VOLUME, Result, Story
from demo.timeline import table
from tests import testcluster
from tests.testcluster import Cluster, ClusterError, providers, system

FOLDER = Path(__file__).parents[1] / "build" / "demo"
_KEPT_NAME = "demo"
_EXISTING = "existing"
#: One whose end is announced, one that is switched off, and one for what comes after.
_NODES = 3


def main() -> int:
    """Plays the demo; returns 0 if the promise held, 1 if not, 130 if interrupted."""
    flags = _flags()
    signal.signal(signal.SIGTERM, _interrupt)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    say = Narrator()
    try:
        say.chapter("A cluster")
        with _cluster(flags, say) as cluster:
            story = Story(
                cluster, steps=flags.steps, registry=flags.registry, say=say, folder=FOLDER, storage=flags.storage
            )
            result = story.play()
        (FOLDER / "result.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
        print(_summary(result), flush=True)
    except ClusterError as error:
        say(f"stopped: {error}\nlogs of the operator and of the trainers are in {FOLDER}")
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; logs so far are in {FOLDER}")
        return 130
    return 1 if result.problems else 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--provider",
        choices=(providers.AUTO, providers.LOCAL, providers.KIND, _EXISTING),
        default=providers.LOCAL,
        help="who makes the cluster; auto: kind if it works here, else local (%(default)s)",
    )
    parser.add_argument("--context", help="kubeconfig context of the existing cluster")
    parser.add_argument("--keep", action="store_true", help="leave the local cluster running, and use it next time")
    parser.add_argument("--registry", default=REGISTRY, help="first part of the images' names, for an existing cluster")
    parser.add_argument("--steps", type=int, default=600, help="training steps of each run (%(default)s)")
    parser.add_argument(
        "--storage",
        choices=(VOLUME, *SCHEMES),
        default=VOLUME,
        help="where checkpoints go: a volume, or an object store in the cluster (%(default)s)",
    )
    flags = parser.parse_args()
    if (flags.provider == _EXISTING) != (flags.context is not None):
        parser.error("--provider existing and --context NAME belong together: no cluster is picked silently")
    if flags.provider in (providers.AUTO, providers.KIND) and (flags.keep or flags.storage != VOLUME):
        parser.error(f"--keep and --storage need --provider {providers.LOCAL}")
    return flags


def _cluster(flags: argparse.Namespace, say: Narrator) -> Cluster:
    if flags.provider == _EXISTING:
        return testcluster.open(context=flags.context)
    choice = providers.pick(flags.provider)
    say(choice.text)
    if choice.provider == providers.LOCAL:
        system.install(system.missing_packages())
    if not flags.keep:
        return testcluster.open(nodes=_NODES, by=choice.provider)
    if not testcluster.running(_KEPT_NAME):
        return testcluster.open(nodes=_NODES, name=_KEPT_NAME, bound=False)
    cluster = testcluster.attach(_KEPT_NAME)
    for number in range(1, _NODES + 1):
        if f"node-{number}" not in cluster.nodes:  # the last demo has lost it
            cluster.restore_node(f"node-{number}")
    return cluster


def _summary(result: Result) -> str:
    def same(equal: bool) -> str:
        return "equal, bit for bit" if equal else "NOT EQUAL"

    lines = [
        "\nSince the taint:",
        table(result.stages),
        "",
        f"  steps lost         {result.steps_lost}",
        f"  seconds to spare   {result.seconds_to_spare}",
        f"  losses             {same(result.losses_equal)}",
        f"  data order         {same(result.data_equal)}",
        f"  final parameters   {same(result.parameters_equal)}",
        "",
    ]
    pictures = "timeline.html"
    if (death := result.death) is not None:
        pictures = f"timeline.html and {FOLDER}/without-notice.html"
        lines += [
            f"Since {death.node} was switched off, without notice, at step {death.step}:",
            f"  steps lost         {death.steps_lost}, of {SNAPSHOT_STEPS} between two snapshots",
            f"  continued from     step {death.restored_step}, from {death.source}",
            f"  training again     after {death.silent_s:.1f} s",
            "",
        ]
    lines += [f"  problem: {problem}" for problem in result.problems]
    verdict = "The promise did not hold." if result.problems else "The promise held."
    return "\n".join([*lines, f"{verdict} Look at {FOLDER}/{pictures} (also .svg), and at {FOLDER}/result.json"])


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
