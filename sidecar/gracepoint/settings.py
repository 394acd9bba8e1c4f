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
from typing import Any, Self

from gracepoint.errors import SettingsError
from gracepoint.wire.names import (
    COMPILATION_CACHE_OFF,
    COMPILATION_CACHE_ON,
    DEFAULT_COMPILATION_CACHE_BYTES,
    DEFAULT_COMPILATION_CACHE_DAYS,
    DEFAULT_HEAD_START_S,
    DEFAULT_SAVED_EXIT_CODE,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings. The field ``x`` is the variable ``GRACEPOINT_X``; None means that it is not set.

    The one exception is ``completion_index``.
    """

    # Who this pod is.
    namespace: str | None = None
    pod_name: str | None = None
    pod_uid: str | None = None
    node_name: str | None = None
    jobset_name: str | None = None
    jobset_uid: str | None = None
    restart_attempt: int = 0
    replicated_job: str | None = None
    job_index: int = 0
    # Its place among the training processes.
    process_count: int | None = None
    process_offset: int = 0
    pods_per_job: int | None = None
    min_processes: int = 0  # the least number of processes, if their number may change; 0: it may not
    completion_index: int | None = None  # the variable JOB_COMPLETION_INDEX, which the Job controller sets
    coordinator_job: str | None = None
    coordinator_port: int | None = None
    subdomain: str | None = None
    # The channel.
    operator_url: str | None = None
    ca_certificate: str | None = None  # PEM
    token_file: str = TOKEN_FILE
    # What else is watched.
    metadata: tuple[str, ...] = ()  # some of METADATA_CLOUDS, or METADATA_AUTO alone
    gce_notice_s: float = 0.0  # the instance's preemptionNoticeDuration, added to the usual notice; 0: it has none
    # The policy.
    policy: str | None = None
    directory: str | None = None
    save_every_steps: int = 0  # 0: no periodic saves by number of steps
    save_every_s: float = 0.0  # 0: no periodic saves by time
    save_interval: str = SAVE_FIXED  # SAVE_AUTO: the operator suggests the seconds, and steps do not count
    keep_last: int = 3
    keep_every_steps: int = 0  # 0: no steps are kept for that reason
    keep_for_s: float = 0.0  # 0: no steps are kept for that reason
    tolerate_failures_s: float = DEFAULT_TOLERATE_FAILURES_S  # for which periodic saves may fail; 0: not at all
    writer: str | None = None  # who writes saves: thread, worker, or the path of a keeper's socket; None: thread
    host_memory_limit_bytes: int | None = None  # for snapshots, in each process; None: all that is free
    saved_exit_code: int = DEFAULT_SAVED_EXIT_CODE
    unsaved_exit_code: int = DEFAULT_UNSAVED_EXIT_CODE
    grace_period_s: float = 30.0  # Kubernetes' own default
    margin: float = 1.25
    head_start_s: float = DEFAULT_HEAD_START_S  # a save begins that long before the deadline at the latest
    stall_after_s: float = DEFAULT_STALL_AFTER_S  # 0: nothing is watched
    stall_action: str = STALL_REPORT
    compilation_cache: str | None = None  # off, on, or the directory of compiled programs; None: off
    compilation_cache_bytes: int = DEFAULT_COMPILATION_CACHE_BYTES  # of all compiled programs together
    compilation_cache_days: int = DEFAULT_COMPILATION_CACHE_DAYS  # a program unused for so long is deleted
    trace: str | None = None  # path of the folder in which each process writes where its time goes

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Reads the settings.

        Raises:
            SettingsError: A ``GRACEPOINT_`` name is unknown, or a value cannot be read.
        """
        unknown = sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in _READERS)
        if unknown:
            meant = "".join(f"Did you mean {n}? " for n in difflib.get_close_matches(unknown[0], _READERS, 1))
            raise SettingsError(
                f"{unknown[0]}: this version of gracepoint does not know this setting. {meant}Correct its spelling, "
                f"remove it, or install the operator's version in the image. Known: {', '.join(sorted(_READERS))}"
            )
        # The downward API writes an empty text for a label that the pod does not have: empty means not set.
        found = {
            field: reader(name, environ[name])
            for name, (field, reader) in _READERS.items()
            if environ.get(name, "") != ""
        }
        return cls(**found)

    def override(self, **values: Any) -> Self:
        """Returns a copy with the values that are not None. They are checked like those of the environment.

        Raises:
            SettingsError: A value is out of range.
        """
        given = {field: value for field, value in values.items() if value is not None}
        for field, value in given.items():
            if not isinstance(value, str | numbers.Number | os.PathLike):
                kind = type(value).__qualname__
                raise SettingsError(f"attach({field}=...): expected a text or a number, found a {kind}")
            reader = _BY_FIELD[field]
            given[field] = reader(f"attach({field}=...)", str(value))
        return dataclasses.replace(self, **given)

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
    if found := _VARIABLE.search(value):
        raise SettingsError(
            f"{name}: found {value!r}, where {found.group()} is not replaced: write what it stands for, in Python with "
            f"os.path.expandvars(...)"
        )
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise SettingsError(f"{name}: found {value!r}, and no such user has a home folder here: write the whole path")
    return expanded


def _integer(low: int, high: int | None = None) -> Reader:
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def read(name: str, value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise SettingsError(f"{name}: expected {wanted}, found {value!r}")
        return number

    return read


def _number(low: float, *, above: bool = False) -> Reader:
    wanted = f"a number {'above' if above else 'of at least'} {low:g}"

    def read(name: str, value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < low or (above and number == low):
            raise SettingsError(f"{name}: expected {wanted}, found {value!r}")
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
    found = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
    if found != (METADATA_AUTO,) and not set(found) <= set(METADATA_CLOUDS):
        raise SettingsError(
            f"{name}: expected {METADATA_AUTO}, or some of {', '.join(METADATA_CLOUDS)} with commas between, "
            f"found {value!r}"
        )
    return found


def _one_of(*words: str, other: str = "", fits: Callable[[str], bool] = lambda _: False) -> Reader:
    wanted = f"{', '.join(words)}, or {other}" if other else " or ".join(words)

    def read(name: str, value: str) -> str:
        if value not in words and not fits(value):
            raise SettingsError(f"{name}: expected {wanted}, found {value!r}")
        return value

    return read


_exit_code = _integer(3, 125)
_writer = _one_of("thread", "worker", other="the path of a keeper's socket", fits=lambda value: value.startswith("/"))
_cache = _one_of(
    COMPILATION_CACHE_OFF,
    COMPILATION_CACHE_ON,
    other="an absolute path or a URI such as gs://bucket/name",
    fits=lambda value: value.startswith("/") or "://" in value,
)

#: Environment variable -> (field, function that reads its text).
_READERS: dict[str, tuple[str, Reader]] = {
    Env.NAMESPACE: ("namespace", _text),
    Env.POD_NAME: ("pod_name", _text),
    Env.POD_UID: ("pod_uid", _text),
    Env.NODE_NAME: ("node_name", _text),
    Env.JOBSET_NAME: ("jobset_name", _text),
    Env.JOBSET_UID: ("jobset_uid", _text),
    Env.RESTART_ATTEMPT: ("restart_attempt", _integer(0)),
    Env.REPLICATED_JOB: ("replicated_job", _text),
    Env.JOB_INDEX: ("job_index", _integer(0)),
    Env.PROCESS_COUNT: ("process_count", _integer(1)),
    Env.PROCESS_OFFSET: ("process_offset", _integer(0)),
    Env.PODS_PER_JOB: ("pods_per_job", _integer(1)),
    Env.MIN_PROCESSES: ("min_processes", _integer(1)),
    ENV_JOB_COMPLETION_INDEX: ("completion_index", _integer(0)),
    Env.COORDINATOR_JOB: ("coordinator_job", _text),
    Env.COORDINATOR_PORT: ("coordinator_port", _integer(1, 65535)),
    Env.SUBDOMAIN: ("subdomain", _text),
    Env.OPERATOR_URL: ("operator_url", _https_url),
    Env.CA_CERTIFICATE: ("ca_certificate", _pem),
    Env.TOKEN_FILE: ("token_file", _text),
    Env.METADATA: ("metadata", _clouds),
    Env.GCE_NOTICE_S: ("gce_notice_s", _number(0)),
    Env.POLICY: ("policy", _text),
    Env.DIRECTORY: ("directory", location),
    Env.SAVE_EVERY_STEPS: ("save_every_steps", _integer(0)),
    Env.SAVE_EVERY_S: ("save_every_s", _number(0)),
    Env.SAVE_INTERVAL: ("save_interval", _one_of(SAVE_FIXED, SAVE_AUTO)),
    Env.KEEP_LAST: ("keep_last", _integer(1)),
    Env.KEEP_EVERY_STEPS: ("keep_every_steps", _integer(0)),
    Env.KEEP_FOR_S: ("keep_for_s", _number(0)),
    Env.TOLERATE_FAILURES_S: ("tolerate_failures_s", _number(0)),
    Env.WRITER: ("writer", _writer),
    Env.HOST_MEMORY_LIMIT_BYTES: ("host_memory_limit_bytes", _integer(1)),
    Env.SAVED_EXIT_CODE: ("saved_exit_code", _exit_code),
    Env.UNSAVED_EXIT_CODE: ("unsaved_exit_code", _exit_code),
    Env.GRACE_PERIOD_S: ("grace_period_s", _number(0, above=True)),
    Env.MARGIN: ("margin", _number(1)),
    Env.HEAD_START_S: ("head_start_s", _number(0)),
    Env.STALL_AFTER_S: ("stall_after_s", _number(0)),
    Env.STALL_ACTION: ("stall_action", _one_of(STALL_REPORT, STALL_RESTART)),
    Env.COMPILATION_CACHE: ("compilation_cache", _cache),
    Env.COMPILATION_CACHE_BYTES: ("compilation_cache_bytes", _integer(1)),
    Env.COMPILATION_CACHE_DAYS: ("compilation_cache_days", _integer(1)),
    Env.TRACE: ("trace", location),
}
#: Field -> environment variable.
VARIABLES = {field: name for name, (field, _) in _READERS.items()}
_BY_FIELD = dict(_READERS.values())
