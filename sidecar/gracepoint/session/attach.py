"""``attach``: joins the JAX cluster, brings the processes together and opens a session.

No state. The only threads are those of the ``AttachWatch`` (``preemption.stall_watch``), which end with ``attach``, and
the preloading thread.

A process waits while it joins: for process 0, and for the last process. The **preloading thread**
("gracepoint-preload", daemon) loads meanwhile what ``attach`` and the restore need next. It imports modules, has the
system read the newest checkpoint into its page cache or makes a connection to the object store ready, and ends. Only an
import of the same module waits for it, and an ``attach`` that fails (``Preloading.leave``). What fails here is done
again by ``attach`` and ``restore``, which raise the error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gracepoint import machine, trace
from gracepoint import trace as tracing
from gracepoint.arguments import shown
from gracepoint.errors import SettingsError
from gracepoint.multihost import global_state, join, meet
from gracepoint.multihost.membership import PodNames
from gracepoint.multihost.rendezvous import leaving_on_sigterm
from gracepoint.preemption.stall_watch import AttachWatch
from gracepoint.preemption.time_spent import ProcessStart
from gracepoint.receivers import Receiver
from gracepoint.session.compilation import ProgramWatch, keep_programs
from gracepoint.session.session import Session, check_none_is_open, not_joined_if_away
from gracepoint.settings import VARIABLES, Settings
from gracepoint.threads import DaemonThread, NoThread
from gracepoint.wire.names import DEFAULT_AUTO_S, SAVE_AUTO, Env

if TYPE_CHECKING:
    from gracepoint.checkpoint import WriteOptions
    from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings
    from gracepoint.snapshots.snapshot_servers import SnapshotServers

#: Placeholders in the directory of a policy, which the operator replaces.
_PLACEHOLDERS = ("{namespace}", "{jobset}")


def checked_directory(directory: Any) -> str | None:
    """Returns the directory as a text. None if none is given.

    Raises:
        SettingsError: It is no path, or has a placeholder that only the operator fills in.
    """
    if directory is None:
        return None
    text = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise SettingsError(f"attach(directory=...): expected a path or a URI, found {shown(directory)}")
    for placeholder in _PLACEHOLDERS:
        if placeholder in text:
            raise SettingsError(
                f"attach(directory=...): found {text!r}, but only a CheckpointPolicy's directory has {placeholder}, "
                f"which the operator fills in. Write the name itself, or call attach() without a directory in a job "
                f"that has a policy"
            )
    return text


def check_receiver(receiver: Any) -> None:
    """Checks that a receiver can be started and closed.

    Raises:
        SettingsError: It cannot.
    """
    missing = [name for name in ("start", "close") if not callable(getattr(receiver, name, None))]
    if receiver is not None and missing:
        raise SettingsError(
            f"attach(receiver=...): expected an object with start(mailbox) and close(), found {shown(receiver)} "
            f"without {' and '.join(missing)}"
        )


logger = logging.getLogger(__name__)

_MODULES = (
    "gracepoint.checkpoint.engine",
    "gracepoint.checkpoint.restoring.start_state",
)


#: Seconds that an ``attach`` that fails waits for the preloading thread. Storage that hangs may hold it for longer.
_PRELOADED_S = 10.0


class Preloading:
    """Loads ahead, in a separate thread, if this process waits for others while it joins. Starts when it is made.

    Args:
        settings: The settings of this process.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._leaves = False  # written by the thread that calls ``leave``
        self._thread: DaemonThread | None = None
        if settings.process_count in (None, 1) or global_state.initialized:
            return
        thread = DaemonThread(self._load, "gracepoint-preload")
        try:
            thread.start()
        except NoThread as error:  # the system has no more threads
            logger.info("nothing is loaded ahead error=%s", error)
        else:
            self._thread = thread

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing more is loaded, for ``timeout_s`` seconds at most. Returns whether that is so."""
        return self._thread is None or self._thread.wait(timeout_s)

    def leave(self) -> None:
        """Ends the loading, as this process may exit. Waits for what has begun, for 10 s at most. Never raises.

        When the interpreter ends, Python ends a daemon thread where it next needs the interpreter. If the thread is
        importing a module in C++ then, such as TensorStore, the C++ runtime aborts the process. It would end by
        SIGABRT, which counts as a failure of the program, and not with its exit code.
        """
        self._leaves = True
        if not self.wait(_PRELOADED_S):
            logger.warning("something is still being loaded ahead seconds=%.0f", _PRELOADED_S)

    def _load(self) -> None:
        try:
            for name in _MODULES:
                if self._leaves:
                    return
                with trace.span(f"import {name}"):
                    importlib.import_module(name)
            if self._settings.directory is not None and not self._leaves:
                self._read_ahead(self._settings.directory)
        except Exception as error:  # noqa: BLE001 - raised again by what needs it
            logger.info("not everything was loaded ahead error=%s", error)

    def _read_ahead(self, directory: str) -> None:
        from gracepoint.session.ahead_in_keeper import read_ahead

        with trace.span("begin to read ahead"):
            begun_bytes = read_ahead(directory, self._settings.process_id)
        logger.info("reading ahead what this process saved last bytes=%d", begun_bytes)


#: Where a single process without any setting keeps its checkpoints, below the current folder.
LOCAL_DIRECTORY = "gracepoint-checkpoints"
_CHECK_TIMEOUT_S = 60.0
#: Seconds that the storage has for its answer where training may begin without it.
_ANSWER_S = 10.0


def attach(
    directory: str | os.PathLike[str] | None = None,
    *,
    save_every_steps: int | None = None,
    save_every_s: float | None = None,
    save_interval: Literal["fixed", "auto"] | None = None,
    keep_last: int | None = None,
    keep_every_steps: int | None = None,
    keep_for_s: float | None = None,
    tolerate_failures_s: float | None = None,
    saved_exit_code: int | None = None,
    unsaved_exit_code: int | None = None,
    not_joined_exit_code: int | None = None,
    join_timeout_s: float | None = None,
    grace_period_s: float | None = None,
    margin: float | None = None,
    head_start_s: float | None = None,
    metadata: str | None = None,
    gce_notice_s: float | None = None,
    host_memory_limit_bytes: int | None = None,
    snapshot_every_steps: int | None = None,
    snapshot_every_s: float | None = None,
    snapshot_copies: int | None = None,
    writer: str | None = None,
    stall_after_s: float | None = None,
    stall_action: Literal["report", "restart"] | None = None,
    compilation_cache: str | None = None,
    compilation_cache_bytes: int | None = None,
    compilation_cache_days: int | None = None,
    trace: str | None = None,
    receiver: Receiver | None = None,
    write_options: WriteOptions | None = None,
) -> Session:
    """Joins the training processes and starts to listen for preemptions. Collective.

    An argument overrides the policy's value, which comes through the environment. If an argument is None, the policy's
    value counts; without a policy, as on a laptop, the value that is called the default below. Joins the JAX cluster
    unless it is initialised already, and initialises JAX's backend.

    Args:
        directory: Path or URI (``gs://bucket/name``, ...) below which the steps are kept, on storage that all
            processes share. Default: ``gracepoint-checkpoints`` below the current folder, for one process only.
        save_every_steps: A periodic save is due at the first sync point from each multiple of this number of steps on.
            0, the default: no saves by number of steps, so that only a preemption saves.
        save_every_s: A periodic save is due this many seconds after the last one. 0, the default: no saves by time.
        save_interval: ``fixed``, the default: the two arguments above say when saves are due. ``auto``: the operator
            says after how many seconds, from what saves cost and how often steps were lost. ``save_every_steps`` does
            not count then, and ``save_every_s`` (600 if it is 0) counts until the operator has figures.
        keep_last: How many committed steps are kept. Default: 3.
        keep_every_steps: Multiples of this number of steps are kept, too. 0, the default: none for that reason.
        keep_for_s: Steps that are younger than this are kept, too. 0, the default: none for that reason.
        tolerate_failures_s: Seconds for which periodic saves may fail, one after the other, before ``step`` raises
            ``SaveFailed`` in all processes. Until then training continues, and each failure is logged and reported. An
            emergency save is tried whatever failed before. 0: the first failure ends training. Default: 900.
        saved_exit_code: Exit code of the process after an emergency save. Default: 77.
        unsaved_exit_code: Exit code if that save failed. Default: 78.
        not_joined_exit_code: Exit code if this process does not get into the job for a reason that is not the
            program's, or if another process has died. Default: 79.
        join_timeout_s: Seconds that this call waits for processes that are not there, and for storage that is away.
            0, the default: no limit.
        grace_period_s: Seconds that the process lives after a SIGTERM. Default: 30.
        margin: Factor on predicted durations. Default: 1.25.
        head_start_s: A preemption's save begins no later than this many seconds before the deadline, however short it
            is predicted to be: a safety margin for delays that are in no prediction. Shorter notices (spot: 15 to 30
            s) are acted upon at once. 0: the prediction alone counts. Default: 60.
        metadata: Clouds whose metadata server is watched for notices: ``gce``, ``aws`` and ``azure``, separated by
            commas, or ``auto``. Default: none.
        gce_notice_s: Seconds of ``preemptionNoticeDuration``, if the instances of Google Compute Engine have one. The
            metadata server does not say it. 0, the default: they have none.
        host_memory_limit_bytes: Bytes of host memory that periodic saves may use in each process. Default: all that
            is free.
        snapshot_every_steps: The state is sent to the memory of nodes at each multiple of this number of steps, beside
            the saves in the directory, so that an end without notice loses no more than that. Only in a cluster whose
            operator has snapshot servers. 0, the default: not by number of steps.
        snapshot_every_s: The same by seconds. 0, the default: not by time. At most one of both is above 0.
        snapshot_copies: In how many nodes' memory each part of a snapshot is: in that of its own node, and with 2 in
            that of another one. Default: 2.
        writer: Who writes saves: ``thread``, the default, a thread of this process; ``worker``, a process that finishes
            them even if this one dies; or a keeper, by the path of its socket. ``WriteOptions.writer`` counts first.
        stall_after_s: Seconds without progress after which a process is reported as stalled: in a step, a save, a
            restore or a meeting. A compilation counts as progress as long as it computes. Choose more than the longest
            evaluation without a sync point. 0: nothing is watched. Default: 900.
        stall_action: What follows from a stall. ``report``, the default: an error in the log, and to the operator.
            ``restart``: all processes also exit with code 1, so that the job starts again, which counts.
        compilation_cache: Whether compiled programs are kept, so that the next start does not compile them again.
            JAX keeps them in its persistent cache. ``on``: next to the checkpoints, if these are on a file system. Or a
            path or URI of a directory for them, which several jobs may share. Both yield to
            ``JAX_COMPILATION_CACHE_DIR``, which a policy sets. ``off``: none are kept. Default: what JAX's own settings
            say. JAX runs what is in the directory, so only those who may run code in these processes may write to it.
        compilation_cache_bytes: Has no effect: nothing is deleted. JAX's ``jax_compilation_cache_max_size`` is such a
            bound.
        compilation_cache_days: Has no effect, either.
        trace: Folder in which each process writes where its time goes, in a file that https://ui.perfetto.dev opens.
            Default: no such file is written.
        receiver: Brings notices from a source of your own, such as a test or another scheduler. It is started with the
            session and closed with it. None if there is none.
        write_options: How the arrays of checkpoints are written, such as their format or chunks. The same in all
            processes. None: the defaults.

    Raises:
        NotJoined: This process does not get into the job, for a reason that is not the program's.
        Preempted: It was raised before in this process, which is to exit.
        SettingsError: A setting is missing, unknown or wrong, or a session is open already. Or this container has
            accelerators, and JAX has no package for them.
        CheckpointError: The directory cannot be written to, or not all processes share its storage. Or another job uses
            it, or another cluster of the same start of this job.
        AgreementError: JAX's cluster has another number of processes than the operator's webhook counted. Or the
            processes have different versions of this library or of JAX.
        BarrierTimeout: A process of the JAX cluster did not come.
    """
    arguments = locals().copy()  # those that are settings have the names of the fields of ``Settings``
    start = ProcessStart(time.monotonic(), time.time(), machine.process_age_s())
    check_none_is_open()
    check_receiver(receiver)
    arguments["directory"] = checked_directory(directory)
    settings = Settings.from_environment(os.environ).override(
        **{name: value for name, value in arguments.items() if name in VARIABLES}
    )
    with AttachWatch(settings) as watch:
        _begin_trace(settings, start.age_s)
        try:
            return _opened(settings, watch, write_options, receiver, start)
        except BaseException:
            tracing.end()
            raise


def _opened(
    settings: Settings,
    watch: AttachWatch,
    write_options: WriteOptions | None,
    receiver: Receiver | None,
    start: ProcessStart,
) -> Session:
    with contextlib.ExitStack() as until_it_ends, contextlib.ExitStack() as if_it_fails:
        if_it_fails.callback(Preloading(settings).leave)
        programs = ProgramWatch()
        if_it_fails.callback(programs.close)
        with watch.at("joining of the JAX cluster"):
            waiting = functools.partial(watch.at, "waiting for the other processes", may_last=True)
            join(settings, waiting=waiting, until=until_it_ends)
        with watch.at("meeting of the processes"):
            meeting = meet(settings, watch.met, start.unix_s)
        watch.met(meeting.gang, PodNames(meeting.members), meeting.host)
        tracing.tell(index=meeting.gang.process_index, attempt=meeting.attempt)
        where = _directory(settings, meeting.gang.process_count)
        is_auto = settings.save_interval == SAVE_AUTO
        with tracing.span("import of the checkpoint engine"):
            from gracepoint.checkpoint.engine import StepCheckpointer
            from gracepoint.checkpoint.format.layout import Layout
            from gracepoint.checkpoint.saving.planner import SaveSettings
            from gracepoint.checkpoint.saving.schedule import SaveSchedule
            from gracepoint.checkpoint.steps.retention import Retention
            from gracepoint.checkpoint.storage.locations import storage_path

        keep_programs(settings.compilation_cache, where)
        servers = _servers(settings)
        checkpointer = StepCheckpointer(
            Layout(storage_path(where)),
            gang=meeting.gang,
            attempt=meeting.attempt,
            schedule=SaveSchedule(
                every_steps=0 if is_auto else settings.save_every_steps,
                every_s=(settings.save_every_s or DEFAULT_AUTO_S) if is_auto else settings.save_every_s,
                hastens=settings.operator_url is not None,
            ),
            retention=Retention(settings.keep_last, settings.keep_every_steps, settings.keep_for_s),
            settings=SaveSettings(_options(settings, write_options), settings.host_memory_limit_bytes),
            memory=None if servers is None else _memory(settings, servers),
            clock=time.monotonic,
        )
        checkpointer.remember_throughput()
        job = settings.jobset_uid or meeting.attempt
        # First the claim: it makes room for what is written next, which only the job that has the lease may do.
        # The others wait for process 0, which waits for the storage, and says so.
        with (
            watch.at("claim of the directory", may_last=meeting.gang.process_index != 0),
            leaving_on_sigterm(settings.not_joined_exit_code, leave=os._exit),
            not_joined_if_away(settings),
        ):
            if servers is not None:  # training may begin without storage
                is_there = checkpointer.access.claim_if_there(
                    job,
                    start=meeting.start,
                    timeout_s=_CHECK_TIMEOUT_S,
                    away_s=_away_s(settings),
                    answer_s=_ANSWER_S,
                )
            else:
                checkpointer.access.claim(
                    job,
                    start=meeting.start,
                    timeout_s=_CHECK_TIMEOUT_S,
                    away_s=_away_s(settings),
                    on_away=watch.goes_on,
                )
                is_there = True
        if_it_fails.callback(checkpointer.access.release)
        if is_there:
            with watch.at("check of the directory"), not_joined_if_away(settings):
                checkpointer.access.check_shared()
        logger.info(
            "attached process=%d of=%d attempt=%s directory=%s",
            meeting.gang.process_index,
            meeting.gang.process_count,
            meeting.attempt,
            where,
        )
        try:
            with tracing.span("opening of the session"):
                session = Session(
                    settings,
                    meeting,
                    checkpointer,
                    clock=time.monotonic,
                    start=dataclasses.replace(start, last_unix_s=meeting.last_started_unix_s),
                    receiver=receiver,
                    programs=programs,
                )
        except BaseException as error:
            checkpointer.abandon(str(error), timeout_s=0.0)
            raise
        if_it_fails.pop_all()
        return session


def _servers(settings: Settings) -> SnapshotServers | None:
    """Returns what knows the snapshot servers. None: there are no snapshots."""
    if not settings.snapshots:
        return None
    if settings.operator_url is None:
        logger.warning(
            "there are no snapshots: the operator says which servers hold them variable=%s", Env.OPERATOR_URL
        )
        return None
    from gracepoint.snapshots.snapshot_servers import SnapshotServers

    return SnapshotServers()


def _memory(settings: Settings, servers: SnapshotServers) -> MemorySettings:
    from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings
    from gracepoint.checkpoint.saving.schedule import SaveSchedule

    schedule = SaveSchedule(settings.snapshot_every_steps, settings.snapshot_every_s)
    return MemorySettings(servers, schedule, settings.snapshot_copies)


def _away_s(settings: Settings) -> float:
    """Returns how many seconds a start waits for storage that is away. Outside a pod somebody looks on: not at all."""
    return settings.join_timeout_s or (0.0 if settings.pod_name is None else math.inf)


def _begin_trace(settings: Settings, age_s: float | None) -> None:
    if settings.trace is None:
        return
    tracing.begin(settings.trace, settings.pod_name or machine.host_name())
    tracing.tell(job=settings.jobset_name, restart_attempt=settings.restart_attempt, node=settings.node_name)
    if age_s is not None:
        tracing.ended("before attach: Python, imports", age_s)


def _options(settings: Settings, chosen: WriteOptions | None) -> WriteOptions:
    from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions

    options = DEFAULT_OPTIONS if chosen is None else chosen
    if not isinstance(options, WriteOptions):
        raise SettingsError(
            f"attach(write_options=...): expected gracepoint.checkpoint.WriteOptions(...), found {shown(options)}"
        )
    return dataclasses.replace(options, writer=settings.writer) if options.writer is None else options


def _directory(settings: Settings, process_count: int) -> str:
    if settings.directory is not None:
        is_uri = "://" in settings.directory
        return settings.directory if is_uri else str(Path(settings.directory).absolute())
    if process_count > 1:
        raise SettingsError(
            f"{Env.DIRECTORY}: expected a path or a URI on storage that all {process_count} processes share, "
            f"found none. Set it in the policy, or call attach(directory)"
        )
    where = str(Path.cwd() / LOCAL_DIRECTORY)
    logger.warning("no directory was given, checkpoints go below the current one directory=%s", where)
    return where
