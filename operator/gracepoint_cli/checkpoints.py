"""``checkpoints``: lists, shows and verifies checkpoints in any store. Needs the library's own dependencies."""

from __future__ import annotations

import datetime
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracepoint_cli import CommandError, ExitCode
from gracepoint_cli.options import Output
from gracepoint_cli.output import OutputFormat, progress, put, put_data, put_table, say

if TYPE_CHECKING:
    from gracepoint.checkpoint.storage.storage_path import StoragePath

Json = dict[str, Any]
_TIMEOUT_S = 120.0
_DIRECTORY = (
    "Give the directory that attach() was given, or that of the policy (spec.checkpoint.directory) with {namespace} "
    "and {jobset} filled in"
)

app = typer.Typer(
    help="Lists, shows and verifies checkpoints in any store. Writes nothing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Location = Annotated[
    str,
    typer.Argument(
        metavar="URI",
        help="A folder with steps, or one checkpoint: a path, file://, gs:// or s3://.",
        show_default=False,
    ),
]


@app.command("ls")
def list_checkpoints(uri: Location, output: Output = OutputFormat.TABLE) -> None:
    """Lists the complete checkpoints, newest first."""
    with _reading(uri):
        rows = [_summary(folder) for folder in _folders(uri)]
    if output.is_data:
        put_data(output, rows)
        return
    put_table(
        ["STEP", "SAVED", "SIZE", "FILES", "PROCESSES", "BY", "PATH"],
        [
            [
                "-" if row["step"] is None else row["step"],
                row["begun"] or "-",
                "-" if row["bytes"] is None else _size(row["bytes"]),
                "-" if row["files"] is None else row["files"],
                row["processes"] or "-",
                row["by"],
                row["path"],
            ]
            for row in rows
        ],
    )


@app.command("show")
def show(uri: Location, output: Output = OutputFormat.TABLE) -> None:
    """Shows what a checkpoint holds, leaf by leaf: shape, type and sharding.

    If the folder has several steps, shows the newest one.
    """
    with _reading(uri):
        import jax

        from gracepoint.checkpoint.metadata import LeafMetadata, metadata_of
        from gracepoint.deadline import Deadline

        folder = _folders(uri)[0]
        metadata = metadata_of(folder, Deadline.after(_TIMEOUT_S, time.monotonic))
        leaves = [leaf for leaf in jax.tree.leaves(metadata.tree) if isinstance(leaf, LeafMetadata)]
        summary = _summary(folder)
    described = [
        {
            "name": leaf.name,
            "type": leaf.value_type,
            "shape": None if leaf.shape is None else list(leaf.shape),
            "dtype": None if leaf.dtype is None else str(leaf.dtype),
            "sharding": leaf.sharding_text or None,
        }
        for leaf in leaves
    ]
    if output.is_data:
        put_data(output, {**summary, "customMetadata": dict(metadata.custom_metadata), "leaves": described})
        return
    size = "" if summary["bytes"] is None else f", {_size(summary['bytes'])} in {summary['files']} files"
    put(f"{summary['path']}: by {summary['by']}{size}, {len(leaves)} leaves", style="bold")
    put_table(
        ["LEAF", "TYPE", "SHAPE", "DTYPE", "SHARDING"],
        [
            [
                leaf["name"],
                leaf["type"],
                "-" if leaf["shape"] is None else "x".join(map(str, leaf["shape"])) or "scalar",
                leaf["dtype"] or "-",
                leaf["sharding"] or "-",
            ]
            for leaf in described
        ],
    )


@app.command("verify")
def verify(uri: Location, output: Output = OutputFormat.TABLE) -> None:
    """Reads every file and compares it with its checksum.

    Exit code 1: a checkpoint is damaged. Exit code 3: one cannot be checked, because Orbax records no checksums.
    """
    reports: list[Json] = []
    unknown = False
    with _reading(uri):
        from gracepoint.checkpoint import verification
        from gracepoint.errors import CannotKnow

        for folder in _folders(uri):
            with progress(f"Reading {folder}"):
                try:
                    report = verification.verify(folder)
                except CannotKnow as error:
                    unknown = True
                    reports.append({"path": str(folder), "ok": None, "reason": str(error)})
                    say(str(error))
                    continue
            damage = [{"file": d.file, "array": d.array, "problem": d.problem} for d in report.damage]
            about = {"path": str(report.path), "step": report.step, "files": report.files, "bytes": report.bytes}
            reports.append({**about, "ok": report.ok, "damage": damage})
            if not output.is_data:
                put(str(report), style="green" if report.ok else "red")
    if output.is_data:
        put_data(output, reports)
    if any(report["ok"] is False for report in reports):
        raise typer.Exit(ExitCode.BAD)
    if unknown:
        raise typer.Exit(ExitCode.UNKNOWN)


class _reading:  # noqa: N801  used as a function
    """Turns the errors of reading checkpoints into errors of the command."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        # Reading metadata needs no accelerator, and must not take one from a job.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ModuleNotFoundError):
            raise CommandError(
                f"reading checkpoints needs the library: {error}",
                "pip install 'gracepoint[cli,jax]', with gcs or s3 for a bucket",
            ) from error
        if error is None or isinstance(error, CommandError | typer.Exit):
            return
        from gracepoint.errors import CheckpointCorrupt, GracepointError, SettingsError

        if isinstance(error, CheckpointCorrupt):
            raise CommandError(str(error), code=ExitCode.BAD) from error
        if isinstance(error, SettingsError):  # the location, or a variable of the store's client
            raise CommandError(str(error), code=ExitCode.USAGE) from error
        if isinstance(error, GracepointError | OSError):
            raise CommandError(f"{self._uri}: {error}") from error


def _folders(uri: str) -> list[StoragePath]:
    """Returns the checkpoints at a location, newest first.

    Raises:
        CommandError: There are none.
    """
    from gracepoint.checkpoint.format import layout
    from gracepoint.checkpoint.format.layout import Layout
    from gracepoint.checkpoint.storage.locations import storage_path

    if not uri or (re.match(r"[a-z0-9]+:/?(?!/)", uri) and not os.path.exists(uri)):
        expected = "expected a path, file:///PATH, gs://BUCKET/PATH or s3://BUCKET/PATH"
        raise CommandError(f"found {uri!r}, {expected}", code=ExitCode.USAGE)
    folder = storage_path(uri if "://" in uri else Path(os.path.abspath(uri)))
    if (folder / layout.MANIFEST).exists() or (folder / layout.STEP_METADATA).exists():
        return [folder]
    if not folder.exists():
        raise CommandError(f"{folder}: there is nothing of that name", _DIRECTORY)
    paths = Layout(folder)
    steps = paths.steps()
    if not steps:
        hidden = paths.temporaries()
        unfinished = f"; there are {len(hidden)} saves that did not end" if hidden else ""
        raise CommandError(f"{folder}: found no complete checkpoint{unfinished}", _DIRECTORY)
    return [paths.step(step) for step in sorted(steps, reverse=True)]


def _summary(folder: StoragePath) -> Json:
    from gracepoint.checkpoint.format import records

    manifest = records.read_manifest(folder)
    if manifest is None:
        step = int(folder.name) if folder.name.isdigit() else None
        nothing = dict.fromkeys(("begun", "bytes", "files", "processes"))
        return {"path": str(folder), "step": step, "by": "Orbax", **nothing}
    begun_at = datetime.datetime.fromtimestamp(manifest.begun_ns / 1e9, datetime.UTC)
    return {
        "path": str(folder),
        "step": manifest.step,
        "by": "Gracepoint",
        "begun": begun_at.isoformat(timespec="seconds"),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "files": len(manifest.files),
        "processes": manifest.process_count,
    }


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
