"""Options that several commands have, and how names of objects are completed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracepoint_cli import CommandError
from gracepoint_cli.output import OutputFormat

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster

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


def _seconds(text: str) -> float:
    """Returns the seconds of a time as kubectl takes it: ``30``, ``1.5s``, ``2m``, ``1h30m``. Infinite for ``0``."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    if not re.fullmatch(r"\d+|(\d+(\.\d+)?(ms|[smh]))+", text, re.ASCII):
        raise typer.BadParameter(f"expected a time as 30, 10s, 2m or 1h30m, found {text!r}")
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smh])?", text, re.ASCII)
    return sum(float(number) * units[unit or "s"] for number, unit in parts) or math.inf


As = Annotated[
    str | None,
    typer.Option("--as", metavar="USER", help="Act as this user (impersonation).", show_default=False),
]
AsGroups = Annotated[
    list[str] | None,
    typer.Option(
        "--as-group",
        metavar="GROUP",
        help="With --as: a group of that user. May be given several times.",
        show_default=False,
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        "--request-timeout",
        metavar="TIME",
        parser=_seconds,
        help="For one request, as 10s or 2m; 0: no limit. Default: 5 s, and 30 s for lists.",
        show_default=False,
    ),
]
Watch = Annotated[bool, typer.Option("--watch", "-w", metavar=NO_VALUE, help="Show each change, until Ctrl-C.")]


#: How the help calls the argument that names a workload.
WORKLOAD = "JOB"


def _cluster(options: Mapping[str, Any]) -> Cluster:
    """Returns the cluster of a command line that is being completed."""
    from gracepoint_cli.cluster import Cluster

    return Cluster(
        options.get("kubeconfig"), options.get("context"), options.get("as_user"), None, options.get("as_groups")
    )


def workload_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a workload under a policy, also KIND/NAME."""
    from gracepoint_cli.cluster import completed

    try:
        with _cluster(ctx.params) as cluster:
            return completed(cluster, ctx.params.get("namespace") or cluster.namespace, incomplete)
    except CommandError:
        return []  # a completion has no place for an error


def preemption_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of a Preemption."""
    from gracepoint_operator.kube.objects import PREEMPTIONS

    try:
        with _cluster(ctx.params) as cluster:
            preemptions = cluster.list(PREEMPTIONS, ctx.params.get("namespace") or cluster.namespace)
    except CommandError:
        return []  # a completion has no place for an error
    names = (str(item["metadata"]["name"]) for item in preemptions)
    return sorted(name for name in names if name.startswith(incomplete))
