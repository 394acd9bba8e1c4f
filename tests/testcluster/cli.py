"""The command line of the test cluster: ``python -m tests.testcluster --help``.

What a command starts in the background is said by ``runs``; everything else ends with the command. Starts
no thread.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.testcluster import kind, parts, providers, runs, system
from tests.testcluster.api import ClusterError
from tests.testcluster.local import LocalCluster, build_everything
from tests.testcluster.providers import open as open_cluster
from tests.testcluster.shell import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "guard":
        return _run(arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)  # for callers that live on


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments) or 0)
    except ClusterError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _up(arguments: argparse.Namespace) -> None:
    runs.sweep()
    if runs.find(arguments.name):
        say(f"cluster {arguments.name} is up already")
    else:
        open_cluster(nodes=arguments.nodes, name=arguments.name, bound=False)
    print(f"export KUBECONFIG={LocalCluster.attach(arguments.name).kubeconfig}")


def _down(arguments: argparse.Namespace) -> None:
    for record in runs.records():
        if arguments.all or record.name == arguments.name:
            runs.remove(record)
            say(f"cluster {record.name} is down")
    runs.sweep()
    for name in kind.names():
        if arguments.all or name == arguments.name:
            kind.remove(name)
            say(f"cluster {name} of kind is down")


def _status(arguments: argparse.Namespace) -> int:
    records = runs.records()
    for record in records:
        machines = sorted(name.partition("/")[2] for name in runs.machines(record.cluster_id))
        print(f"{record.name}: {', '.join(machines) or 'not running'}; files in {record.folder}")
    if not records:
        print("no cluster")
    return 0 if records else 3


def _build(arguments: argparse.Namespace) -> None:
    if arguments.parts:
        parts.build(tuple(arguments.parts))
    else:
        build_everything()


def _install(arguments: argparse.Namespace) -> None:
    if arguments.tools:
        system.install(system.missing_mount_tools())
        return
    system.install(system.missing_packages())
    reason = system.why_not_local()
    if reason:
        raise ClusterError(reason)


def _pick(arguments: argparse.Namespace) -> None:
    choice = providers.pick(arguments.wanted)
    say(choice.text)
    print(choice.provider)


def _doctor(arguments: argparse.Namespace) -> int:
    findings = system.examine()
    for finding in findings:
        print(f"{finding.what}: {finding.problem or 'good'}" + (f" -> {finding.fix}" if finding.problem else ""))
    for part in parts.missing():
        print(f"{part.name} {part.version}: to be built")
    return 1 if any(finding.problem for finding in findings) else 0


def _kubectl(arguments: argparse.Namespace) -> None:
    cluster = LocalCluster.attach(arguments.name)
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    os.execv(parts.program("kubectl"), ["kubectl", f"--kubeconfig={cluster.kubeconfig}", *words])


def _lose_node(arguments: argparse.Namespace) -> None:
    LocalCluster.attach(arguments.name).lose_node(arguments.node, delete_object=arguments.delete_object)


def _restore_node(arguments: argparse.Namespace) -> None:
    LocalCluster.attach(arguments.name).restore_node(arguments.node)


def _image(arguments: argparse.Namespace) -> None:
    cluster = LocalCluster.attach(arguments.name)
    extras = [extra for extra in arguments.extras.split(",") if extra]
    print(cluster.build_image(arguments.tag, arguments.file, arguments.context, extras=extras))


def _guard(arguments: argparse.Namespace) -> None:
    runs.guard(arguments.cluster)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.testcluster",
        description="A real Kubernetes cluster on this machine, without Docker.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int | None], text: str, *, named: bool = True
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        if named:
            made.add_argument("--name", default=runs.DEFAULT_NAME, help="name of the cluster (%(default)s)")
        return made

    up = command("up", _up, "start a cluster that stays until it is taken down")
    up.add_argument("--nodes", type=int, default=2, help="how many worker nodes (%(default)s)")
    down = command("down", _down, "remove a cluster, and what is left of clusters whose owner is gone")
    down.add_argument("--all", action="store_true", help="remove every cluster, also those that tests are using")
    command("status", _status, "list clusters", named=False)
    build = command("build", _build, "build all parts and images that are not in the cache", named=False)
    build.add_argument(
        "--parts",
        nargs="+",
        choices=parts.NAMES,
        help="only these parts",
    )
    install = command("install", _install, "install missing system packages (Debian and Ubuntu, as root)", named=False)
    install.add_argument("--tools", action="store_true", help="only those that mount file systems for test-mounts")
    command("doctor", _doctor, "say what this machine lacks, and how to get it", named=False)
    pick = command("pick", _pick, "say who would make a cluster here: kind or local", named=False)
    pick.add_argument("wanted", nargs="?", default=providers.AUTO, help="auto, kind or local (%(default)s)")
    kubectl = command("kubectl", _kubectl, "run kubectl against a cluster: kubectl -- get pods")
    kubectl.add_argument("words", nargs=argparse.REMAINDER)
    lose = command("lose-node", _lose_node, "make a node vanish as a preempted machine does")
    lose.add_argument("node")
    lose.add_argument("--delete-object", action="store_true", help="delete the Node object too, as a cloud does")
    restore = command("restore-node", _restore_node, "bring a fresh machine for a node that vanished")
    restore.add_argument("node")
    image = command("image", _image, "build a Dockerfile and put the image on all nodes")
    image.add_argument("tag")
    image.add_argument("--file", type=Path, required=True, help="the Dockerfile")
    image.add_argument("--context", type=Path, default=Path.cwd(), help="the folder that it copies from")
    image.add_argument("--extras", default="", help="extras of the project that it installs, with commas")
    guard = command("guard", _guard, "wait for the end of a cluster's owner (internal)", named=False)
    guard.add_argument("cluster")
    return parser


if __name__ == "__main__":
    sys.exit(main())
