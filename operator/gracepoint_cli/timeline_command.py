"""``timeline``: draws one preemption in the terminal, as SVG, or as a page."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracepoint_cli import CommandError
from gracepoint_cli.options import (
    As,
    AsGroups,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    RequestTimeout,
    preemption_names,
)
from gracepoint_cli.output import OutputFormat, console, put_data, say

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster

Json = dict[str, Any]


def timeline(
    preemption: Annotated[
        str,
        typer.Argument(
            metavar="PREEMPTION",
            help="Name of a Preemption (kubectl get preemptions), or of a request for one.",
            autocompletion=preemption_names,
        ),
    ],
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the picture to this file.", dir_okay=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page to this file. It loads nothing else.", dir_okay=False),
    ] = None,
    namespace: Namespace = None,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
) -> None:
    """Draws a preemption: signal, notice, freeze, drain, save, commit, exit, restore and training, and the deadline."""
    from gracepoint_cli import timeline_picture
    from gracepoint_cli.cluster import Cluster, pods_of
    from gracepoint_cli.timeline import text_lines, timeline_of
    from gracepoint_operator.resources.base import WORKLOAD_KIND

    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        where = namespace or cluster.namespace
        record = _record(cluster, where, preemption)
        of = record["spec"]["jobSet"]
        pods = pods_of(cluster, where, of.get("kind", WORKLOAD_KIND), of["name"], of["uid"])
        drawing = timeline_of(record, pods, datetime.datetime.now(datetime.UTC))
    for path, draw in ((svg, timeline_picture.svg), (html, timeline_picture.page)):
        if path is not None:
            try:
                path.write_text(draw(drawing), encoding="utf-8")
            except OSError as error:
                raise CommandError(f"cannot write {path}: {error.strerror}") from error
            say(f"Wrote {path}")
    if output.is_data:
        put_data(output, drawing.to_json())
    elif svg is None and html is None:
        out = console()
        for line in text_lines(drawing, min(out.width, 160), colours=out.is_terminal):
            out.print(line, soft_wrap=True)


def _record(cluster: Cluster, namespace: str, name: str) -> Json:
    """Returns the record of that name, or the one that was made for the request of that name."""
    from gracepoint_operator.kube.objects import PREEMPTIONS, REQUESTS

    record = cluster.find(PREEMPTIONS, namespace, name) or cluster.find(REQUESTS, namespace, name)
    if record is None:
        todo = f"To list them: kubectl get preemptions,preemptionrequests -n {namespace}"
        return cluster.get(PREEMPTIONS, namespace, name, todo=todo)
    if "epoch" in record["spec"]:
        return record
    status = record.get("status") or {}
    if not status.get("preemption"):
        raise CommandError(
            f"the request {name} has no Preemption: {status.get('message') or 'the operator has not answered it'}",
            "If it stays so, run: kubectl gracepoint doctor",
        )
    return cluster.get(PREEMPTIONS, namespace, status["preemption"])
