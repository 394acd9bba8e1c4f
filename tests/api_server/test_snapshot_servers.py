"""The operator with snapshot servers: what the chart lets it watch and write, whom it tells, and what it has dropped.

The operator is a process with the rights of its service account. The servers are real ones, on addresses of the
loopback; their pods are objects alone, as nothing runs pods here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.deadline import Deadline
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.snapshots.snapshot_server import SnapshotFiles, SnapshotLimits, SnapshotServer
from gracepoint.wire import names
from gracepoint.wire.frames import Frame, SnapshotPlacement
from gracepoint.wire.messages import Subscription
from gracepoint.wire.snapshot_requests import Right, read_capability
from gracepoint_operator.workloads import JOBSETS
from tests.api_server.gang import Gang
from tests.api_server.releases import NAMESPACE, Operator, Release
from tests.testcluster.shell import wait_until

SERVERS = "gp-gracepoint-snapshots"
ON = ("snapshots.enabled=true", "snapshots.capacity=1Gi", "snapshots.nodeSelector.pool=training")
PORT = 9470
MEMORY = {"checkpoint": {"directory": "/checkpoints/{jobset}", "memory": {"everySeconds": 60}}}


class WithSnapshots(Gang):
    """A gang whose policy asks for snapshots."""

    def policy(self, **spec: object) -> dict[str, Any]:
        return super().policy(**MEMORY | spec)

    def pod_spec(self, index: int) -> dict[str, Any]:
        return super().pod_spec(index) | {"serviceAccountName": "default"}


def host(index: int) -> str:
    """An address of the loopback that no other run of the tests uses."""
    return f"127.{91 + index}.{os.getpid() >> 8 & 255}.{os.getpid() & 254 | 1}"


def secret(release: Release) -> dict[str, bytes]:
    data = release.get("secret", SERVERS).get("data") or {}
    return {name: base64.b64decode(value) for name, value in data.items()}


@contextlib.contextmanager
def snapshot_servers(release: Release, folder: Path, nodes: list[str]) -> Iterator[list[SnapshotServer]]:
    """A server for each node with what the Secret holds, and the pod that stands for it."""
    wait_until("keys and certificate", lambda: {"keys", "tls.crt", "tls.key"} <= secret(release).keys(), timeout_s=60)
    for name, data in secret(release).items():
        (folder / name).write_bytes(data)
    files = SnapshotFiles(certificate=folder / "tls.crt", key=folder / "tls.key", capability_keys=folder / "keys")
    limits = SnapshotLimits(capacity_bytes=1 << 24, workload_bytes=1 << 24)
    with contextlib.ExitStack() as stack:
        servers = []
        for index, node in enumerate(nodes):
            servers.append(SnapshotServer(files, limits, host(index), PORT))
            stack.callback(servers[-1].close)
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"server-{index}", "labels": {names.LABEL_SNAPSHOT_SERVER: SERVERS}},
                "spec": {"nodeName": node, "containers": [{"name": "server", "image": "server"}]},
            }
            place = f"--namespace={NAMESPACE}"
            release.server.kubectl("create", place, "--filename=-", stdin=json.dumps(pod))
            stack.callback(release.server.kubectl, "delete", "pod", f"server-{index}", place, "--force")
            status = {"podIP": host(index), "conditions": [{"type": "Ready", "status": "True"}]}
            patch = json.dumps({"status": status | {"phase": "Running"}})
            arguments = ("patch", "pod", f"server-{index}", place, "--subresource=status", f"--patch={patch}")
            release.server.kubectl(*arguments)
        yield servers


def subscribed(release: Release, operator: Operator, pod: dict[str, Any], workload_uid: str) -> list[Frame]:
    """Subscribes as a pod that says that it is of a workload. Returns the frames up to a placement, if one comes."""
    meta = pod["metadata"]
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={meta['name']}", f"--audience={names.TOKEN_AUDIENCE}")
    place = f"--namespace={meta['namespace']}"
    release.server.kubectl("create", "serviceaccount", "default", place, check=False)
    arguments = ("create", "token", "default", place, *bound)
    token = release.server.kubectl(*arguments).stdout.strip()
    hello = Subscription(
        namespace=meta["namespace"],
        pod_name=meta["name"],
        pod_uid=meta["uid"],
        session="s-0",
        workload_uid=workload_uid,
        restart_attempt=0,
        process_index=0,
        process_count=2,
        library_version="0.1.0",
        takes_snapshots=True,
    )
    body = hello.to_json().encode()
    head = f"POST {names.PATH_SUBSCRIBE} HTTP/1.1\r\nHost: gp\r\nAuthorization: Bearer {token}\r\n"
    authorities = release.get("configmap", "gp-gracepoint-trust")["data"]["ca-bundle.crt"]
    context = ssl.create_default_context(cadata=authorities)
    frames: list[Frame] = []
    with (
        socket.create_connection(("127.0.0.1", operator.channel), timeout=30) as raw,
        context.wrap_socket(raw, server_hostname=f"gp-gracepoint.{NAMESPACE}.svc") as connection,
    ):
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until_s = time.monotonic() + 20
        for line in connection.makefile("rb"):
            if line.startswith(b"{"):
                frames.append(Frame.read(line))
            is_answered = b" 403 " in line or (frames and isinstance(frames[-1], SnapshotPlacement))
            if is_answered or time.monotonic() > until_s:  # a ping comes every five seconds
                break
    return frames


def pod_of(release: Release, name: str, namespace: str) -> dict[str, Any]:
    answer = release.server.kubectl("get", "pod", name, f"--namespace={namespace}", "--output=json")
    pod: dict[str, Any] = json.loads(answer.stdout)
    return pod


@pytest.fixture
def release(gang: Gang, tmp_path: Path) -> Iterator[Release]:
    made = Release(gang.server, tmp_path)
    made.install("crds.install=false", *ON)
    yield made
    made.uninstall()


def test_processes_are_told_their_servers_and_nothing_is_left_when_the_namespace_is_deleted(
    gang: Gang, release: Release, tmp_path: Path
) -> None:
    with release.operator() as operator:
        release.connect(operator)
        gang = WithSnapshots(gang.server, gang.api, gang.name)
        asyncio.run(gang.make())
        nodes = [gang.node(0), gang.node(1)]
        with snapshot_servers(release, tmp_path, nodes) as (first, second):
            frames = subscribed(release, operator, pod_of(release, gang.pod(0), gang.name), gang.workload_uid)
            placement = frames[-1]
            assert isinstance(placement, SnapshotPlacement)
            assert placement.write_to == {node: f"{host(index)}:{PORT}" for index, node in enumerate(nodes)}
            lines = secret(release)["keys"].decode().splitlines()
            keys = {key_id: base64.b64decode(key) for key_id, key in map(str.split, lines)}
            capability = read_capability(placement.capability, keys)
            assert (capability.namespace, capability.workload) == (gang.name, gang.workload_uid)
            assert Right.STAT not in capability.rights
            client = SnapshotClient(
                (host(1), PORT),
                server_name=placement.server_name,
                authorities=lambda: release.get("configmap", "gp-gracepoint-trust")["data"]["ca-bundle.crt"],
                capability=lambda: placement.capability,
            )
            client.put("7/0/0/done", [memoryview(b"a part")], Deadline.after(30.0, time.monotonic))
            client.close()
            assert second.figures()["values"] == 1

            release.server.kubectl("create", "namespace", "thieves")
            thief = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": "thief",
                    "labels": {names.JOBSET_LABEL_UID: gang.workload_uid, names.JOBSET_LABEL_RESTART_ATTEMPT: "0"},
                },
                "spec": gang.pod_spec(0),
            }
            release.server.kubectl("create", "--namespace=thieves", "--filename=-", stdin=json.dumps(thief))
            refused = subscribed(release, operator, pod_of(release, "thief", "thieves"), gang.workload_uid)
            assert not [frame for frame in refused if isinstance(frame, SnapshotPlacement)]

            # Nothing deletes what is in a namespace here: the objects go first, as its controller has them go.
            asyncio.run(gang.api.delete(JOBSETS, asyncio.run(gang.api.get(JOBSETS, gang.name, "train"))))
            release.server.kubectl("delete", "namespace", gang.name, "thieves", "--wait=false")

            def is_empty() -> bool:
                return not any(server.figures()["values"] for server in (first, second))

            wait_until("the servers to be empty", is_empty, timeout_s=60)


def test_the_operator_may_read_no_other_secret_and_no_other_namespaces_pods_for_it(release: Release) -> None:
    account = f"--as=system:serviceaccount:{NAMESPACE}:gp-gracepoint"

    def may(*what: str) -> bool:
        answer = release.server.kubectl("auth", "can-i", *what, account, f"--namespace={NAMESPACE}", check=False)
        return bool(answer.stdout.startswith("yes"))

    assert may("patch", f"secrets/{SERVERS}")
    assert may("watch", "pods")
    assert not may("get", "secrets/another")
    assert not may("list", "secrets")
