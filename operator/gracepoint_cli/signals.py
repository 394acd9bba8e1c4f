"""``signals``: the disruption catalogue, or the signals that an object of the cluster shows now."""

from __future__ import annotations

import datetime
import difflib
from typing import Annotated

import typer

from gracepoint_cli.options import As, AsGroups, Context, Kubeconfig, Output, RequestTimeout
from gracepoint_cli.output import OutputFormat, put, put_data, put_table

_OWN_ROWS = "Rows of your own are in the chart's value signals.rows"


def signals(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of a row, to see all of it.", show_default=False)
    ] = None,
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only rows of this provider.", show_default=False)
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Not the rows, but the signals that this node shows now.")
    ] = None,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
) -> None:
    """Lists the signals that announce a disruption, or those that a node shows now."""
    from gracepoint_cli import CommandError, ExitCode
    from gracepoint_operator.signals import BUILT_IN, catalogue

    if node is not None:
        if name is not None or provider is not None:
            argument = repr(name) if name is not None else "--provider"
            raise CommandError(
                f"found {argument} together with --node, expected one of them",
                "With --node, all signals of the node are shown",
                ExitCode.USAGE,
            )
        _of_node(node, output, kubeconfig, context, as_user, request_timeout, as_groups)
        return
    rows = [row for row in BUILT_IN if name in (None, row.name)]
    rows = [row for row in rows if provider is None or row.provider.lower() == provider.lower()]
    if not rows:
        raise CommandError(*_no_row(name, provider), ExitCode.USAGE)
    if output.is_data:
        put_data(output, [row.to_json() for row in rows])
    elif name is not None:
        for line in catalogue.listing(rows).replace("*", "").replace("`", "").strip().splitlines():
            put(line)
    else:
        put_table(
            ["NAME", "PROVIDER", "ON", "CAUSE", "CONFIDENCE", "TAKEN BACK"],
            [
                [row.name, row.provider, row.match.kind, row.cause, row.confidence, "yes" if row.cancelable else "no"]
                for row in rows
            ],
        )
        put()
        put("One of them in full: kubectl gracepoint signals NAME")


def _no_row(name: str | None, provider: str | None) -> tuple[str, str]:
    """Returns what was not found, and what there is."""
    from gracepoint_operator.signals import BUILT_IN

    of = "" if provider is None else f" of the provider {provider!r}"
    if name is None:
        providers = "; ".join(sorted({row.provider for row in BUILT_IN}))
        return f"found no row{of}", f"Providers are: {providers}. {_OWN_ROWS}"
    near = difflib.get_close_matches(name, [row.name for row in BUILT_IN], n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"found no row named {name!r}{of}", f"{hint}To list all: kubectl gracepoint signals. {_OWN_ROWS}"


def _of_node(
    name: str,
    output: OutputFormat,
    kubeconfig: str | None,
    context: str | None,
    as_user: str | None,
    request_timeout: float | None,
    as_groups: list[str] | None,
) -> None:
    from gracepoint_cli.cluster import Cluster
    from gracepoint_operator.kube.objects import NODES
    from gracepoint_operator.signals import BUILT_IN, On, marks

    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        marks_of_node = marks(BUILT_IN, On.NODE, cluster.get(NODES, None, name, todo="To list them: kubectl get nodes"))

    def time(seconds: float | None) -> str | None:
        return None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()

    if output.is_data:
        put_data(
            output,
            [
                {
                    "row": mark.row.name,
                    "cause": mark.row.cause,
                    "confidence": mark.row.confidence,
                    "text": mark.text,
                    "since": time(mark.since_at),
                    "until": time(mark.until_at),
                }
                for mark in marks_of_node
            ],
        )
    elif not marks_of_node:
        put(f"The node {name} shows no signal of the built-in rows.")
    else:
        put_table(
            ["ROW", "CAUSE", "CONFIDENCE", "SINCE", "UNTIL", "WHAT"],
            [
                [m.row.name, m.row.cause, m.row.confidence, time(m.since_at), time(m.until_at) or "-", m.text]
                for m in marks_of_node
            ],
        )
