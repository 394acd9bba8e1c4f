"""Checks the pod templates of a gang: time to save, storage, tolerations and probes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from gracepoint.wire.names import Env
from gracepoint_cli.lint.findings import Finding, Severity
from gracepoint_operator.kube.objects import Taint, Toleration
from gracepoint_operator.signals import BUILT_IN, GKE_SPOT_GRACE_S
from gracepoint_operator.webhooks.training_jobs import TrainingJob

Json = dict[str, Any]

#: A shorter grace period is pointed out: agreement, save and exit must fit into it.
_SHORT_GRACE_S = 30
#: Processes of a gang start together, so that the slowest image pull counts.
_STARTUP_S = 300
_GKE_SPOT = "cloud.google.com/gke-spot"


def findings(member: TrainingJob, path: str, claims: Mapping[str, Json]) -> Iterator[Finding]:
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
            what = f"every taint with effect {toleration.effect}" if toleration.effect else "every taint"
            yield Finding(
                Severity.WARNING,
                "catch-all-toleration",
                field,
                f"found a toleration of {what}. Taints that announce a disruption then mean nothing to the pod, and a "
                "restarted pod may go to the very node that goes away. Name the keys that the nodes of the job have",
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
                        "disruption. The pod is not told of it. Remove the toleration, or set tolerationSeconds",
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
