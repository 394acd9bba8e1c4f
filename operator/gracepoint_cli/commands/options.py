"""Options that several commands have, and how names of objects are completed."""

from __future__ import annotations

from typing import Annotated

import typer

from gracepoint_cli.errors import CommandError
from gracepoint_cli.output import OutputFormat

#: An option that takes no value shows this in the help instead of a type.
NO_VALUE = ""
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Default: the namespace of the context.", show_default=False
    ),
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", metavar=NO_VALUE, help="All namespaces.")]
Kubeconfig = Annotated[
    str | None,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        help="Default: as kubectl, KUBECONFIG or ~/.kube/config.",
        show_default=False,
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context", metavar="NAME", help="Context of the kubeconfig. Default: its current one.", show_default=False
    ),
]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Form of the answer.")]


#: How the help calls the argument that names a workload.
WORKLOAD = "JOB"


def workload_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a workload under a policy, also KIND/NAME."""
    from gracepoint_cli.cluster import Cluster
    from gracepoint_cli.workloads import completed

    given = ctx.params
    try:
        with Cluster(given.get("kubeconfig"), given.get("context")) as cluster:
            return completed(cluster, given.get("namespace") or cluster.namespace, incomplete)
    except CommandError:
        return []  # a completion has no place for an error


def preemption_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a Preemption."""
    from gracepoint_cli.cluster import Cluster
    from gracepoint_operator.kube.kinds import PREEMPTIONS

    given = ctx.params
    try:
        with Cluster(given.get("kubeconfig"), given.get("context")) as cluster:
            found = cluster.list(PREEMPTIONS, given.get("namespace") or cluster.namespace)
    except CommandError:
        return []  # a completion has no place for an error
    names = (str(item["metadata"]["name"]) for item in found)
    return sorted(name for name in names if name.startswith(incomplete))
