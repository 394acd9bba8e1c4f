"""The commands, put together; errors become a line for the user and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gracepoint.version import __version__
from gracepoint_cli import (
    CommandError,
    ExitCode,
    checkpoints,
    doctor,
    drill,
    goodput,
    lint_command,
    signals,
    status,
    timeline_command,
)
from gracepoint_cli.output import say

app = typer.Typer(
    help="Shows, rehearses and checks preemption-aware checkpointing of JAX jobs.",
    epilog="Exit codes: 0 good, 1 a bad answer (an error found, a drill that did not commit), 2 a wrong argument, "
    "3 not known (no cluster, no such object, no right).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"gracepoint {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Shows, rehearses and checks preemption-aware checkpointing of JAX jobs."""


app.command()(status.status)
app.command()(goodput.goodput)
app.command()(drill.drill)
app.command()(timeline_command.timeline)
app.add_typer(checkpoints.app, name="checkpoints")
app.command()(lint_command.lint)
app.command()(signals.signals)
app.command()(doctor.doctor)


def run(name: str, arguments: Sequence[str]) -> None:
    """Runs the command line and ends the process.

    Args:
        name: How the user calls the program, for its messages.
        arguments: The arguments after the name.
    """
    try:
        app(args=list(arguments), prog_name=name)
    except CommandError as error:
        say(f"error: {error}")
        if error.todo:
            say(f"  {error.todo}.")
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # for example `gracepoint signals | head`
        sys.stderr.close()
        sys.exit(ExitCode.OK)
