"""Options that several commands have, and how names of objects are completed."""

from __future__ import annotations

from typing import Annotated

import typer

from gracepoint_cli.errors import CommandError
from gracepoint_cli.output import Format

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace. Default: that of the context.", show_default=False)
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="All namespaces.")]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", help="Path of the kubeconfig. Default: as kubectl.", show_default=False)
]
Context = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig. Default: the current one.", show_default=False),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Form of the answer.")]


def jobset_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a JobSet."""
    from gracepoint_operator.workloads.jobset import JOBSETS

    return _names(ctx, JOBSETS, incomplete)


def preemption_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a Preemption."""
    from gracepoint_operator.kube.kinds import PREEMPTIONS

    return _names(ctx, PREEMPTIONS, incomplete)


def _names(ctx: typer.Context, kind: object, incomplete: str) -> list[str]:
    from gracepoint_cli.cluster import Cluster
    from gracepoint_operator.kube.kinds import Kind

    assert isinstance(kind, Kind)
    given = ctx.params
    try:
        with Cluster(given.get("kubeconfig"), given.get("context")) as cluster:
            found = cluster.list(kind, given.get("namespace") or cluster.namespace)
    except CommandError:
        return []  # a completion has no place for an error
    names = (str(item["metadata"]["name"]) for item in found)
    return sorted(name for name in names if name.startswith(incomplete))
