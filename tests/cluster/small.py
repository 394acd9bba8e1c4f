"""JobSets of small containers that run a few lines of Python in place of training."""

from __future__ import annotations

import json

from demo.snapshot import Json
from gracepoint.wire.names import LABEL_POLICY
from tests.cluster.conftest import MARK, NAMESPACE
from tests.testcluster.api import Cluster

SLEEP = "import time; time.sleep(3600)"
JOBSETS = "jobsets.jobset.x-k8s.io"
#: What the API server says of an eviction that waits for a save.
OURS = "Gracepoint saves the JobSet"


def container(name: str, image: str, code: str, **fields: object) -> Json:
    """A container that runs Python code."""
    request = {"requests": {"cpu": "20m", "memory": "32Mi"}}
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", code],
        "resources": request,
        **fields,
    }


def replicated_job(name: str, train: Json, *, pods: int = 1, **pod: object) -> Json:
    """One Job of so many pods, which are killed a second after they were asked to end."""
    spec = {"terminationGracePeriodSeconds": 1, "containers": [train], **pod}
    return {
        "name": name,
        "template": {"spec": {"parallelism": pods, "completions": pods, "template": {"spec": spec}}},
    }


def jobset(name: str, *jobs: Json, policy: str | None, **spec: object) -> Json:
    """A JobSet in the tests' namespace; a name that ends in a dash is completed by the API server."""
    full = f"{name.rstrip('-')}-{MARK}"
    metadata: Json = {"generateName": f"{full}-"} if name.endswith("-") else {"name": full}
    metadata |= {"namespace": NAMESPACE, "labels": {LABEL_POLICY: policy} if policy else {}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"replicatedJobs": list(jobs), **spec},
    }


def create(cluster: Cluster, body: Json, *flags: str) -> tuple[Json, str]:
    """Creates an object; returns it as stored, and what kubectl said beside it.

    Raises:
        ClusterError: The API server refused it.
    """
    done = cluster.kubectl("create", "-f", "-", "--output=json", *flags, stdin=json.dumps(body))
    return json.loads(done.stdout), done.stderr


def get(cluster: Cluster, *what: str) -> Json:
    """An object or a list of the tests' namespace."""
    found: Json = json.loads(
        cluster.kubectl("get", *what, f"--namespace={NAMESPACE}", "--output=json").stdout,
    )
    return found


def evict(cluster: Cluster, name: str, *, options: Json | None = None, query: str = "") -> str:
    """What the API server says to an eviction; nothing: it is done."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "deleteOptions": options,
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction{query}"
    done = cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction), check=False)
    return done.stderr if done.returncode else ""
