"""Restores the newest step that all processes can read. All processes restore the same step.

Process 0 salvages and lists the steps, and sends the list to the others. Then every process reads its part of a step
and reports how that went, beginning with the newest step. If a process finds damage, all processes go back to the step
before, and a log line names the path. If another checkpoint has replaced the step meanwhile, they read the step once
more. If a process finds a mismatch, the state has changed, and an older step would not help: all processes raise. Each
collective call gets the rest of the timeout. Everything runs in the calling thread.

A step may also be in the memory of nodes, which is one more place of steps. It is restored if it is newer than all
stored ones. If it cannot be, for any reason, all processes take the newest stored step: the values of two steps are
never mixed.

A step has more than the train state: the host state, which is restored also if another number of processes saved it,
and items, which are read by the handlers of the user.

``restore_base`` restores the state of another run. That run's directory is only read, and its step numbers have no
meaning in this run. Nothing is locked, salvaged, marked or deleted in it: it may be read-only, and its own job may be
saving into it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from gracepoint import trace
from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format import host_state, layout, records
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.handler_registry import ItemHandler
from gracepoint.checkpoint.options import DEFAULT_RESTORE_OPTIONS, RestoreOptions
from gracepoint.checkpoint.reading.stored_arrays import ManifestParts
from gracepoint.checkpoint.reading.stored_tree import StoredTree, open_tree
from gracepoint.checkpoint.restoring import readers, transforms
from gracepoint.checkpoint.restoring.placement import ReplicaAgreement
from gracepoint.checkpoint.restoring.readers import damage_in_any
from gracepoint.checkpoint.restoring.restore_tree import (
    check_devices,
    form_of_state,
    form_of_stored,
    in_time,
    read_into,
    reporting_errors,
    run_in_time,
)
from gracepoint.checkpoint.steps import retention
from gracepoint.checkpoint.steps.commit import by_process_zero
from gracepoint.checkpoint.steps.listing import (
    Listing,
    checkpoint_around,
    complete_listing,
    list_steps,
    look_alikes,
    number_of,
    ours,
    refusal,
    why_not,
)
from gracepoint.checkpoint.steps.snapshot_steps import CompleteStep, complete_steps
from gracepoint.checkpoint.storage.checks import check_contents
from gracepoint.checkpoint.storage.locations import UserPath, local_folder, storage_path
from gracepoint.checkpoint.storage.snapshot_path import FoundStep, FoundSteps, SnapshotPath
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointRefused,
    CheckpointTooNew,
    GracepointError,
    HostStateLost,
)
from gracepoint.process_group import ProcessGroup
from gracepoint.snapshots.snapshot_servers import SnapshotServers

logger = logging.getLogger(__name__)

#: Computes this process's value of the host state if another number of processes saved it. Called with the values that
#: those processes saved, the index of this process, and the current number of processes.
Reshard = Callable[[Sequence[Any], int, int], Any]


def own_host_state(
    stored: StoredTree,
    process_index: int,
    process_count: int,
    reshard: Mapping[str, Reshard],
    required: Collection[str] = (),
) -> dict[str, Any]:
    """Returns this process's values by name. Empty if the step has none.

    A value that the step was saved without, in an emergency, is a ``HostStateLost``.

    Args:
        stored: The step.
        process_index: Index of this process.
        process_count: Number of processes now.
        reshard: Functions that convert values to another number of processes, by the value's name.
        required: Names of values that must not be lost.

    Raises:
        CheckpointMismatch: Another number of processes saved the step, and ``reshard`` lacks a value.
        HostStateLost: A required value is lost. The message names it, and says why and what to do.
        CheckpointCorrupt: A file is damaged.
    """
    manifest = stored.manifest
    if manifest is None:
        logger.warning("%s was written by Orbax: it has no host state of Gracepoint's", stored.folder)
        return {}
    if not manifest.host_state:
        return {}
    if manifest.process_count == process_count:
        own = host_state.decode(stored.host_state(process_index))
        return _checked(own, required, f"process {process_index}", stored)
    if fixed := [name for name in manifest.host_state if name not in reshard]:
        raise CheckpointMismatch(
            f"{stored.folder}: the host state ({', '.join(fixed)}) was saved by {manifest.process_count} processes, "
            f"each its own, and cannot be restored into {process_count}: start with {manifest.process_count} "
            f"processes, or say how with reshard="
        )
    saved = [host_state.decode(stored.host_state(index)) for index in range(manifest.process_count)]
    restored = dict[str, Any]()
    for name in manifest.host_state:
        values = [own[name] for own in saved]
        lost = next((value for value in values if isinstance(value, HostStateLost)), None)
        restored[name] = reshard[name](values, process_index, process_count) if lost is None else lost
    return _checked(restored, required, "a process", stored)


def _checked(values: dict[str, Any], required: Collection[str], owner: str, stored: StoredTree) -> dict[str, Any]:
    for name, value in values.items():
        if name in required and isinstance(value, HostStateLost):
            raise HostStateLost(
                f"{stored.folder} was saved in an emergency without host_state {name!r} of {owner}: {value}. The train "
                f"state is there. To continue with it, register host_state({name!r}, get, set, missing=...): that "
                f"function gets the step, and puts in order what set cannot. Or do not register {name!r}; or move "
                f"{stored.folder} away, and an older step is restored"
            )
    return values


@dataclasses.dataclass(frozen=True)
class ItemsRequest:
    """Which items are restored, and how.

    Attributes:
        args: The arguments that each item's handler gets, by the item's name. Items that are not in it are left alone.
        handlers: The handlers of these items, and maybe of others.
    """

    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, ItemHandler] = dataclasses.field(default_factory=dict)


NO_ITEMS = ItemsRequest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRequest:
    """How the state and the host state are restored.

    Attributes:
        restore_args: See ``read_tree``.
        options: See ``read_tree``.
        reshard: Functions that convert host state values to another number of processes, by the value's name.
        required: Names of host state values that must not be lost; see ``own_host_state``.
        same_devices: Whether a step that accelerators saved is refused where JAX has fallen back to the CPU.
        with_host_state: Whether the host state is read at all.
    """

    restore_args: Any = None
    options: RestoreOptions = DEFAULT_RESTORE_OPTIONS
    reshard: Mapping[str, Reshard] = dataclasses.field(default_factory=dict)
    required: Collection[str] = ()
    same_devices: bool = False
    with_host_state: bool = True


def restore_items(stored: StoredTree, request: ItemsRequest, deadline: Deadline) -> dict[str, Any]:
    """Returns the items by name. The handlers run in a thread that ends with their work.

    Raises:
        CheckpointMismatch: The step has no such item.
        CheckpointCorrupt: A file of an item is missing or damaged; names it.
        TimeoutError: The deadline passed; names an item.
    """
    items: dict[str, Any] = {}

    def read() -> None:
        for name, args in request.args.items():
            place = stored.folder / name
            if not place.is_folder():
                raise CheckpointMismatch(f"{stored.folder} has no item {name!r}: leave it out of what is restored")
            if stored.manifest is not None:  # Orbax records no checksums
                for path, file in stored.manifest.files.items():
                    if path.startswith(layout.in_item(name, "")):
                        check_contents(stored.folder / path, file.bytes, file.crc32)
            try:
                items[name] = request.handlers[name].restore(local_folder(place, name), args=args)
            except FileNotFoundError as error:
                raise CheckpointCorrupt(f"{place}: item {name!r} cannot be restored: {error}") from error

    if request.args:
        run_in_time(read, f"item {next(iter(request.args))!r}", deadline)
    return items


Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What ``restore`` returns.

    Attributes:
        state: The train state, of the form of ``like``.
        step: The step that the state was saved at.
        host_state: This process's values by name. Empty if the step has none.
        by_orbax: Whether Orbax wrote the step, which then has no host state.
        passed_over: Newer steps that are damaged, each with what is wrong.
        items: The items that were asked for, by name.
        changed: What is different from the gang that saved the step, as text: processes, devices, mesh.
        note: The text that the step was saved with. None if there is none, if the host state was not read, and in all
            processes except process 0.
        passed_over_standing: Identifiers (``Commit.standing``) of the steps in ``passed_over`` that Gracepoint wrote.
        from_memory: Whether the step came from the memory of nodes. It may not be stored then.
    """

    state: Any
    step: int
    host_state: dict[str, Any]
    by_orbax: bool
    passed_over: Mapping[int, str] = dataclasses.field(default_factory=dict)
    items: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changed: tuple[str, ...] = ()
    note: str | None = None
    passed_over_standing: Mapping[int, str] = dataclasses.field(default_factory=dict)
    from_memory: bool = False


@dataclasses.dataclass(frozen=True)
class InMemorySteps:
    """The steps that are safe in the memory of nodes.

    Attributes:
        paths: Where they are. None: nowhere.
        listing: What process 0 found.
    """

    paths: Layout | None
    listing: Listing

    def newer_than(self, step: int | None) -> InMemorySteps | None:
        """Returns those that are newer than ``step``, or all if it is None. None if there are none."""
        steps = tuple(each for each in self.listing.steps if step is None or each > step)
        return dataclasses.replace(self, listing=dataclasses.replace(self.listing, steps=steps)) if steps else None


NONE_IN_MEMORY = InMemorySteps(None, Listing((), (), ()))


def _by_age(listing: Listing, in_memory: InMemorySteps) -> tuple[Listing | None, InMemorySteps | None, Listing]:
    """Returns what is read in turn: stored steps, steps in memory that are newer than all others, and these others.

    A step that is stored is not read from memory, unless what is stored is damaged.
    """
    if not in_memory.listing.steps:
        return None, None, listing
    limit = max(in_memory.listing.steps)
    newest = tuple(step for step in listing.steps if step >= limit)
    older = dataclasses.replace(listing, steps=tuple(step for step in listing.steps if step < limit))
    others = in_memory.newer_than(max(older.steps, default=None))
    return (dataclasses.replace(listing, steps=newest) if newest else None), others, older


def restore_newest(
    paths: Layout,
    like: Any,
    request: StateRequest,
    *,
    gang: ProcessGroup,
    key: str,
    attempt: str,
    deadline: Deadline,
    sleep: Callable[[float], object],
    only: int | None = None,
    items: ItemsRequest = NO_ITEMS,
    holds_lease: bool = False,
    base: StoragePath | None = None,
    in_memory: InMemorySteps = NONE_IN_MEMORY,
) -> Restored | None:
    """Restores the newest step that all processes can read. Returns None if nothing looks like a checkpoint.

    Args:
        paths: The directory of the steps.
        like: See ``read_tree``.
        request: How it is restored.
        gang: The processes that restore together.
        key: Prefix of the keys that they use.
        attempt: The current attempt. Its own saves are not waited for.
        deadline: When the whole call must have ended.
        sleep: Waits for a number of seconds.
        only: The only step that may be restored. None: the newest that can be.
        items: The items to restore next to the state.
        holds_lease: Whether this process holds the lease of the directory. See ``listing.settle``.
        base: Where the state comes from if there is no step. It may be in the directory. None: from nowhere.
        in_memory: The steps in the memory of nodes. Not asked if there is an ``only``.

    Raises:
        CheckpointRefused: There is no step, and something else in the directory looks like a checkpoint. Or see
            ``StateRequest.same_devices``.
        CheckpointNotFound: There is no complete checkpoint of the step ``only``.
        CheckpointCorrupt: There are checkpoints, and none can be restored; says why for each.
        CheckpointMismatch: The newest readable step does not fit ``like``, or has lost a required host state.
        CheckpointTooNew: A newer Gracepoint wrote the newest step that is not damaged.
        CheckpointError: The step cannot be read, for reasons other than damage.
    """

    def look() -> str:
        # Waiting for another attempt's writer must leave time to read.
        until = deadline.part(0.5)
        return list_steps(paths, attempt=attempt, deadline=until, sleep=sleep, holds_lease=holds_lease).to_text()

    with trace.span("list the steps"):
        listing = Listing.from_text(by_process_zero(look, gang=gang, key=f"{key}/list", deadline=deadline))
    for remark in listing.remarks:
        logger.info("restore: %s", remark)
    if only is not None:
        listing, in_memory = _without_others(listing, only, paths), NONE_IN_MEMORY
    restored, damage = None, None
    newest, snapshots, older = _by_age(listing, in_memory)
    if snapshots is not None:
        if isinstance(like, transforms.FormByCall):
            like = like.form()
        if newest is not None:
            try:
                restored = restore_listed(
                    paths, newest, like, request, gang=gang, key=f"{key}/newest", deadline=deadline, items=items
                )
            except CheckpointCorrupt as error:
                damage = error
        restored = restored or restore_from_memory(snapshots, like, request, gang=gang, key=key, deadline=deadline)
        if restored is not None:
            return restored
        if damage is not None and not older.steps:
            raise damage
    restored = restore_listed(
        paths, older, like, request, gang=gang, key=key, deadline=deadline, only=only, items=items
    )
    if restored is None:
        if others := [each for each in listing.look_alikes if not _is_at(base, each.path)]:
            raise refusal(paths.root, others)
        logger.warning("no checkpoint to restore in %s: %s", paths.root, "; ".join(listing.remarks) or "it is empty")
    return restored


#: Seconds that a process waits until the operator has said which snapshot servers there are.
_PLACED_S = 30.0
#: Seconds for the servers to say what they have.
_FOUND_S = 20.0


def find_in_memory(
    servers: SnapshotServers, of: str, *, gang: ProcessGroup, key: str, deadline: Deadline
) -> InMemorySteps:
    """Finds the steps in the memory of nodes. If that fails, there are none, and a log line says why. Collective.

    Nothing is waited for but the operator: who was sending is dead. ``of`` is what ``steps_of`` says of the directory.
    """
    if not servers.wait(min(_PLACED_S, deadline.remaining_s())):
        logger.warning("restore: the operator has named no snapshot server within %.0f s", _PLACED_S)

    def look() -> str:
        try:
            steps = complete_steps(servers, min(_FOUND_S, deadline.remaining_s()), of)
        except (GracepointError, OSError) as error:
            logger.warning("restore: what is in the memory of nodes is not known: %s", error)
            steps = []
        logger.info("restore: in the memory of nodes: %s", "; ".join(map(str, steps)) or "nothing")
        return json.dumps([step.to_json() for step in steps])

    text = by_process_zero(look, gang=gang, key=key, deadline=deadline)
    by_step: dict[int, FoundStep] = {}
    root = SnapshotPath(FoundSteps(servers, by_step, layout.MANIFEST), "")
    for step in map(CompleteStep.from_json, json.loads(text)):
        by_step[step.step] = _found(root, step)
    return InMemorySteps(Layout(root), Listing(tuple(sorted(by_step, reverse=True)), (), ()))


def _found(root: StoragePath, step: CompleteStep) -> FoundStep:
    """Returns what can be read of a step below ``root``."""
    owners, manifest = step.owners_by_path(), step.read_manifest()
    below = layout.in_item(manifest.item, "")

    @functools.cache
    def chunk_writers() -> ManifestParts:
        return ManifestParts(root / str(step.step), manifest)

    def owner_of(path: str) -> int:
        if path in owners or not manifest.is_in_parts:
            return owners[path]
        return chunk_writers().writer_of(path.removeprefix(below))

    return FoundStep(step.attempt, step.save, step.manifest, step.parts, owner_of)


def restore_from_memory(
    in_memory: InMemorySteps,
    like: Any,
    request: StateRequest,
    *,
    gang: ProcessGroup,
    key: str,
    deadline: Deadline,
) -> Restored | None:
    """Restores the newest step in memory that all processes can read. None if there is none, in all processes.

    The arguments and errors are those of ``restore_newest``. But an error that says nothing of the state, such as of a
    server that is away, is logged: storage may have what memory has not.
    """
    assert in_memory.paths is not None
    try:
        restored = restore_listed(
            in_memory.paths,
            in_memory.listing,
            like,
            request,
            gang=gang,
            key=f"{key}/memory",
            deadline=deadline,
            marks_readers=False,
        )
    except (CheckpointMismatch, CheckpointRefused, CheckpointTooNew):
        raise
    except CheckpointError as error:
        logger.error("restore: no step in the memory of nodes can be restored: %s", error)
        return None
    assert restored is not None  # a listing with steps has raised
    return dataclasses.replace(restored, passed_over={}, passed_over_standing={}, from_memory=True)


def restore_listed(
    paths: Layout,
    listing: Listing,
    like: Any,
    request: StateRequest,
    *,
    gang: ProcessGroup,
    key: str,
    deadline: Deadline,
    only: int | None = None,
    items: ItemsRequest = NO_ITEMS,
    marks_readers: bool = True,
) -> Restored | None:
    """Restores the newest step of a listing that all processes can read. Returns None if nothing is listed.

    ``listing`` is what process 0 found, in all processes. ``like`` may be a ``FormByCall``.
    ``marks_readers`` says whether the step is marked while it is read, so that retention does not delete it. The other
    arguments and the errors are those of ``restore_newest``.
    """
    refused = list(listing.refused)
    for reason in refused:
        logger.error("restore: not a checkpoint that can be restored: %s", reason)
    passed_over: dict[int, str] = {}
    standing = dict(listing.standing)
    if isinstance(like, transforms.FormByCall) and listing.steps:
        like = like.form()
    if request.options.donate:
        like = transforms.marked(like)  # before the loop, as the arrays may be deleted when an older step is read

    def attempt(step: int, key: str) -> tuple[Restored | None, str]:
        def read() -> Restored:
            may_take_turns = readers.may_be_taken(gang, paths.root, request.restore_args, request.options)
            together = ReplicaAgreement(gang, f"{key}/read", meets_first=may_take_turns)
            return read_step(paths, step, like, request, together, deadline, items)

        subject = f"step {step} of {paths.root}"
        marks = marks_readers and gang.process_index == 0
        with retention.reading(paths, step) if marks else contextlib.nullcontext():
            return read_together(subject, read, gang=gang, key=key, deadline=deadline)

    for step in listing.steps:
        key_of_step = f"{key}/step/{step}"
        restored, damage = attempt(step, key_of_step)
        if restored is None and step in standing:
            look = functools.partial(_standing, paths, step)
            now = by_process_zero(look, gang=gang, key=f"{key_of_step}/standing", deadline=deadline)
            if now not in ("", standing[step]):
                logger.warning("restore: step %d was replaced while it was read, and is read again", step)
                standing[step] = now
                restored, damage = attempt(step, f"{key_of_step}/again")
        if restored is not None:
            if refused:
                logger.error("restore: went back to step %d, as newer ones cannot be restored", step)
            of_passed_over = {step: standing[step] for step in passed_over if step in standing}
            return dataclasses.replace(restored, passed_over=passed_over, passed_over_standing=of_passed_over)
        logger.error("restore: step %d is not restored: %s", step, damage)
        refused.append(damage)
        passed_over[step] = damage
    if only is not None:
        raise CheckpointCorrupt(f"step {only} of {paths.root} cannot be restored: {'; '.join(refused)}")
    if refused:
        raise CheckpointCorrupt(
            f"{paths.root} has checkpoints, but none that can be restored; training from the start would lose them, so "
            f"move them away if that is wanted: {'; '.join(refused)}"
        )
    return None


def _is_at(base: StoragePath | None, path: str) -> bool:
    return base is not None and f"{base}/".startswith(f"{path}/")


def _standing(paths: Layout, step: int) -> str:
    return ours(paths.step(step), step) or ""


def _without_others(listing: Listing, step: int, paths: Layout) -> Listing:
    if step not in listing.steps:
        reason = "; ".join(listing.refused) or f"complete are {', '.join(map(str, listing.steps)) or 'none'}"
        raise CheckpointNotFound(f"{paths.root} has no complete checkpoint of step {step}: {reason}")
    return dataclasses.replace(listing, steps=(step,), refused=())


def read_together(
    subject: str, read: Callable[[], Result], *, gang: ProcessGroup, key: str, deadline: Deadline
) -> tuple[Result | None, str]:
    """Calls ``read`` in every process, and exchanges the outcomes.

    Returns:
        The result and an empty text. If some process found damage, None and a description of the damage, in all
        processes.

    Raises:
        CheckpointError: ``read`` raised an error that is not damage in some process; see ``damage_in_any``.
    """
    failure: Exception | None = None
    result = None
    metrics.tell_restore_started()
    began_s = time.monotonic()
    try:
        with trace.span(f"read {subject}"):
            result = read()
    except Exception as error:  # noqa: BLE001 - sent to the others, then raised
        failure = error
    with trace.span("wait for all to have read"):
        damage = damage_in_any(subject, failure, gang=gang, key=key, deadline=deadline)
    if damage:
        return None, damage
    metrics.tell_restored(time.monotonic() - began_s)
    return result, ""


def read_step(
    paths: Layout,
    step: int,
    like: Any,
    request: StateRequest,
    together: ReplicaAgreement,
    deadline: Deadline,
    items: ItemsRequest = NO_ITEMS,
) -> Restored:
    """Reads this process's part of a step.

    Raises:
        CheckpointCorrupt: A file that it reads is damaged.
        CheckpointMismatch: The step does not fit ``like`` or the number of processes.
    """
    folder, restore_args = paths.step(step), request.restore_args
    with in_time(folder, deadline), reporting_errors(together, restore_args, deadline):
        index, own, note = together.gang.process_index, dict[str, Any](), None
        also = [layout.host_state_file(index), *([layout.NOTE] if index == 0 else [])]
        stored = open_tree(folder, deadline, preferred=paths.item, also=also if request.with_host_state else [])
        if request.same_devices:
            check_devices(stored)
        if request.with_host_state:
            own = own_host_state(stored, index, together.gang.process_count, request.reshard, request.required)
            note = stored.note() if index == 0 else None
        restored_items = restore_items(stored, items, deadline)
        state = read_into(stored, like, restore_args, options=request.options, deadline=deadline, together=together)
    changed = form_of_stored(stored).changes(form_of_state(state, together.gang.process_count))
    return Restored(state, step, own, stored.manifest is None, items=restored_items, changed=changed, note=note)


_STEP = re.compile(r"0|[1-9]\d*", re.ASCII)


def restore_base(
    base: UserPath,
    like: Any,
    *,
    gang: ProcessGroup,
    key: str,
    deadline: Deadline,
    restore_args: Any,
    options: RestoreOptions,
) -> Restored:
    """Restores the newest step of another run, or the step whose folder is given. Collective.

    Args:
        base: A directory of steps, or the folder of one step in it, of any name, written by Gracepoint or Orbax.
        like: See ``read_tree``.
        gang: The processes that restore together.
        key: Prefix of the keys that they use.
        deadline: When the whole call must have ended.
        restore_args: See ``read_tree``.
        options: See ``read_tree``.

    Returns:
        The state, without host state: that belongs to the run that saved it.

    Raises:
        CheckpointNotFound: There is no complete checkpoint.
        CheckpointCorrupt: No complete checkpoint can be restored; says why for each.
        CheckpointMismatch: The newest readable step does not fit ``like``.
        CheckpointError: The checkpoint cannot be read for another reason.
        SettingsError: ``base`` is not an absolute path or a URI.
    """
    folder = storage_path(base)

    def look() -> str:
        root, names, listing = _find(folder)
        return json.dumps([str(root), list(names.items()), listing.to_text()])

    root, names, listing = json.loads(by_process_zero(look, gang=gang, key=f"{key}/list", deadline=deadline))
    restored = restore_listed(
        Layout(storage_path(root), names=dict(names)),
        Listing.from_text(listing),
        like,
        StateRequest(restore_args=restore_args, options=options, with_host_state=False),
        gang=gang,
        key=key,
        deadline=deadline,
        marks_readers=False,
    )
    assert restored is not None  # a listing without steps has raised
    return restored


def _find(folder: StoragePath) -> tuple[StoragePath, dict[int, str], Listing]:
    """Returns the directory of the steps, the names of their folders that are no numbers, and what may be restored."""
    listing = complete_listing(Layout(folder))
    if listing.steps:
        return folder, {}, listing
    if (step := _step_at(folder)) is not None:
        names = {} if str(step) == folder.name else {step: folder.name}
        reason = why_not(Layout(folder.parent, names=names), step)
        if reason is None:
            return folder.parent, names, Listing((step,), (), ())
        raise CheckpointNotFound(f"from_: {folder} is not a complete checkpoint of a step: {reason}")
    others = [str(each) for each in look_alikes(Layout(folder))]
    problems = "; ".join((*listing.refused, *listing.remarks, *others)) or "it has no steps"
    raise CheckpointNotFound(
        f"from_: expected a directory of steps, or the folder of a step, at {folder}; found no complete checkpoint: "
        f"{problems}"
    )


def _step_at(folder: StoragePath) -> int | None:
    """Returns the step in ``folder``; 0 if nothing says its number. None if it is not the folder of a step."""
    if not folder.is_folder():
        return None
    if _STEP.fullmatch(folder.name):
        return int(folder.name)
    if checkpoint_around(folder) != folder:
        return None
    step = (records.manifest_fields(folder) or {}).get("step")
    return step if step is not None else number_of(folder) or 0
