"""Checks the pod templates of a gang: time to save, storage, tolerations, probes, and what the program does. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from gracepoint.wire.names import ENV_JAX_CACHE_DIR, Env
from gracepoint_operator.kube.objects import Taint, Toleration
from gracepoint_operator.signals import BUILT_IN, GKE_SPOT_GRACE_S
from gracepoint_operator.webhooks.training_jobs import TrainingJob


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # the workload is refused, or loses its work
    WARNING = "warning"  # a preemption may cost more than it must
    INFO = "info"  # good to know


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        rule: Name of the rule, which does not change between versions.
        path: The field, as a path from the object's top. Empty if it is about the whole object.
        message: What was found, why that matters, and what to do.
    """

    severity: Severity
    rule: str
    path: str
    message: str

    def to_json(self) -> dict[str, str]:
        """Returns the finding as JSON."""
        return {"severity": str(self.severity), "rule": self.rule, "path": self.path, "message": self.message}


Json = dict[str, Any]

#: A shorter grace period is pointed out: agreement, save and exit must fit into it.
_SHORT_GRACE_S = 30
#: Processes of a gang start together, so that the slowest image pull counts.
_STARTUP_S = 300
_GKE_SPOT = "cloud.google.com/gke-spot"
#: Scheme of a bucket -> what JAX's persistent cache needs for it.
_BUCKET_PACKAGES = {"gs": "etils[epath-gcs]", "s3": "etils[epath-s3]"}


def pod_findings(member: TrainingJob, path: str, claims: Mapping[str, Json]) -> Iterator[Finding]:
    """Checks one pod template.

    Args:
        member: The replicatedJob of the gang, or the Job, with everything that the operator fills in.
        path: Where the pod's spec is in the object.
        claims: The PersistentVolumeClaims that are known, by name.
    """
    pod = member.template["spec"]
    container_path = f"{path}.containers[{member.container['name']}]"
    yield from _grace(pod, path)
    yield from _hooks_and_probes(member.container, container_path)
    yield from _tolerations(pod, path)
    yield from _volumes(member, path, claims)
    yield from _compiled_programs(member.container, container_path)


def _grace(pod: Json, path: str) -> Iterator[Finding]:
    grace_s = int(pod["terminationGracePeriodSeconds"])
    field = f"{path}.terminationGracePeriodSeconds"
    if grace_s < _SHORT_GRACE_S:
        yield Finding(
            Severity.WARNING,
            "short-grace-period",
            field,
            f"found {grace_s}: if no notice comes before SIGTERM, agreement, save and exit must fit into it. "
            "Raise it to more than a save takes (kubectl gracepoint status shows it)",
        )
    if _GKE_SPOT in (pod.get("nodeSelector") or {}) and grace_s > GKE_SPOT_GRACE_S:
        yield Finding(
            Severity.INFO,
            "spot-grace-period",
            field,
            f"found {grace_s}; GKE gives pods on Spot nodes {GKE_SPOT_GRACE_S:g} s at most. A save must fit into that",
        )


def _hooks_and_probes(container: Json, path: str) -> Iterator[Finding]:
    if (container.get("lifecycle") or {}).get("preStop"):
        yield Finding(
            Severity.WARNING,
            "pre-stop-hook",
            f"{path}.lifecycle.preStop",
            "found a hook: SIGTERM comes after it has ended, and the grace period counts from its begin. Remove it, or "
            "keep it short",
        )
    if probe := container.get("livenessProbe"):
        seconds = int(probe.get("periodSeconds") or 10) * int(probe.get("failureThreshold") or 3)
        yield Finding(
            Severity.WARNING,
            "liveness-probe",
            f"{path}.livenessProbe",
            f"found a probe that kills the container after {seconds} s without an answer. A process that saves, or "
            "waits for "
            "the others, may be silent that long. Remove it: a process that ends is seen without it",
        )
    if probe := container.get("startupProbe"):
        seconds = int(probe.get("periodSeconds") or 10) * int(probe.get("failureThreshold") or 3)
        seconds += int(probe.get("initialDelaySeconds") or 0)
        if seconds < _STARTUP_S:
            yield Finding(
                Severity.WARNING,
                "startup-probe",
                f"{path}.startupProbe",
                f"found a probe that kills the container {seconds} s after its start. attach() waits for the slowest "
                "pod of "
                f"the gang, whose image may still be pulled. Allow {_STARTUP_S} s or more",
            )


def _tolerations(pod: Json, path: str) -> Iterator[Finding]:
    for index, item in enumerate(pod.get("tolerations") or ()):
        field = f"{path}.tolerations[{index}]"
        toleration = Toleration(
            key=str(item.get("key") or ""),
            operator=str(item.get("operator") or "Equal"),
            value=str(item.get("value") or ""),
            effect=str(item.get("effect") or ""),
            seconds=item.get("tolerationSeconds"),
        )
        if toleration.seconds is not None:
            continue
        if not toleration.key and toleration.operator == "Exists":
            taints = f"every taint with effect {toleration.effect}" if toleration.effect else "every taint"
            yield Finding(
                Severity.WARNING,
                "catch-all-toleration",
                field,
                f"found a toleration of {taints}. Taints that announce a disruption then mean nothing to the pod, and "
                "a restarted pod may go to the very node that goes away. Name the keys that the nodes of the job have",
            )
            continue
        for row in BUILT_IN:
            match = row.match.taint
            if row.tolerable and match is not None and match.key == toleration.key:
                taint = Taint(match.key, match.value or toleration.value, match.effect or toleration.effect, None)
                if toleration.tolerates(taint):
                    yield Finding(
                        Severity.WARNING,
                        "tolerated-signal",
                        field,
                        f"found a toleration of {match.key}, by which the signal {row.name} ({row.cause}) announces a "
                        "disruption. The pod gets no notice of it. Remove the toleration, or set tolerationSeconds",
                    )


def _volumes(member: TrainingJob, path: str, claims: Mapping[str, Json]) -> Iterator[Finding]:
    """Checks whether all pods see the same files where checkpoints are saved."""
    pod, container = member.template["spec"], member.container
    directory = next((str(v.get("value")) for v in container.get("env") or () if v.get("name") == Env.DIRECTORY), "")
    fixed = directory.removeprefix("file://").partition("$(")[0]
    if not fixed.startswith("/"):
        return
    place = PurePosixPath(fixed)
    mounts = [m for m in container.get("volumeMounts") or () if place.is_relative_to(str(m.get("mountPath") or "."))]
    if not mounts:
        return  # the checks at creation say so
    mount = max(mounts, key=lambda item: len(PurePosixPath(item["mountPath"]).parts))
    volumes = {str(volume.get("name")): volume for volume in pod.get("volumes") or ()}
    volume = volumes.get(str(mount.get("name")), {})
    field = f"{path}.volumes[{mount.get('name')}]"
    if "hostPath" in volume:
        yield Finding(
            Severity.WARNING,
            "volume-of-the-node",
            field,
            "found a hostPath where checkpoints are saved. On another node it is another folder, unless every node "
            "mounts "
            "the same file system there. Use a volume with ReadWriteMany",
        )
    elif "ephemeral" in volume:
        yield Finding(
            Severity.ERROR,
            "volume-not-shared",
            field,
            "found an ephemeral volume where checkpoints are saved: each pod has its own, and it is deleted with the "
            "pod. "
            "Use a volume with ReadWriteMany",
        )
    elif name := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
        yield from _claim(str(name), claims, field)


def _compiled_programs(container: Json, path: str) -> Iterator[Finding]:
    """Says what JAX needs in the image to keep compiled programs in a bucket."""
    where = next((str(v.get("value")) for v in container.get("env") or () if v.get("name") == ENV_JAX_CACHE_DIR), "")
    scheme, is_uri, _ = where.partition("://")
    if is_uri and scheme != "file":
        package = _BUCKET_PACKAGES.get(scheme, "etils[epath] and the one of fsspec for this kind of store")
        yield Finding(
            Severity.INFO,
            "programs-in-bucket",
            f"{path}.env[{ENV_JAX_CACHE_DIR}]",
            f"found {where}: to keep compiled programs there, JAX needs the Python package {package} in the image. "
            "Without it JAX logs a warning, and compiles at each start",
        )


def _claim(name: str, claims: Mapping[str, Json], field: str) -> Iterator[Finding]:
    if name not in claims:
        yield Finding(
            Severity.INFO,
            "claim-not-seen",
            field,
            f"the PersistentVolumeClaim {name!r} was not found. All pods of the job must be able to mount it at once "
            "(accessModes: [ReadWriteMany])",
        )
        return
    modes = (claims[name].get("spec") or {}).get("accessModes") or []
    if "ReadWriteMany" not in modes:
        yield Finding(
            Severity.ERROR,
            "volume-not-shared",
            field,
            f"the PersistentVolumeClaim {name!r} has accessModes {modes}, expected ReadWriteMany: pods on other "
            "nodes cannot "
            "mount it, and a restarted job would wait for ever",
        )


_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_WORKERS = re.compile(r"--?[\w.-]*(?:num[_-]?workers|worker[_-]?count|workers)[=\s]+([1-9]\d*)", re.IGNORECASE)
#: ``kill 0``, ``kill -TERM -$$``, ``kill -- -1``: what signals a process group.
_KILLS_GROUP = re.compile(
    r"\bkill\s+(?:(?:-s\s+\w+|-(?:SIG)?[A-Z]\w*|-\d+)\s+)?(?:--\s+)?(?:0\b|[\"']?-\$)"
    r"|\bkill\s+(?:-s\s+\w+|-\w+|--)\s+-\d+"
)
#: Flags of programs that start another one, if a value follows them.
_WITH_VALUE = {
    "tini": ("-p", "-e"),
    "docker-init": ("-p", "-e"),
    "dumb-init": ("-r", "--rewrite"),
    "timeout": ("-k", "-s"),
}
#: The variable that is the same as tini's flag -g, whatever its value.
_TINI_GROUP = "TINI_KILL_PROCESS_GROUP"
_PIPE = re.compile(r"(?<![|>])\|(?![|&])")


def process_findings(container: Json, path: str) -> Iterator[Finding]:
    """Checks what the command of a training container does with SIGTERM and with the exit code.

    The kubelet sends SIGTERM to the container's first process alone. The library must get it there, and its exit code
    must be that of the container. Processes that load data must live until the save is done.

    Args:
        container: The container.
        path: Where it is in the object.
    """
    arguments = [str(item) for item in (*(container.get("command") or ()), *(container.get("args") or ()))]
    yield from _stop_signal(container, path)
    if not arguments:
        return
    variables = {str(v.get("name")): str(v.get("value") or "") for v in container.get("env") or ()}
    rest, group = _without_init(arguments, variables)
    script = _script(rest)
    if script is not None and not group:
        for command in re.findall(r"\bexec\s+(.+)", script):
            group = group or _without_init(command.split(), variables)[1]
    if not group and (match := _KILLS_GROUP.search(" ".join(arguments))):
        group = repr(match[0])
    if group:
        yield Finding(
            Severity.WARNING,
            "signal-to-group",
            f"{path}.command",
            f"found {group}, which sends SIGTERM to every process of the group. Workers that load data die at once, "
            "and the training needs them until the step that all processes agree on. Use tini without -g, dumb-init "
            "with --single-child or timeout with --foreground, or have the workers call "
            "gracepoint.leave_process_group() first",
        )
    if not container.get("command"):
        return  # the image's entry point comes before these arguments
    if script is not None:
        yield from _of_script(script, f"{path}.command")
    elif rest and rest[0].endswith(".sh"):
        yield Finding(
            Severity.INFO,
            "script-as-first-process",
            f"{path}.command",
            f"found the script {rest[0]}, which cannot be read here. A shell does not pass SIGTERM on: its last line "
            "must "
            "be `exec python ...`",
        )
    if workers := _WORKERS.search(" ".join(arguments)):
        yield Finding(
            Severity.INFO,
            "data-workers",
            f"{path}.args",
            f"found {workers[1]} worker processes. They must live until the save is done: they must not end on SIGTERM "
            "before the training process closes them, and nothing may kill the process group",
        )


def _stop_signal(container: Json, path: str) -> Iterator[Finding]:
    stop = str((container.get("lifecycle") or {}).get("stopSignal") or "SIGTERM")
    if stop not in ("SIGTERM", "SIGHUP"):
        yield Finding(
            Severity.WARNING,
            "stop-signal",
            f"{path}.lifecycle.stopSignal",
            f"found {stop}, which the library does not take for a notice: if no other notice comes, nothing is saved. "
            "Remove it: SIGTERM is the default, unless the image has another STOPSIGNAL",
        )


def _without_init(command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], str]:
    """Returns the command behind init programs, and the first of them that sends SIGTERM to the group.

    Args:
        command: The command.
        variables: The variables of the container.
    """
    rest, group = list(command), ""
    while rest:
        behind, session_group = _without_one(rest, variables)
        group = group or session_group
        if behind is None:
            break
        rest = behind
    return rest, group


def _without_one(command: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str] | None, str]:
    """As ``_without_init`` for the first program. None, if that is no such program."""
    name = PurePosixPath(command[0]).name
    if name not in ("tini", "dumb-init", "docker-init", "timeout"):
        return None, ""
    flags = []
    rest = list(command[1:])
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag == "--":
            break
        flags.append(flag)
        if flag in _WITH_VALUE.get(name, ()) and rest:
            rest.pop(0)
    if name == "timeout":
        return rest[1:], "" if {"-f", "--foreground"} & set(flags) else "timeout without --foreground"
    if name == "dumb-init":
        alone = {"-c", "--single-child"} & set(flags) or variables.get("DUMB_INIT_SETSID") == "0"
        return rest, "" if alone else "dumb-init without --single-child"
    if _TINI_GROUP in variables:
        return rest, _TINI_GROUP
    # A flag with a value, such as -p SIGTERM or -e 143, is not one of several letters.
    return rest, f"{name} -g" if any(re.fullmatch(r"-[a-z]*g[a-z]*", flag) for flag in flags) else ""


def _script(command: Sequence[str]) -> str | None:
    """Returns the script of ``sh -c SCRIPT``. None if the command has another form."""
    if not command or PurePosixPath(command[0]).name not in _SHELLS:
        return None
    for flag, script in itertools.pairwise(command[1:]):
        if re.fullmatch(r"-[a-z]*c[a-z]*", flag):
            return script
    return None


def _of_script(script: str, path: str) -> Iterator[Finding]:
    lines = [line.strip() for line in re.split(r"[\n;]|&&", script.replace("\\\n", " ")) if line.strip()]
    last_line = lines[-1] if lines else ""
    if _PIPE.search(last_line):
        if "pipefail" not in script:
            yield Finding(
                Severity.ERROR,
                "exit-code-lost",
                path,
                f"found a pipe, {_short(last_line)!r}: the container ends with the exit code of its last program, so "
                "that nobody sees that the work was saved, and the job fails. Write the log in the program, or "
                "redirect it",
            )
        yield _shell(Severity.WARNING, path, last_line)
    elif last_line.startswith("exec "):
        return
    elif re.search(r"\btrap\b", script):
        yield Finding(
            Severity.INFO,
            "shell-with-trap",
            path,
            "found a shell with a trap as the first process. It must pass SIGTERM on to the training process, wait "
            "for it, "
            "and end with its exit code. `exec python ...` does all three",
        )
    else:
        yield _shell(Severity.WARNING, path, last_line)


def _shell(severity: Severity, path: str, last_line: str) -> Finding:
    return Finding(
        severity,
        "shell-as-first-process",
        path,
        "found a shell as the first process, which does not pass SIGTERM on: if no notice came before, nothing is "
        "saved. "
        f"Write `exec {_short(last_line)}` in its last line, or put the program itself into command",
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
