"""The settings that the library reads from its pod's environment, once and strictly.

In a cluster the operator's webhook writes the environment (``wire/names.py``). On a laptop nothing is set, and the
defaults hold: one process, no operator. A variable with our prefix that this version does not know, or a value that
cannot be read, is an error: a setting that is silently ignored is noticed only when a job is lost.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from gracepoint.errors import SettingsError
from gracepoint.wire.names import (
    COMPILATION_CACHE_OFF,
    COMPILATION_CACHE_ON,
    DEFAULT_HEAD_START_S,
    DEFAULT_NOT_JOINED_EXIT_CODE,
    DEFAULT_SAVED_EXIT_CODE,
    DEFAULT_SNAPSHOT_COPIES,
    DEFAULT_STALL_AFTER_S,
    DEFAULT_TOLERATE_FAILURES_S,
    DEFAULT_UNSAVED_EXIT_CODE,
    ENV_JOB_COMPLETION_INDEX,
    ENV_PREFIX,
    METADATA_AUTO,
    METADATA_CLOUDS,
    SAVE_AUTO,
    SAVE_FIXED,
    STALL_REPORT,
    STALL_RESTART,
    TOKEN_FILE,
    Env,
)

T = TypeVar("T")
#: Reads the text of a setting, which an error calls by the name that is given.
Reader = Callable[[str, str], Any]


def _text(name: str, value: str) -> str:
    return value


# A variable as shells, Python and Kubernetes write it.
_VARIABLE = re.compile(r"\$(\w+|\{\w+\}|\(\w+\))")


def location(name: str, value: str) -> str:
    """Returns a path or URI that a user gave, with the home folder in the place of ``~`` at its beginning.

    Raises:
        SettingsError: Something in it stands for another text, and nobody would replace it.
    """
    if match := _VARIABLE.search(value):
        raise SettingsError(
            f"{name}: found {value!r}, where {match.group()} is not replaced: write what it stands for, in Python with "
            f"os.path.expandvars(...)"
        )
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise SettingsError(f"{name}: found {value!r}, and no such user has a home folder here: write the whole path")
    return expanded


def _integer(low: int, high: int | None = None) -> Reader:
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def read(name: str, value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise SettingsError(f"{name}: expected {expected}, found {value!r}")
        return number

    return read


def _number(low: float, *, above: bool = False) -> Reader:
    expected = f"a number {'above' if above else 'of at least'} {low:g}"

    def read(name: str, value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < low or (above and number == low):
            raise SettingsError(f"{name}: expected {expected}, found {value!r}")
        return number

    return read


def _https_url(name: str, value: str) -> str:
    parts = urllib.parse.urlsplit(value)
    if parts.scheme != "https" or not parts.hostname:
        raise SettingsError(f"{name}: expected https://<host>:<port>, found {value!r}")
    return value


def _pem(name: str, value: str) -> str:
    if "-----BEGIN CERTIFICATE-----" not in value:
        raise SettingsError(f"{name}: expected a PEM certificate, found {value[:40]!r}")
    return value


def _clouds(name: str, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
    if names != (METADATA_AUTO,) and not set(names) <= set(METADATA_CLOUDS):
        raise SettingsError(
            f"{name}: expected {METADATA_AUTO}, or some of {', '.join(METADATA_CLOUDS)} with commas between, "
            f"found {value!r}"
        )
    return names


def _one_of(*choices: str, other: str = "", fits: Callable[[str], bool] = lambda _: False) -> Reader:
    expected = f"{', '.join(choices)}, or {other}" if other else " or ".join(choices)

    def read(name: str, value: str) -> str:
        if value not in choices and not fits(value):
            raise SettingsError(f"{name}: expected {expected}, found {value!r}")
        return value

    return read


_exit_code = _integer(3, 125)
_writer = _one_of("thread", "worker", other="the path of a keeper's socket", fits=lambda value: value.startswith("/"))
_cache = _one_of(
    COMPILATION_CACHE_OFF,
    COMPILATION_CACHE_ON,
    other="an absolute path or a URI such as gs://bucket/name",
    fits=lambda value: value.startswith(("/", "file:///", "gs://", "s3://")),
)


def setting(default: T, read: Reader, doc: str = "", *, variable: str = "") -> T:
    """Returns a field of ``Settings``.

    Args:
        default: The value if the variable is not set.
        read: Reads the variable's text.
        doc: What it is, where its name does not say that.
        variable: The variable. Empty: it has the name of the field.
    """
    return dataclasses.field(default=default, metadata={"read": read, "doc": doc, "variable": variable})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings. The field ``x`` is the variable ``GRACEPOINT_X``, if it names no other; None: it is not set.

    This is their one list: the names of the variables, the arguments of ``attach`` and the pages of the documentation
    are made from it or compared with it.
    """

    # Who this pod is.
    namespace: str | None = setting(None, _text)
    pod_name: str | None = setting(None, _text)
    pod_uid: str | None = setting(None, _text)
    node_name: str | None = setting(None, _text)
    jobset_name: str | None = setting(None, _text, "name of the JobSet, or of a Job by itself")
    jobset_uid: str | None = setting(None, _text, "its UID")
    restart_attempt: int = setting(0, _integer(0), "the JobSet's restarts when the pod was created")
    replicated_job: str | None = setting(None, _text, "not set in a Job by itself")
    job_index: int = setting(0, _integer(0))
    # Its place among the training processes.
    process_count: int | None = setting(None, _integer(1), "processes that train together")
    process_offset: int = setting(
        0, _integer(0), "of this replicatedJob: process id = offset + job index * pods per job + completion index"
    )
    pods_per_job: int | None = setting(None, _integer(1))
    min_processes: int = setting(
        0,
        _integer(1),
        "least number of processes with which the job may come back, if its size may change; 0: it may not",
    )
    completion_index: int | None = setting(
        None, _integer(0), "set by the Job controller", variable=ENV_JOB_COMPLETION_INDEX
    )
    coordinator_job: str | None = setting(
        None, _text, "replicatedJob of process 0, which listens at <jobset>-<this>-0-0.<subdomain>:<port>"
    )
    coordinator_port: int | None = setting(None, _integer(1, 65535))
    subdomain: str | None = setting(None, _text)
    # The channel.
    operator_url: str | None = setting(None, _https_url, "https://<service>.<namespace>.svc:<port>")
    ca_certificate: str | None = setting(None, _pem, "PEM of the authority that signs the operator's certificate")
    token_file: str = setting(TOKEN_FILE, _text)
    # What else is watched.
    metadata: tuple[str, ...] = setting(
        (), _clouds, "clouds whose metadata server is watched, with commas between, or auto"
    )
    gce_notice_s: float = setting(
        0.0, _number(0), "seconds of the instance's preemptionNoticeDuration, added to the usual notice; 0: it has none"
    )
    # The policy.
    policy: str | None = setting(None, _text, "name of the CheckpointPolicy")
    directory: str | None = setting(None, location, "path or URI below which the steps are kept")
    save_every_steps: int = setting(0, _integer(0), "0: no periodic saves by number of steps")
    save_every_s: float = setting(0.0, _number(0), "0: no periodic saves by time")
    save_interval: str = setting(
        SAVE_FIXED, _one_of(SAVE_FIXED, SAVE_AUTO), "auto: the operator suggests the seconds, and steps do not count"
    )
    keep_last: int = setting(3, _integer(1), "committed steps that are kept")
    keep_every_steps: int = setting(0, _integer(0), "0: no steps are kept for that reason")
    keep_for_s: float = setting(0.0, _number(0), "0: no steps are kept for that reason")
    tolerate_failures_s: float = setting(
        DEFAULT_TOLERATE_FAILURES_S, _number(0), "seconds for which periodic saves may fail; 0: not at all"
    )
    snapshot_every_steps: int = setting(0, _integer(0), "0: no snapshots by number of steps")
    snapshot_every_s: float = setting(0.0, _number(0), "0: no snapshots by time; at most one of both is above 0")
    snapshot_copies: int = setting(
        DEFAULT_SNAPSHOT_COPIES, _integer(1, 2), "in how many nodes' memory each part of a snapshot is"
    )
    writer: str | None = setting(
        None, _writer, "who writes saves: thread, worker, or the path of a keeper's socket; not set: thread"
    )
    host_memory_limit_bytes: int | None = setting(
        None, _integer(1), "for snapshots, in each process; not set: all that is free"
    )
    saved_exit_code: int = setting(DEFAULT_SAVED_EXIT_CODE, _exit_code)
    unsaved_exit_code: int = setting(DEFAULT_UNSAVED_EXIT_CODE, _exit_code)
    not_joined_exit_code: int = setting(DEFAULT_NOT_JOINED_EXIT_CODE, _exit_code)
    join_timeout_s: float = setting(
        0.0,
        _number(0),
        "seconds that a start waits for processes that are not there, and for storage that is away; 0: no limit",
    )
    grace_period_s: float = setting(
        30.0, _number(0, above=True), "seconds that the pod lives after a SIGTERM; the default is Kubernetes' own"
    )
    margin: float = setting(1.25, _number(1), "factor on predicted durations")
    head_start_s: float = setting(
        DEFAULT_HEAD_START_S, _number(0), "a save begins that many seconds before the deadline at the latest"
    )
    stall_after_s: float = setting(
        DEFAULT_STALL_AFTER_S, _number(0), "seconds without progress that count as a stall; 0: nothing is watched"
    )
    stall_action: str = setting(
        STALL_REPORT, _one_of(STALL_REPORT, STALL_RESTART), "report, or restart: the processes also exit"
    )
    compilation_cache: str | None = setting(
        None, _cache, "off, on, or the directory of compiled programs; not set: what JAX's own variables say"
    )
    compilation_cache_bytes: int | None = setting(None, _integer(1), "has no effect: JAX's cache deletes nothing")
    compilation_cache_days: int | None = setting(None, _integer(1), "has no effect")
    trace: str | None = setting(None, location, "folder in which each process writes where its time goes")

    def __post_init__(self) -> None:
        if self.snapshot_every_steps and self.snapshot_every_s:
            raise SettingsError(
                f"{Env.SNAPSHOT_EVERY_STEPS} and {Env.SNAPSHOT_EVERY_S}, or the arguments of attach(): expected one of "
                f"them above 0, found {self.snapshot_every_steps} and {self.snapshot_every_s:g}: leave one out"
            )

    @property
    def snapshots(self) -> bool:
        """Whether snapshots are sent to the memory of nodes."""
        return self.snapshot_every_steps > 0 or self.snapshot_every_s > 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Reads the settings.

        Raises:
            SettingsError: A ``GRACEPOINT_`` name is unknown, or a value cannot be read.
        """
        known_names = sorted(VARIABLES.values())
        unknown = sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in known_names)
        if unknown:
            meant = "".join(f"Did you mean {n}? " for n in difflib.get_close_matches(unknown[0], known_names, 1))
            raise SettingsError(
                f"{unknown[0]}: this version of gracepoint does not know this setting. {meant}Correct its spelling, "
                f"remove it, or install the operator's version in the image. Known: {', '.join(known_names)}"
            )
        # The downward API writes an empty text for a label that the pod does not have: empty means not set.
        texts = {field: environ.get(name, "") for field, name in VARIABLES.items()}
        return cls(**{field: _read(field, VARIABLES[field], text) for field, text in texts.items() if text != ""})

    def override(self, **values: Any) -> Self:
        """Returns a copy with the values that are not None. They are checked like those of the environment.

        Raises:
            SettingsError: A value is out of range.
        """
        overrides = {field: value for field, value in values.items() if value is not None}
        for field, value in overrides.items():
            if not isinstance(value, str | numbers.Number | os.PathLike):
                kind = type(value).__qualname__
                raise SettingsError(f"attach({field}=...): expected a text or a number, found a {kind}")
            overrides[field] = _read(field, f"attach({field}=...)", str(value))
        if any(overrides.get(field) for field in _SNAPSHOT_INTERVALS):  # it takes the place of the policy's, also of
            overrides = dict.fromkeys(_SNAPSHOT_INTERVALS, 0) | overrides  # one in the other unit
        return dataclasses.replace(self, **overrides)

    @property
    def process_id(self) -> int:
        """The id with which this pod joins the JAX cluster.

        Raises:
            SettingsError: A setting that it is computed from is missing, or the settings contradict each other.
        """
        count = self.required("process_count")
        if count == 1:
            return 0
        index = self.required("completion_index")
        process_id: int = self.process_offset + self.job_index * self.required("pods_per_job") + index
        if process_id >= count:
            raise SettingsError(
                f"{Env.PROCESS_COUNT}: expected more than this pod's process id, found {count} where offset "
                f"{self.process_offset}, job index {self.job_index}, {self.pods_per_job} pods a job and "
                f"completion index {index} give {process_id}. The job's size was changed without the policy's "
                f"spec.training.minProcesses, or while it ran; or these variables are set by hand: remove them"
            )
        return process_id

    @property
    def coordinator_address(self) -> str:
        """``host:port`` of process 0.

        Raises:
            SettingsError: A setting that it is computed from is missing.
        """
        if self.coordinator_job is None and self.replicated_job is None:
            # A Job by itself. Its pods have the host names <job>-<completion index>.
            pod = f"{self.required('jobset_name')}-0"
        else:
            pod = f"{self.required('jobset_name')}-{self.required('coordinator_job')}-0-0"
        return f"{pod}.{self.required('subdomain')}:{self.required('coordinator_port')}"

    def required(self, field: str, *, because: str | None = None) -> Any:
        """Returns the value of a field that must be set.

        Raises:
            SettingsError: It is not set.
        """
        value = getattr(self, field)
        if value is None:
            raise SettingsError(
                f"{VARIABLES[field]}: expected a value, as {because or self._gang_because()}, found none. In a cluster "
                f"the operator's webhook sets all {ENV_PREFIX} variables; do not set some of them by hand"
            )
        return value

    def _gang_because(self) -> str:
        return f"{Env.PROCESS_COUNT} is {self.process_count} and jax.distributed was not initialised before attach()"


_SNAPSHOT_INTERVALS = ("snapshot_every_steps", "snapshot_every_s")
#: Field -> environment variable.
VARIABLES = {
    field.name: field.metadata["variable"] or f"{ENV_PREFIX}{field.name.upper()}"
    for field in dataclasses.fields(Settings)
}


def _read(field: str, name: str, text: str) -> Any:
    return Settings.__dataclass_fields__[field].metadata["read"](name, text)
