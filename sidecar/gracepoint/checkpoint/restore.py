"""Restores the newest step that all processes can read: one agreement, no process alone.

Process 0 salvages and lists; the others are told. Then, newest first, every process reads what it needs of a
step and says how that went. One process's damage sends all to the step before, with a log line that names the
path; one process's mismatch (the state has changed) raises in all, as going back would not help. Each
collective call has what is left of the timeout.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gracepoint.checkpoint import catalog, host_state
from gracepoint.checkpoint.catalog import Listing
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.layout import Layout
from gracepoint.checkpoint.reader import StoredStep, open_step
from gracepoint.checkpoint.target import Target, target_of
from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from gracepoint.gang import Gang

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Restored:
    """What ``restore`` gives.

    Attributes:
        state: The train state, like ``like``.
        step: That it was saved at.
        host_state: This process's, by name; empty if the step has none.
        by_orbax: Orbax wrote the step, so that it has no host state.
    """

    state: Any
    step: int
    host_state: dict[str, Any]
    by_orbax: bool


def restore_newest(
    paths: Layout,
    like: Any,
    *,
    gang: Gang,
    key: str,
    attempt: str,
    deadline: Deadline,
    sleep: Callable[[float], object],
) -> Restored | None:
    """Restores the newest step that all processes can; None if there is nothing that looks like a checkpoint.

    Raises:
        CheckpointCorrupt: There are checkpoints, and none can be restored; says why for each.
        CheckpointMismatch: The newest readable one does not fit ``like``.
        CheckpointError: It cannot be read, for reasons that are not damage.
    """
    listing = _agree_on_listing(paths, gang, key, attempt, deadline, sleep)
    for remark in listing.remarks:
        logger.info("restore: %s", remark)
    refused = list(listing.refused)
    for reason in refused:
        logger.error("restore: not a checkpoint that can be restored: %s", reason)
    for step in listing.steps:
        restored, damage = _try_step(paths, step, like, gang, key, deadline)
        if restored is not None:
            if refused:
                logger.error("restore: went back to step %d, as newer ones cannot be restored", step)
            return restored
        logger.error("restore: step %d is not restored: %s", step, damage)
        refused.append(damage)
    if refused:
        raise CheckpointCorrupt(
            f"{paths.root} has checkpoints, but none that can be restored; training from the start would lose them, so "
            f"move them away if that is wanted: {'; '.join(refused)}"
        )
    logger.warning("no checkpoint to restore in %s: %s", paths.root, "; ".join(listing.remarks) or "it is empty")
    return None


def _agree_on_listing(
    paths: Layout, gang: Gang, key: str, attempt: str, deadline: Deadline, sleep: Callable[[float], object]
) -> Listing:
    if gang.process_index != 0:
        answer = json.loads(gang.broadcast(f"{key}/list", None, timeout_s=deadline.remaining_s()))
        if "error" in answer:
            raise CheckpointError(f"process 0 could not list {paths.root}: {answer['error']}")
        return Listing.from_text(answer["listing"])
    try:
        # Waiting for another attempt's writer must leave time to read.
        listing = catalog.list_steps(paths, attempt=attempt, deadline=deadline.part(0.5), sleep=sleep)
    except Exception as error:
        gang.broadcast(f"{key}/list", json.dumps({"error": repr(error)}), timeout_s=deadline.remaining_s())
        raise
    gang.broadcast(f"{key}/list", json.dumps({"listing": listing.to_text()}), timeout_s=deadline.remaining_s())
    return listing


def _try_step(
    paths: Layout, step: int, like: Any, gang: Gang, key: str, deadline: Deadline
) -> tuple[Restored | None, str]:
    """Returns what was restored, or None and what is damaged, the same in all processes."""
    failure: Exception | None = None
    restored = None
    try:
        restored = read_step(paths, step, like, gang.process_index, gang.process_count, deadline)
    except Exception as error:  # noqa: BLE001 - told to the others, then raised
        failure = error
    mine = json.dumps([] if failure is None else [_kind(failure), str(failure) or repr(failure)])
    answers = gang.gather(f"{key}/step/{step}", mine, timeout_s=deadline.remaining_s())
    failures = [(f"process {i}: ", *answer) for i, text in enumerate(answers) if (answer := json.loads(text))]
    if gang.process_count == 1:
        failures = [("", kind, text) for _, kind, text in failures]
    for raised, kind in ((CheckpointError, "error"), (CheckpointMismatch, "mismatch")):
        if found := [who + text for who, k, text in failures if k == kind]:
            raise raised(f"step {step} of {paths.root} cannot be restored: {'; '.join(found)}") from failure
    if failures:
        return None, "; ".join(who + text for who, _, text in failures)
    return restored, ""


def _kind(error: Exception) -> str:
    if isinstance(error, CheckpointMismatch):
        return "mismatch"
    return "damage" if isinstance(error, CheckpointCorrupt | FileNotFoundError) else "error"


def read_step(
    paths: Layout, step: int, like: Any, process_index: int, process_count: int, deadline: Deadline
) -> Restored:
    """Reads this process's part of a step.

    Raises:
        CheckpointCorrupt: What it reads is damaged.
        CheckpointMismatch: It does not fit ``like`` or the number of processes.
    """
    stored = open_step(paths.step(step), deadline)
    nodes, structure = jax.tree_util.tree_flatten_with_path(like)
    targets = [target_of(path, leaf) for path, leaf in nodes]
    _check_tree(targets, stored)
    own_host_state = _host_state(stored, process_index, process_count)
    reads = [[(index, stored.read(target.name, index)) for index in target.indices] for target in targets]
    leaves = []
    for target, pending in zip(targets, reads, strict=True):
        regions = {}
        for index, future in pending:
            try:
                values = future.result(timeout=deadline.remaining_s())
            except TimeoutError as error:
                raise CheckpointError(
                    f"{stored.folder}: leaf {target.name!r} was not read within {deadline.timeout_s:.1f} s"
                ) from error
            except ValueError as error:
                raise CheckpointCorrupt(f"{stored.folder}: leaf {target.name!r}: {error}") from error
            stored.check(target.name, index, values)
            regions[index] = values
        pending.clear()  # the values go as soon as the leaf is made
        leaves.append(target.build(regions))
    return Restored(jax.tree_util.tree_unflatten(structure, leaves), step, own_host_state, stored.manifest is None)


def _check_tree(targets: Sequence[Target], stored: StoredStep) -> None:
    wanted = {target.name for target in targets}
    problems = []
    if missing := sorted(wanted - stored.specs.keys()):
        problems.append(f"the state has leaves that the checkpoint has not: {_shown(missing)}")
    if extra := sorted(stored.specs.keys() - wanted):
        problems.append(f"the checkpoint has leaves that the state has not: {_shown(extra)}")
    if problems:
        raise CheckpointMismatch(f"{stored.folder}: {'; '.join(problems)}")
    for target in targets:
        target.check(stored.specs[target.name])


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(repr(name) for name in names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _host_state(stored: StoredStep, process_index: int, process_count: int) -> dict[str, Any]:
    manifest = stored.manifest
    if manifest is None:
        logger.warning("%s was written by Orbax: it has no host state of Gracepoint's", stored.folder)
        return {}
    if not manifest.host_state:
        return {}
    if manifest.process_count != process_count:
        raise CheckpointMismatch(
            f"{stored.folder}: the host state ({', '.join(manifest.host_state)}) was saved by "
            f"{manifest.process_count} processes, each its own, and cannot be restored into {process_count}: "
            f"start with {manifest.process_count} processes"
        )
    data = stored.host_state(process_index)
    assert data is not None
    return host_state.decode(data)
