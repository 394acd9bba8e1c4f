"""How long a pod takes from its creation until its process runs: Kubernetes' own part of each start."""

from __future__ import annotations

import time
from pathlib import Path

import urllib3.exceptions
from kubernetes import client, config

from tests.testcluster.api import Cluster, ClusterError

_MOUNT = "/shared"
_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.01
_REQUEST_TIMEOUT_S = 10.0


def measure(cluster: Cluster, namespace: str, image: str, number: int) -> float:
    """Creates a pod that only writes down the time, and deletes it when it has.

    Args:
        cluster: Where. Nothing else should start there meanwhile.
        namespace: The pod's namespace.
        image: The image of the pod.
        number: Makes the pod's name unique.

    Returns:
        Seconds from just before the request that creates it until its process runs.

    Raises:
        ClusterError: The pod was not created, or did not run in time.
    """
    name = f"bare-{number}"
    folder = Path("output") / namespace / f"{name}-{time.time_ns()}"
    here = cluster.shared_dir / folder
    here.mkdir(parents=True)
    for each in (here, *list(here.parents)[:2]):
        each.chmod(0o777)  # the image's user is not root
    told = here / "unix_s"
    # A reader sees the file before or the whole of it.
    command = f"cd {_MOUNT}/{folder} && date +%s.%N > partial && mv partial {told.name}"
    pod = {
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "volumes": [{"name": "shared", "hostPath": {"path": str(cluster.shared_dir), "type": "Directory"}}],
            "containers": [
                {
                    "name": "trainer",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sh", "-c", command],
                    "resources": {"requests": {"cpu": "200m", "memory": "512Mi"}},
                    "volumeMounts": [{"name": "shared", "mountPath": _MOUNT}],
                }
            ],
        },
    }
    try:
        with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
            pods = client.CoreV1Api(connection)
            pods.list_namespaced_pod(namespace, _request_timeout=_REQUEST_TIMEOUT_S)  # the connection is open from here
            began_unix_s = time.time()
            pods.create_namespaced_pod(namespace, pod, _request_timeout=_REQUEST_TIMEOUT_S)
            while not told.exists():
                if time.time() - began_unix_s > _WITHIN_S:
                    raise ClusterError(f"the pod {name} of {namespace} did not run within {_WITHIN_S:.0f} s")
                time.sleep(_LOOK_EVERY_S)
            pods.delete_namespaced_pod(name, namespace, _request_timeout=_REQUEST_TIMEOUT_S)
    except (client.ApiException, urllib3.exceptions.HTTPError) as error:
        raise ClusterError(f"cannot create or delete the pod {name} of {namespace}: {error}") from error
    return float(told.read_text()) - began_unix_s
