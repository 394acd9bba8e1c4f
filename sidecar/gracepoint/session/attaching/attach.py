"""``attach``: joins the JAX cluster, brings the processes together and opens a session.

No state. The only threads are those of the ``AttachWatch``, which end with ``attach``, and of ``preloading``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gracepoint import machine
from gracepoint import trace as tracing
from gracepoint.arguments import shown
from gracepoint.errors import SettingsError
from gracepoint.multihost import join, meet
from gracepoint.multihost.joining.members import PodNames
from gracepoint.preemption.reporting.time_spent import ProcessStart
from gracepoint.receivers import Receiver
from gracepoint.session.attaching import preloading
from gracepoint.session.attaching.arguments import check_receiver, checked_directory
from gracepoint.session.attaching.attach_watch import AttachWatch
from gracepoint.session.program_watch import ProgramWatch
from gracepoint.session.session import Session, check_none_is_open
from gracepoint.settings import Settings
from gracepoint.wire.names import DEFAULT_AUTO_S, SAVE_AUTO, Env

if TYPE_CHECKING:
    from gracepoint.checkpoint import WriteOptions

log = logging.getLogger(__name__)

#: Where a single process without any setting keeps its checkpoints, below the current folder.
LOCAL_DIRECTORY = "gracepoint-checkpoints"
_CHECK_TIMEOUT_S = 60.0


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
    grace_period_s: float | None = None,
    margin: float | None = None,
    head_start_s: float | None = None,
    metadata: str | None = None,
    gce_notice_s: float | None = None,
    host_memory_limit_bytes: int | None = None,
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
            ``SaveFailed`` in all processes. Until then training goes on, and each failure is logged and reported. An
            emergency save is tried whatever failed before. 0: the first failure ends training. Default: 900.
        saved_exit_code: Exit code of the process after an emergency save. Default: 77.
        unsaved_exit_code: Exit code if that save failed. Default: 78.
        grace_period_s: Seconds that the process lives after a SIGTERM. Default: 30.
        margin: Factor on predicted durations. Default: 1.25.
        head_start_s: A preemption's save begins no later than this many seconds before the deadline, however short it
            is predicted to be: a safety margin for delays that are in no prediction. Shorter notices (spot: 15 to 30
            s) are acted upon at once. 0: the prediction alone counts. Default: 60.
        metadata: Clouds whose metadata server is watched for notices: ``gce``, ``aws`` and ``azure``, separated by
            commas, or ``auto``. Default: none.
        gce_notice_s: Seconds of ``preemptionNoticeDuration``, if the instances of Google Compute Engine have one. The
            metadata server does not tell it. 0, the default: they have none.
        host_memory_limit_bytes: Bytes of host memory that periodic saves may use in each process. Default: all that
            is free.
        writer: Who writes saves: ``thread``, the default, a thread of this process; ``worker``, a process that finishes
            them even if this one dies; or a keeper, by the path of its socket. ``WriteOptions.writer`` counts first.
        stall_after_s: Seconds without progress after which a process is reported as stalled: in a step, a save, a
            restore or a meeting. A compilation counts as progress as long as it computes. Choose more than the longest
            evaluation without a sync point. 0: nothing is watched. Default: 900.
        stall_action: What follows from a stall. ``report``, the default: an error in the log, and to the operator.
            ``restart``: all processes also exit with ``unsaved_exit_code``, so that the job starts again.
        compilation_cache: Whether compiled programs are kept, so that the next start does not compile them again.
            ``off``, the default; ``on``: beside the checkpoints; or a path or URI of a directory for them, which
            several jobs may share. JAX runs what is in it, so only those who may run code in these processes may
            write to it.
        compilation_cache_bytes: Bytes that all compiled programs together may have. The oldest are deleted. Default:
            10 GiB.
        compilation_cache_days: Days without use after which a compiled program is deleted. Default: 30.
        trace: Folder in which each process writes where its time goes, in a file that https://ui.perfetto.dev opens.
            Default: no such file is written.
        receiver: Brings notices from a source of your own, such as a test or another scheduler. It is started with the
            session and closed with it. None if there is none.
        write_options: How the arrays of checkpoints are written, such as their format or chunks. The same in all
            processes. None: the defaults.

    Raises:
        Preempted: It was raised before in this process, which is to exit.
        SettingsError: A setting is missing, unknown or wrong, or a session is open already. Or this container has
            accelerators, and JAX has fallen back to the CPU.
        CheckpointError: The directory cannot be written to, or not all processes share its storage. Or another job uses
            it, or another cluster of the same start of this job.
        AgreementError: JAX's cluster has another number of processes than the operator's webhook counted.
        BarrierTimeout: A process did not come.
    """
    start = ProcessStart(time.monotonic(), time.time(), machine.process_age_s())
    check_none_is_open()
    check_receiver(receiver)
    settings = Settings.from_environment(os.environ).override(
        directory=checked_directory(directory),
        save_every_steps=save_every_steps,
        save_every_s=save_every_s,
        save_interval=save_interval,
        keep_last=keep_last,
        keep_every_steps=keep_every_steps,
        keep_for_s=keep_for_s,
        tolerate_failures_s=tolerate_failures_s,
        saved_exit_code=saved_exit_code,
        unsaved_exit_code=unsaved_exit_code,
        grace_period_s=grace_period_s,
        margin=margin,
        head_start_s=head_start_s,
        metadata=metadata,
        gce_notice_s=gce_notice_s,
        host_memory_limit_bytes=host_memory_limit_bytes,
        writer=writer,
        stall_after_s=stall_after_s,
        stall_action=stall_action,
        compilation_cache=compilation_cache,
        compilation_cache_bytes=compilation_cache_bytes,
        compilation_cache_days=compilation_cache_days,
        trace=trace,
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
    preloading.begin(settings)
    with contextlib.ExitStack() as if_it_fails:
        programs = ProgramWatch()
        if_it_fails.callback(programs.close)
        with watch.at("joining of the JAX cluster"):
            join(settings)
        with watch.at("meeting of the processes"):
            meeting = meet(settings, watch.met, start.unix_s)
        watch.met(meeting.gang, PodNames(meeting.members), meeting.host)
        tracing.tell(index=meeting.gang.process_index, attempt=meeting.attempt)
        where = _directory(settings, meeting.gang.process_count)
        is_auto = settings.save_interval == SAVE_AUTO
        with tracing.span("import of the checkpoint engine"):
            from gracepoint.checkpoint.checkpointers.step_checkpointer import StepCheckpointer
            from gracepoint.checkpoint.loading.saved_form import check_accelerators_of_container
            from gracepoint.compile_cache.opening import open_compile_cache

        check_accelerators_of_container(os.environ)
        # First, as it reads in the background what the restore and the first steps need.
        with tracing.span("opening of the compilation cache"):
            compile_cache = open_compile_cache(settings, meeting, where)
        if compile_cache is not None:
            if_it_fails.callback(compile_cache.close, well=False)
        checkpointer = StepCheckpointer(
            where,
            gang=meeting.gang,
            attempt=meeting.attempt,
            save_every_steps=0 if is_auto else settings.save_every_steps,
            save_every_s=(settings.save_every_s or DEFAULT_AUTO_S) if is_auto else settings.save_every_s,
            keep_last=settings.keep_last,
            keep_every_steps=settings.keep_every_steps,
            keep_for_s=settings.keep_for_s,
            host_memory_limit_bytes=settings.host_memory_limit_bytes,
            remember_throughput=True,
            hastens=settings.operator_url is not None,
            options=_options(settings, write_options),
            clock=time.monotonic,
        )
        job = settings.jobset_uid or meeting.attempt
        # First the claim: it makes room for what is written next, which only the job that has the lease may do.
        with watch.at("claim of the directory"):
            checkpointer.access.claim(job, start=meeting.start, timeout_s=_CHECK_TIMEOUT_S)
        if_it_fails.callback(checkpointer.access.release)
        with watch.at("check of the directory"):
            checkpointer.access.check_shared(timeout_s=_CHECK_TIMEOUT_S)
        log.info(
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
                    where,
                    clock=time.monotonic,
                    start=dataclasses.replace(start, last_unix_s=meeting.last_started_unix_s),
                    receiver=receiver,
                    compile_cache=compile_cache,
                    programs=programs,
                )
        except BaseException as error:
            checkpointer.abandon(str(error), timeout_s=0.0)
            raise
        if_it_fails.pop_all()
        return session


def _begin_trace(settings: Settings, age_s: float | None) -> None:
    if settings.trace is None:
        return
    tracing.begin(settings.trace, settings.pod_name or machine.host_name())
    tracing.tell(job=settings.jobset_name, restart_attempt=settings.restart_attempt, node=settings.node_name)
    if age_s is not None:
        tracing.ended("before attach: Python, imports", age_s)


def _options(settings: Settings, given: WriteOptions | None) -> WriteOptions:
    from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions

    options = DEFAULT_OPTIONS if given is None else given
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
    log.warning("no directory was given, checkpoints go below the current one directory=%s", where)
    return where
