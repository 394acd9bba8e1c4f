"""Features that are off by default, and are switched on where the chosen versions have them. Pure."""

from __future__ import annotations

from tests.testcluster import parts
from tests.testcluster.api import ClusterError

#: Of JobSet, with the first version that has them.
_OF_JOBSET = {"InPlaceRestart": (0, 11), "ElasticJobSet": (0, 12)}
#: Of the API server and the kubelets, with the versions in which they are there and off.
_OF_KUBERNETES = {"ContainerRestartRules": ((1, 34), (1, 34))}
#: The first Kubernetes whose feature RestartAllContainersOnContainerExits is on. JobSet's agent needs it as a sidecar.
_RESTARTS_ALL_CONTAINERS = (1, 36)


def of_jobset() -> tuple[str, ...]:
    """Features of JobSet's controller. None of a JobSet that is not built here, as kind may be given."""
    try:
        version = _version("jobset")
    except ClusterError:
        return ()
    return tuple(name for name, first in _OF_JOBSET.items() if version >= first)


def of_kubernetes() -> tuple[str, ...]:
    """Features of Kubernetes that those of JobSet need: none, if they are on by themselves."""
    if "InPlaceRestart" not in of_jobset():
        return ()
    version = _version("kubernetes")
    return tuple(name for name, (first, last) in _OF_KUBERNETES.items() if first <= version <= last)


def restarts_all_containers() -> bool:
    """Whether JobSet can restart all containers of a pod in place."""
    return "InPlaceRestart" in of_jobset() and _version("kubernetes") >= _RESTARTS_ALL_CONTAINERS


def _version(part: str) -> tuple[int, int]:
    major, minor, *_ = parts.part(part).version.removeprefix("v").split(".")
    return int(major), int(minor)
