"""The local test cluster itself: what tests and the demo rely on, tried on a cluster of its own."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import testcluster
from tests.testcluster import cgroups, images, pki, runs
from tests.testcluster.images import BASE
from tests.testcluster.local import LocalCluster
from tests.testcluster.shell import wait_until
from tests.testcluster.waiting import wait_for_rollout

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_REPOSITORY = Path(__file__).parents[2]


#: The node that is lost while the tests go on, on the two others.
LOST = "node-3"


@pytest.fixture(scope="module")
def cluster() -> Iterator[testcluster.Cluster]:
    """A local cluster of three nodes for this module alone: it loses one, and its end is looked at."""
    reason = testcluster.why_not_local()
    if reason:
        pytest.skip(reason)
    with testcluster.open(nodes=3, context="") as opened:
        yield opened


@pytest.fixture(scope="module")
def collected(cluster: testcluster.Cluster) -> Iterator[Future[None]]:
    """A node with a pod is lost. The result is there when the pod was collected, which takes more than a minute."""
    cluster.kubectl("cordon", LOST)
    _apply(cluster, _stranded())
    cluster.kubectl("wait", "pod/stranded", "--for=condition=Ready", "--timeout=60s", timeout_s=65)
    cluster.lose_node(LOST)
    assert list(cluster.nodes) == ["node-1", "node-2"]

    def collect() -> None:
        wait_until(f"{LOST} to be unknown", lambda: _ready(cluster, LOST) == "Unknown", timeout_s=60, every_s=1)
        cluster.kubectl("delete", "node", LOST)  # as the cloud's node controller does
        gone = ("get", "pod", "stranded", "--ignore-not-found", "--output=name")
        wait_until("its pod to be collected", lambda: not cluster.kubectl(*gone).stdout, timeout_s=120, every_s=1)

    with ThreadPoolExecutor(1, "collects-a-pod") as pool:
        yield pool.submit(collect)


@pytest.mark.usefixtures("collected")  # from now on
def test_jobset_spreads_finds_its_peers_and_restarts_after_a_drain(cluster: testcluster.Cluster) -> None:
    script = """
        import os, pathlib, socket, time
        mine, others = os.environ["JOB_COMPLETION_INDEX"], ("0", "1")
        folder = pathlib.Path("/shared/pair")
        folder.mkdir(exist_ok=True)
        def address(index):
            while True:
                try:
                    return socket.gethostbyname(f"pair-main-0-{index}.pair")
                except OSError:
                    time.sleep(0.1)
        found = [address(index) for index in others]
        (folder / mine).write_text(os.environ["JOBSET_RESTART_ATTEMPT"])
        while not all((folder / index).exists() for index in others):
            time.sleep(0.1)
        print("peers", *found, flush=True)
        time.sleep(3600)
        """
    _apply(cluster, _jobset("pair", script, cluster.shared_dir))
    _wait_for_log(cluster, "pair", "peers")
    pods = _pods(cluster, "pair")
    assert {pod["spec"]["nodeName"] for pod in pods} == set(cluster.nodes)
    addresses = {pod["status"]["podIP"] for pod in pods}
    said = cluster.kubectl("logs", pods[0]["metadata"]["name"]).stdout.split()
    assert set(said[1:]) == addresses
    answer = cluster.kubectl("exec", pods[0]["metadata"]["name"], "--", "hostname").stdout
    assert (
        answer.strip()
        == f"pair-main-0-{pods[0]['metadata']['annotations']['batch.kubernetes.io/job-completion-index']}"
    )
    assert (cluster.shared_dir / "pair" / "0").read_text() == "0"

    cluster.kubectl("drain", "node-1", "--ignore-daemonsets", "--force")
    wait_until("the restart", lambda: _restarts(cluster, "pair") == 1, timeout_s=60)
    _wait_for_log(cluster, "pair", "peers")
    assert {pod["spec"]["nodeName"] for pod in _pods(cluster, "pair")} == {"node-2"}
    cluster.kubectl("uncordon", "node-1")
    cluster.kubectl("delete", "jobset", "pair", "--wait")


def test_a_bound_token_names_its_pod(cluster: testcluster.Cluster) -> None:
    projected = {"serviceAccountToken": {"path": "token", "audience": "gracepoint.dev", "expirationSeconds": 600}}
    pod = _pod("bearer", ["sleep", "3600"])
    pod["spec"]["automountServiceAccountToken"] = False
    pod["spec"]["volumes"] = [{"name": "token", "projected": {"sources": [projected]}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "token", "mountPath": "/token"}]
    _apply(cluster, pod)
    cluster.kubectl("wait", "pod/bearer", "--for=condition=Ready", "--timeout=60s", timeout_s=65)
    token = cluster.kubectl("exec", "bearer", "--", "cat", "/token/token").stdout
    meta = _get(cluster, "pod", "bearer")["metadata"]
    for audience, good in (("gracepoint.dev", True), ("another", False)):
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = cluster.kubectl("create", "--filename=-", "--output=json", stdin=json.dumps(review)).stdout
        status = json.loads(answer)["status"]
        assert status.get("authenticated", False) is good
        if good:
            extra = status["user"]["extra"]
            assert extra["authentication.kubernetes.io/pod-name"] == ["bearer"]
            assert extra["authentication.kubernetes.io/pod-uid"] == [meta["uid"]]
    cluster.kubectl("delete", "pod", "bearer", "--wait=false")


def test_the_api_server_reaches_a_webhook_in_a_pod(cluster: testcluster.Cluster, tmp_path: Path) -> None:
    authority = pki.authority(tmp_path, "trial-ca")
    pair = pki.issue(tmp_path, authority, "trial", ["DNS:trial.default.svc"])
    server = textwrap.dedent(
        """
        import http.server, json, ssl
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = {"uid": review["request"]["uid"], "allowed": False, "status": {"message": "said by a pod"}}
                review["response"] = answer
                del review["request"]
                body = json.dumps(review).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain("/certificate/tls.crt", "/certificate/tls.key")
        httpd = http.server.HTTPServer(("", 8443), Handler)
        httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
        httpd.serve_forever()
        """
    )
    pod = _pod("trial", ["python3", "-c", server])
    pod["metadata"]["labels"] = {"app": "trial"}
    pod["spec"]["volumes"] = [{"name": "certificate", "secret": {"secretName": "trial"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "certificate", "mountPath": "/certificate"}]
    pod["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 8443}, "periodSeconds": 1}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "trial"},
        "spec": {"selector": {"app": "trial"}, "ports": [{"port": 443, "targetPort": 8443}]},
    }
    bundle = base64.b64encode(authority.certificate.read_bytes()).decode()
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "trial"},
        "webhooks": [
            {
                "name": "trial.gracepoint.dev",
                "clientConfig": {"service": {"name": "trial", "namespace": "default"}, "caBundle": bundle},
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["configmaps"],
                    }
                ],
                "objectSelector": {"matchLabels": {"trial": "yes"}},
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
            }
        ],
    }
    cluster.kubectl("create", "secret", "tls", "trial", f"--cert={pair.certificate}", f"--key={pair.key}")
    for thing in (pod, service, configuration):
        _apply(cluster, thing)
    cluster.kubectl("wait", "pod/trial", "--for=condition=Ready", "--timeout=60s", timeout_s=65)
    refused = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "refused", "labels": {"trial": "yes"}},
    }

    def refusal() -> str:
        return cluster.kubectl("create", "--filename=-", stdin=json.dumps(refused), check=False).stderr

    wait_until("the webhook's refusal", lambda: "said by a pod" in refusal(), timeout_s=30)
    cluster.kubectl("delete", "validatingwebhookconfiguration/trial", "pod/trial", "--wait=false")


def test_an_image_is_built_offline_from_a_plain_dockerfile_and_only_once(
    cluster: testcluster.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        "ARG BASE=python:3.11-slim-bookworm\n"
        "FROM ${BASE}\n"
        "RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install iniconfig\n"
        "USER 1000\n"
        'CMD ["/opt/venv/bin/python", "-c", "import iniconfig; print(iniconfig.__name__)"]\n'
    )
    tag = "gracepoint.test/harness:dev"
    name = cluster.build_image(tag, dockerfile, tmp_path, requirements=["iniconfig", "setuptools"])
    commands: list[str | Path] = []
    buildah = images._buildah

    def noted(*args: str | Path) -> str:
        commands.append(args[0])
        return buildah(*args)

    monkeypatch.setattr(images, "_buildah", noted)
    assert cluster.build_image(tag, dockerfile, tmp_path, requirements=["iniconfig", "setuptools"]) == name
    assert commands == ["bud"]  # which finds every layer in its cache; nothing was exported
    for node in cluster.nodes:
        pod = _pod(f"built-{node}", [], image=name)
        pod["spec"]["nodeName"] = node
        pod["spec"]["restartPolicy"] = "Never"
        _apply(cluster, pod)
    for node in cluster.nodes:
        wait_until(f"the pod on {node}", partial(_succeeded, cluster, f"built-{node}"), timeout_s=60)
        assert cluster.kubectl("logs", f"built-{node}").stdout == "iniconfig\n"


def test_helm_talks_to_the_cluster(cluster: testcluster.Cluster) -> None:
    assert cluster.helm("list", "--all-namespaces", "--output=json").stdout.strip() == "[]"


def test_a_rollout_ends_with_ready_pods_also_when_all_were_just_killed(cluster: testcluster.Cluster) -> None:
    query = ("get", "pods", "--namespace=kube-system", "--selector=k8s-app=kube-dns", "--output=json")
    dead = {pod["metadata"]["uid"] for pod in json.loads(cluster.kubectl(*query).stdout)["items"]}
    assert dead
    cluster.kubectl("delete", "pods", *query[2:4], "--force", "--grace-period=0", "--wait=false")
    wait_for_rollout(cluster, "deployment/coredns", namespace="kube-system", timeout_s=60)
    pods = json.loads(cluster.kubectl(*query).stdout)["items"]
    conditions = [each for pod in pods for each in pod["status"]["conditions"] if each["type"] == "Ready"]
    assert [each["status"] for each in conditions] == ["True"]
    assert not dead & {pod["metadata"]["uid"] for pod in pods}


def test_a_cluster_ends_with_its_owner_even_when_that_is_killed() -> None:
    reason = testcluster.why_not_local()
    if reason:
        pytest.skip(reason)
    before = {record.cluster_id for record in runs.records()}
    program = "from tests import testcluster; testcluster.open(nodes=1, context=''); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=_REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        (record,) = (each for each in runs.records() if each.owner is not None and each.owner[0] == owner.pid)
        assert record.cluster_id not in before
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=10)
    wait_until("the guardian to clean up", lambda: not record.folder.exists(), timeout_s=120)
    _assert_no_trace(record)


def test_lost_node_is_noticed_and_its_pods_are_replaced(cluster: testcluster.Cluster, collected: Future[None]) -> None:
    collected.result(timeout=200)
    cluster.restore_node(LOST)
    assert len(cluster.nodes) == 3
    _apply(cluster, _stranded())
    cluster.kubectl("wait", "pod/stranded", "--for=condition=Ready", "--timeout=60s", timeout_s=65)


def test_the_api_server_forgets_what_was_made_after_a_backup(cluster: testcluster.Cluster) -> None:
    assert isinstance(cluster, LocalCluster)
    cluster.kubectl("create", "namespace", "known")
    with cluster.forgetting():
        cluster.kubectl("create", "namespace", "forgotten")
    names = cluster.kubectl("get", "namespaces", "--output=name").stdout.split()
    assert "namespace/known" in names
    assert "namespace/forgotten" not in names


def test_nothing_is_left_after_the_end(cluster: testcluster.Cluster) -> None:
    assert isinstance(cluster, LocalCluster)
    record = cluster.record
    assert runs.machines(record.cluster_id)
    assert cgroups.left(record.cgroup)
    cluster.close()
    _assert_no_trace(record)
    cluster.close()  # and again, as leaving the fixture does


def _assert_no_trace(record: runs.Record) -> None:
    marks = (record.cluster_id, str(record.folder))
    assert not runs.machines(record.cluster_id)
    assert not cgroups.left(record.cgroup)
    assert not record.folder.exists()
    assert not Path("/sys/class/net", record.network.device).exists()
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not any(mark in mounts for mark in marks)
    # the guardian looks twice a second whether it is still needed
    wait_until("its processes to be gone", lambda: not _processes_with(marks), timeout_s=30)


def _processes_with(marks: tuple[str, ...]) -> list[str]:
    """Command lines of processes that mention the cluster, in their words or in their cgroups."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                text = (process / "cmdline").read_text(errors="replace") + (process / "cgroup").read_text()
            except OSError:
                continue
            if any(mark in text for mark in marks):
                found.append(text)
    return found


def _pod(name: str, command: list[str], image: str = BASE) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "main", "image": image, "imagePullPolicy": "IfNotPresent"}
    if command:
        container["command"] = command
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _stranded() -> dict[str, Any]:
    pod = _pod("stranded", ["sleep", "3600"])
    pod["spec"]["nodeName"] = LOST
    return pod


def _jobset(name: str, script: str, shared: Path) -> dict[str, Any]:
    pod = _pod(name, ["python3", "-c", textwrap.dedent(script)])["spec"]
    pod["restartPolicy"] = "Never"
    pod["volumes"] = [{"name": "shared", "hostPath": {"path": str(shared)}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"}]
    restart = {"name": "JOBSET_RESTART_ATTEMPT"}
    field = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    pod["containers"][0]["env"] = [{**restart, "valueFrom": {"fieldRef": {"fieldPath": field}}}]
    selector = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    pod["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "nodeTaintsPolicy": "Honor",  # a node that is cordoned or lost is none to spread over
            "labelSelector": selector,
        }
    ]
    job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": {"spec": pod}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [{"name": "main", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _apply(cluster: testcluster.Cluster, thing: dict[str, Any]) -> None:
    cluster.kubectl("apply", "--filename=-", stdin=json.dumps(thing))


def _get(cluster: testcluster.Cluster, *what: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cluster.kubectl("get", *what, "--output=json").stdout)
    return found


def _pods(cluster: testcluster.Cluster, jobset: str) -> list[dict[str, Any]]:
    pods: list[dict[str, Any]] = _get(cluster, "pods", f"--selector=jobset.sigs.k8s.io/jobset-name={jobset}")["items"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def _wait_for_log(cluster: testcluster.Cluster, jobset: str, word: str) -> None:
    def said() -> bool:
        pods = _pods(cluster, jobset)
        logs = [cluster.kubectl("logs", pod["metadata"]["name"]).stdout for pod in pods]
        return len(logs) == 2 and all(word in log for log in logs)

    wait_until(f"both pods of {jobset} to say {word}", said, timeout_s=60)


def _restarts(cluster: testcluster.Cluster, jobset: str) -> int:
    return int(_get(cluster, "jobset", jobset).get("status", {}).get("restarts", 0))


def _succeeded(cluster: testcluster.Cluster, pod: str) -> bool:
    return bool(_get(cluster, "pod", pod)["status"]["phase"] == "Succeeded")


def _ready(cluster: testcluster.Cluster, node: str) -> str:
    conditions = _get(cluster, "node", node)["status"]["conditions"]
    return next(str(each["status"]) for each in conditions if each["type"] == "Ready")
