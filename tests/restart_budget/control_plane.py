"""A control plane with everything that decides whether a restart counts, and a substitute for its kubelets.

Processes: the API server and etcd, kube-controller-manager, kube-scheduler, JobSet's controller and the operator, each
in a process group of its own, until ``open_control_plane`` ends. Threads: the kubelets' one, which alone writes what it
has seen; ``open_control_plane`` ends it. Requests are made in the threads of the callers, each over its own connection.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import functools
import http.client
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gracepoint_operator.kube.objects import format_time
from tests.api_server.components import component
from tests.api_server.programs import running
from tests.api_server.releases import Release
from tests.ports import held_ports
from tests.testcluster import features, parts, pki
from tests.testcluster.api_server import ApiServer, open_api_server, why_not
from tests.testcluster.shell import run, wait_until

Json = dict[str, Any]

_ROOT = Path(__file__).parents[2]
#: Those on which the fate of a pod, a Job or a quota depends.
_CONTROLLERS = (
    "job-controller",
    "daemonset-controller",  # that of taints uses its index of pods by node
    "garbage-collector-controller",
    "pod-garbage-collector-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
    "taint-eviction-controller",
)
#: Pods of a node that does not answer are deleted so much later. The API server's default is 300 s.
UNREACHABLE_S = 1
_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.2
#: How long containers take to end after SIGTERM.
_STOPS_AFTER_S = 2.0
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"


class Refused(Exception):
    """The API server refused a request.

    Attributes:
        status: Its HTTP status.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Api:
    """Requests to the API server, as JSON, by any thread."""

    def __init__(self, server: ApiServer) -> None:
        self._server = urllib.parse.urlsplit(server.url)
        self._token = server.token
        self._context = ssl.create_default_context(cafile=str(server.ca))

    def get(self, path: str) -> Json:
        return self._ask("GET", path)

    def items(self, path: str) -> list[Json]:
        """The objects of a list, as the API server's own cache has them."""
        found: list[Json] = self.get(f"{path}?resourceVersion=0").get("items") or []
        return found

    def create(self, path: str, body: Json) -> Json:
        return self._ask("POST", path, body)

    def merge(self, path: str, body: Json) -> Json:
        return self._ask("PATCH", path, body, _MERGE)

    def set_status(self, path: str, status: Json) -> Json:
        """Changes the status of a node or pod. Conditions of other types stay."""
        return self._ask("PATCH", f"{path}/status", {"status": status}, _STRATEGIC)

    def delete(self, path: str, *, uid: str = "", grace_s: int | None = None) -> None:
        """Deletes an object if it is there, and is that one."""
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        options |= {"preconditions": {"uid": uid}} if uid else {}
        options |= {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        with _unless_gone():
            self._ask("DELETE", path, options)

    def _ask(self, method: str, path: str, body: Json | None = None, content_type: str = "application/json") -> Json:
        host, port = self._server.hostname, self._server.port
        connection = http.client.HTTPSConnection(str(host), port, timeout=_TIMEOUT_S, context=self._context)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 400:
            raise Refused(answer.status, text)
        found: Json = json.loads(text)
        return found


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Lets an object be gone, or be another one by now."""
    try:
        yield
    except Refused as refused:
        if refused.status not in (404, 409):
            raise


def now() -> str:
    """The time as Kubernetes writes it."""
    return format_time(time.time())


#: What a kubelet makes of a new pod: a status, or None for one that it leaves as it is.
Start = Callable[[Json], Json | None]


def is_running(pod: Json) -> Json:
    """The status of a pod whose containers run."""
    at = now()
    conditions = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
    state = {"running": {"startedAt": at}}
    return {
        "phase": "Running",
        "startTime": at,
        "conditions": [{"type": name, "status": "True", "lastTransitionTime": at} for name in conditions],
        "containerStatuses": [_container(spec, state, ready=True) for spec in pod["spec"]["containers"]],
    }


def is_ended(
    pod: Json, code: int, why: str = "Error", *, conditions: Sequence[Json] = (), status: Json | None = None
) -> Json:
    """The status of a pod whose containers have ended with that code.

    Args:
        pod: The pod.
        code: The exit code.
        why: The reason in the states of the containers.
        conditions: More conditions of the pod.
        status: More fields of its status.
    """
    at = now()
    state = {"terminated": {"exitCode": code, "reason": why, "startedAt": at, "finishedAt": at}}
    unready = [
        {"type": name, "status": "False", "reason": "PodFailed", "lastTransitionTime": at}
        for name in ("ContainersReady", "Ready")
    ]
    return {
        "phase": "Failed" if code else "Succeeded",
        "conditions": [*unready, *conditions],
        "containerStatuses": [_container(spec, state) for spec in pod["spec"]["containers"]],
        **(status or {}),
    }


def is_waiting(pod: Json, reason: str, message: str = "") -> Json:
    """The status of a pod whose containers wait to be started."""
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    at = now()
    return {
        "phase": "Pending",
        "startTime": at,
        "conditions": [
            {"type": name, "status": "False", "reason": "ContainersNotReady", "lastTransitionTime": at}
            for name in ("ContainersReady", "Ready")
        ],
        "containerStatuses": [_container(spec, state) for spec in pod["spec"]["containers"]],
    }


def _container(spec: Json, state: Json, *, ready: bool = False) -> Json:
    return {
        "name": spec["name"],
        "image": spec["image"],
        "imageID": "",
        "restartCount": 0,
        "ready": ready,
        "started": ready,
        "state": state,
    }


class Kubelets:
    """The kubelets of all nodes, without containers: they start what is bound to them, and end what is deleted.

    Args:
        api: The API server.

    Attributes:
        starts: What is made of new pods, by node. Without an entry they run.
        dead: Nodes whose kubelet does nothing.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self.starts: dict[str, Start] = {}
        self.dead: set[str] = set()
        self._seen: set[tuple[str, int]] = set()  # pods by UID, and which start was tried
        self._deleted_s: dict[str, float] = {}  # when the deletion of a pod was seen, by UID
        self._ending = threading.Event()

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Runs them within the block. An error of theirs is raised at its end."""
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kubelets") as thread:
            running = thread.submit(self._main)
            try:
                yield
            finally:
                self._ending.set()
                running.result(_TIMEOUT_S)

    def _main(self) -> None:
        while not self._ending.wait(_LOOK_EVERY_S):
            for pod in self._api.items("/api/v1/pods"):
                node = pod["spec"].get("nodeName", "")
                if node and node not in self.dead:
                    with _unless_gone():
                        self._look(pod, node)

    def _look(self, pod: Json, node: str) -> None:
        path, uid = path_of(pod), pod["metadata"]["uid"]
        ended = pod["status"].get("phase") in ("Failed", "Succeeded")
        if "deletionTimestamp" in pod["metadata"]:
            runs = pod["status"].get("phase") == "Running"
            if runs and time.monotonic() < self._deleted_s.setdefault(uid, time.monotonic()) + _STOPS_AFTER_S:
                return
            if not ended:
                # As a container that is ended by SIGTERM: the Job controller is told before the pod goes.
                self._api.set_status(path, is_ended(pod, 143))
            self._api.delete(path, uid=uid, grace_s=0)
            return
        start = self.starts.get(node, is_running)
        if pod["status"].get("phase") == "Pending" and (uid, id(start)) not in self._seen:
            self._seen.add((uid, id(start)))
            status = start(pod)
            if status is not None:
                self._api.set_status(path, status)


def path_of(body: Json) -> str:
    """The path of a pod."""
    return f"/api/v1/namespaces/{body['metadata']['namespace']}/pods/{body['metadata']['name']}"


class ControlPlane:
    """What the tests use of it.

    Attributes:
        api: The API server.
        kubelets: Of all nodes.
        logs: The logs of its components, for messages.
        stop_operator: Ends the operator, for good.
    """

    def __init__(
        self, api: Api, kubelets: Kubelets, logs: Mapping[str, Path], stop_operator: Callable[[], None]
    ) -> None:
        self.api = api
        self.kubelets = kubelets
        self.logs = logs
        self.stop_operator = stop_operator

    def add_node(self, name: str, **labels: str) -> None:
        """A node with one processor."""
        meta = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
        self.api.create("/api/v1/nodes", {"metadata": meta})
        self.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})  # that it is not ready
        size = {"cpu": "1", "memory": "1Gi", "pods": "10"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now()}
        self.api.set_status(f"/api/v1/nodes/{name}", {"capacity": size, "allocatable": size, "conditions": [ready]})


@contextlib.contextmanager
def open_control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Starts everything, and ends it."""
    flags = tuple(f"--default-{why}-toleration-seconds={UNREACHABLE_S}" for why in ("unreachable", "not-ready"))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(open_api_server(_made(folder / "api-server"), service_accounts=True, flags=flags))
        jobset = parts.module_folder("jobset")
        server.define(_ROOT / "crds", jobset / "config" / "components" / "crd" / "bases")
        api = Api(server)
        logs = {
            "kube-scheduler": stack.enter_context(component(server, folder, "kube-scheduler", other="")),
            "kube-controller-manager": stack.enter_context(
                component(
                    server,
                    folder,
                    "kube-controller-manager",
                    f"--controllers={','.join(_CONTROLLERS)}",
                    "--concurrent-job-syncs=10",
                    other="",
                )
            ),
            "jobset": stack.enter_context(_jobset(server, api, _made(folder / "jobset"))),
        }
        release = Release(server, _made(folder / "operator"))
        release.upgrade()
        serving = stack.enter_context(contextlib.ExitStack())
        operator = serving.enter_context(release.operator())
        release.connect(operator)
        kubelets = Kubelets(api)
        stack.enter_context(kubelets.run())
        yield ControlPlane(api, kubelets, logs | {"operator": operator.log}, serving.close)


def missing() -> str:
    """Why there can be none on this machine. Empty where there can."""
    if reason := why_not():
        return reason
    absent = [name for name in ("jobset", "helm") if parts.missing((name,))]
    return f"not built: {', '.join(absent)}; run: python -m tests.testcluster build" if absent else ""


@contextlib.contextmanager
def _jobset(server: ApiServer, api: Api, folder: Path) -> Iterator[Path]:
    """JobSet's controller, with its webhooks. Gives its log."""
    authority = pki.authority(folder, "jobset-ca")
    pki.issue(folder, authority, "tls", ["IP:127.0.0.1", "DNS:localhost"])
    with held_ports(2) as (webhooks, health):
        config = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": "127.0.0.1", "port": webhooks, "certDir": str(folder)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            **({"featureGates": dict.fromkeys(on, True)} if (on := features.of_jobset()) else {}),
        }
        (folder / "config.json").write_text(json.dumps(config))
        argv: list[str | Path] = [
            parts.program("jobset"),
            f"--config={folder / 'config.json'}",
            f"--kubeconfig={server.kubeconfig}",
        ]
        with running("jobset", folder, argv) as log:
            wait_until("JobSet's controller", functools.partial(_is_ready, health), timeout_s=180, hint=log.read_text)
            for body in _jobset_webhooks(webhooks, authority.certificate):
                api.create(f"/apis/{body['apiVersion']}/{body['kind'].lower()}s", body)
            yield log


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _jobset_webhooks(port: int, authority: Path) -> list[Json]:
    """The configurations of JobSet's own manifests, for a controller that listens here."""
    rendered = run([parts.program("kubectl"), "kustomize", parts.manifests("jobset", "config") / "components/webhook"])
    bundle = base64.b64encode(authority.read_bytes()).decode()
    bodies: list[Json] = list(yaml.safe_load_all(rendered.stdout))
    made = [body for body in bodies if body["kind"].endswith("WebhookConfiguration")]
    for body in made:
        body["metadata"] = {"name": f"jobset-{body['metadata']['name']}"}
        for webhook in body["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
    return made


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
