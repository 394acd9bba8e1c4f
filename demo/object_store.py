"""An object store in the cluster, for jobs whose checkpoints go to ``gs://`` or ``s3://``.

It is one of the servers of ``tests.object_stores`` as a Deployment with a Service. It is for the local cluster: its
program and its buckets lie in the folder that all nodes share. Trainers get credentials from a Secret and the endpoint
from the policy, as users of a store of their own do. Starts no thread and no process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Mapping

from demo.snapshot import Json
from tests.object_stores.servers import REGION
from tests.testcluster import images, parts
from tests.testcluster.api import Cluster
from tests.testcluster.waiting import wait_for_rollout

BUCKET = "checkpoints"
SCHEMES = ("gs", "s3")
_PROGRAMS = {"gs": "fake-gcs-server", "s3": "versitygw"}
_PORT = 9000
_PLACE = "object-stores"
_ROLE = "node-role.kubernetes.io/control-plane"


@dataclasses.dataclass(frozen=True)
class ObjectStore:
    """A store that runs in a cluster.

    Attributes:
        scheme: ``gs`` or ``s3``.
        namespace: Of the store, and of its users.
    """

    scheme: str
    namespace: str

    @property
    def name(self) -> str:
        """Of the Deployment, the Service and the Secret."""
        return f"store-{self.scheme}"

    def change_policy(self, spec: Json) -> None:
        """Lets a policy's spec send checkpoints there."""
        spec["checkpoint"]["directory"] = f"{self.scheme}://{BUCKET}/{{namespace}}/{{jobset}}"
        spec["checkpoint"]["objectStore"] = {"endpoint": f"http://{self.name}.{self.namespace}:{_PORT}"}
        if self.scheme == "s3":
            spec["checkpoint"]["objectStore"]["region"] = REGION

    def change_jobset(self, jobset: Json) -> None:
        """Gives the trainers of a JobSet the credentials."""
        for job in jobset["spec"]["replicatedJobs"]:
            for container in job["template"]["spec"]["template"]["spec"]["containers"]:
                container["envFrom"] = [{"secretRef": {"name": self.name}}]


def run_store(cluster: Cluster, scheme: str, namespace: str) -> ObjectStore:
    """Starts a store, and waits until it serves.

    Args:
        cluster: Where.
        scheme: ``gs`` or ``s3``.
        namespace: Where it and its users are; it exists.

    Raises:
        ClusterError: It was not ready in time.
    """
    store = ObjectStore(scheme, namespace)
    _put_files(cluster, store)
    items = [_secret(store), _service(store), _deployment(store, str(cluster.shared_dir))]
    manifest = {"apiVersion": "v1", "kind": "List", "items": items}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    wait_for_rollout(cluster, f"deployment/{store.name}", namespace=namespace, timeout_s=60)
    return store


def _put_files(cluster: Cluster, store: ObjectStore) -> None:
    """Puts the program into the shared folder, and an empty bucket, which is a folder to both servers."""
    place = cluster.shared_dir / _PLACE
    place.mkdir(exist_ok=True)
    program = _PROGRAMS[store.scheme]
    scratch = place / f".{program}.{os.getpid()}"
    shutil.copyfile(parts.program(program), scratch)
    scratch.chmod(0o755)
    scratch.rename(place / program)
    for folder in (place / store.name, place / store.name / "buckets", place / store.name / "buckets" / BUCKET):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)  # the pod is not root
    (metadata := place / store.name / "metadata").mkdir(exist_ok=True)
    metadata.chmod(0o777)


def _credentials(scheme: str) -> Mapping[str, str]:
    if scheme == "gs":
        return {"GOOGLE_AUTH_TOKEN_FOR_TESTING": secrets.token_hex(16)}
    return {"AWS_ACCESS_KEY_ID": f"demo{secrets.token_hex(4)}", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}


def _command(store: ObjectStore) -> list[str]:
    program, place = f"/shared/{_PLACE}/{_PROGRAMS[store.scheme]}", f"/shared/{_PLACE}/{store.name}"
    if store.scheme == "gs":
        where = ["-scheme=http", "-host=0.0.0.0", f"-port={_PORT}", "-log-level=error"]
        return [program, *where, "-backend=memory", f"-data={place}/buckets"]
    where = [f"--port=:{_PORT}", f"--region={REGION}", "--health=/health", "--quiet", "--keep-alive"]
    return [program, *where, "posix", f"--sidecar={place}/metadata", f"{place}/buckets"]


def _environment(store: ObjectStore) -> list[Json]:
    """What the server takes the credentials from."""
    if store.scheme == "gs":
        return []
    keys = {"ROOT_ACCESS_KEY": "AWS_ACCESS_KEY_ID", "ROOT_SECRET_KEY": "AWS_SECRET_ACCESS_KEY"}
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": store.name, "key": key}}} for name, key in keys.items()
    ]


def _secret(store: ObjectStore) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": store.name, "namespace": store.namespace},
        "stringData": dict(_credentials(store.scheme)),
    }


def _service(store: ObjectStore) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": store.name, "namespace": store.namespace},
        "spec": {"selector": {"app": store.name}, "ports": [{"port": _PORT}]},
    }


def _deployment(store: ObjectStore, shared: str) -> Json:
    health = "/_internal/healthcheck" if store.scheme == "gs" else "/health"
    container = {
        "name": "store",
        # Any image does: the program needs no files but its own.
        "image": images.PAUSE,
        "imagePullPolicy": "IfNotPresent",
        "command": _command(store),
        "env": _environment(store),
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": health, "port": _PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
    }
    # Not on a node that the demo takes away, if there is another one.
    preferred = {"weight": 1, "preference": {"matchExpressions": [{"key": _ROLE, "operator": "Exists"}]}}
    pod = {
        "containers": [container],
        "volumes": [{"name": "shared", "hostPath": {"path": shared, "type": "Directory"}}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}},
        "tolerations": [{"key": _ROLE, "operator": "Exists"}],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": store.name, "namespace": store.namespace},
        "spec": {
            # Two could not share a folder.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app": store.name}},
            "template": {"metadata": {"labels": {"app": store.name}}, "spec": pod},
        },
    }
