"""A release of the chart on a lone API server, and the operator's process as the chart's Deployment runs it.

Processes: the operator's, in a process group of its own, until ``operator`` ends. Threads: none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust.certificates import Certificates, TrustKeeper, TrustPlaces
from tests.api_server.programs import running
from tests.ports import held_ports
from tests.testcluster import parts
from tests.testcluster.api import ClusterError
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import run, wait_until

CHART = Path(__file__).parents[2] / "charts" / "gracepoint"
NAMESPACE = "gp-system"
PLACES = TrustPlaces(
    NAMESPACE, "gp-gracepoint-certificates", "gp-gracepoint-trust", "00-gp-gracepoint", "gp-gracepoint", "gp.svc"
)


@contextlib.contextmanager
def templates(server: ApiServer, home: Path, *files: str, namespace: str, values: Sequence[str] = ()) -> Iterator[None]:
    """Has some of the chart's templates applied on the API server meanwhile.

    Args:
        server: The API server.
        home: A folder for Helm.
        files: Names of the templates.
        namespace: Where the release is.
        values: Values of the chart, as ``--set`` takes them.
    """
    try:
        helm = parts.program("helm")
    except ClusterError as reason:
        pytest.skip(str(reason))
    flags = ["--kube-version=1.34.0", *(f"--show-only=templates/{file}" for file in files)]
    flags += [f"--set={value}" for value in (*values, "admission.token=" + 40 * "x")]
    argv: list[str | Path] = [
        helm,
        "template",
        "gp",
        CHART,
        f"--namespace={namespace}",
        "--kube-version=1.34.0",
        *flags,
    ]
    rendered = run(argv, env={"HOME": str(home)}).stdout
    server.kubectl("apply", "--filename=-", stdin=rendered)
    yield
    server.kubectl("delete", "--filename=-", stdin=rendered)


@contextlib.contextmanager
def may_read(server: ApiServer, resource: str, verbs: str = "get", *, namespace: str = NAMESPACE) -> Iterator[None]:
    """Lets the operator read a resource in the namespace ``default`` meanwhile: kubectl looks before it writes.

    Args:
        server: The API server.
        resource: The resource.
        verbs: How it is read.
        namespace: Where the release is.
    """
    reader = ("reader", "--namespace=default")
    server.kubectl("create", "role", *reader, f"--verb={verbs}", f"--resource={resource}")
    account = f"--serviceaccount={namespace}:gp-gracepoint"
    server.kubectl("create", "rolebinding", *reader, "--role=reader", account)
    yield
    server.kubectl("delete", "role,rolebinding", *reader)


class Operator:
    """A replica that runs.

    Args:
        log: Its log.
        channel: Its port for pods.
        webhooks: Its port of webhooks.
        health: Its port of probes.
        metrics: Its port of metrics for readers with a token.
    """

    def __init__(self, log: Path, channel: int, webhooks: int, health: int, metrics: int) -> None:
        self.log = log
        self.channel = channel
        self.webhooks = webhooks
        self.metrics = metrics
        self.url = f"http://127.0.0.1:{health}"

    def ready(self) -> bool:
        """True if its pod would be ready."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


class Release:
    """A release of the chart, and the operator's part that keeps certificate and trust."""

    def __init__(self, server: ApiServer, folder: Path, name: str = "gp") -> None:
        self.name = name
        self.full_name = f"{name}-gracepoint"
        self.server = server
        self.folder = folder
        try:
            self._helm = str(parts.program("helm"))
        except ClusterError as reason:
            pytest.skip(str(reason))

    def install(self, *settings: str, chart: Path = CHART, values: str = "") -> str:
        """Installs or upgrades, with the CRDs. Returns the notes.

        Args:
            settings: What ``--set`` sets.
            chart: The chart's folder.
            values: A file of values, as text.
        """
        done = self._install(*settings, chart=chart, values=values)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *settings: str) -> str:
        """Tries to install or upgrade, with the CRDs. Returns why Helm does not."""
        done = self._install(*settings)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def _install(self, *settings: str, chart: Path = CHART, values: str = "") -> subprocess.CompletedProcess[str]:
        arguments = [part for setting in settings for part in ("--set", setting)]
        path = self.folder / "values.yaml"
        path.write_text(values)
        wanted = (self.name, str(chart), "--create-namespace", f"--values={path}", *arguments)
        return self._helm_run("upgrade", "--install", *wanted)

    def upgrade(self, *settings: str, chart: Path = CHART, values: str = "") -> None:
        """Installs or upgrades. The CRDs are there already, and are no part of this."""
        self.install("crds.install=false", *settings, chart=chart, values=values)

    def rendered(self, *settings: str) -> str:
        """The manifests as a tool renders them that does not look at the cluster."""
        given = ("crds.install=false", f"admission.token={40 * 'x'}", *settings)
        arguments = [part for setting in given for part in ("--set", setting)]
        return self._run("template", self.name, str(CHART), "--kube-version=1.34.0", "--no-hooks", *arguments)

    def roll_back(self, revision: int) -> None:
        self._run("rollback", self.name, str(revision))

    def remove(self) -> None:
        """Removes the release."""
        self._run("uninstall", self.name, "--ignore-not-found")

    def uninstall(self) -> None:
        """Removes the release, and waits until the API server calls no webhooks any more: other tests follow."""
        self.remove()
        self.server.kubectl("delete", "secret", "gp-gracepoint-tls", f"--namespace={NAMESPACE}", "--ignore-not-found")
        labelled = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": "probe", "namespace": "default", "labels": {LABEL_POLICY: "none"}},
            "spec": {"replicatedJobs": []},
        }

        def accepted() -> bool:
            arguments = ("create", "--dry-run=server", "--filename=-")
            return self.server.kubectl(*arguments, stdin=json.dumps(labelled), check=False).returncode == 0

        wait_until("a labelled JobSet to be accepted without the webhook", accepted, timeout_s=30)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        answer = self.server.kubectl("get", kind, name, f"--namespace={NAMESPACE}", "--output=json")
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    def keep(self) -> Certificates:
        """Runs one round of the operator's part. Returns what it serves and trusts."""

        async def once() -> Certificates:
            api = KubeClient.connect(str(self.server.kubeconfig))
            try:
                made = Certificates(self.folder, required=False)
                assert await TrustKeeper(api, made, PLACES, Metrics()).once()
                return made
            finally:
                api.close()

        return asyncio.run(once())

    def told(self) -> set[str]:
        """The authorities in the webhook configurations."""
        kinds = ("mutatingwebhookconfiguration", PLACES.mutating), ("validatingwebhookconfiguration", PLACES.validating)
        bodies = [self.get(kind, name) for kind, name in kinds]
        found = {webhook["clientConfig"].get("caBundle", "") for body in bodies for webhook in body["webhooks"]}
        return {base64.b64decode(text).decode() for text in found}

    @contextlib.contextmanager
    def operator(self, name: str = "operator-a") -> Iterator[Operator]:
        """Runs one replica as the Deployment says, with the rights of its service account."""
        pod = self.get("deployment", self.full_name)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        folder = self.folder / name
        (folder / "tls").mkdir(parents=True)
        token = base64.b64decode(self.get("secret", f"{self.full_name}-webhooks")["data"]["token"])
        (folder / "token").write_bytes(token)
        signals = self.get("configmap", f"{self.full_name}-signals")["data"]["signals.json"]
        (folder / "signals.json").write_text(signals)
        with held_ports(4) as (https, webhooks, health, metrics):
            here = {
                "/tls": str(folder / "tls"),
                "/webhooks/token": str(folder / "token"),
                "/etc/gracepoint/signals.json": str(folder / "signals.json"),
                "8443": str(https),
                "9443": str(webhooks),
                "8080": str(health),
                "8444": str(metrics),
                "$(POD_NAME)": name,
                "$(POD_NAMESPACE)": NAMESPACE,
            }
            arguments = [here.get(argument, argument) for argument in container["args"]]
            argv = [
                sys.executable,
                "-m",
                "gracepoint_operator",
                *arguments,
                f"--kubeconfig={self._credentials(folder, pod['serviceAccountName'])}",
            ]
            with running(name, folder, argv) as log:
                yield Operator(log, https, webhooks, health, metrics)

    def connect(self, operator: Operator) -> None:
        """Lets the API server reach the webhooks of a replica that runs here."""
        wait_until("the operator to be ready", operator.ready, timeout_s=180, hint=operator.log.read_text)
        wait_until("the authority to be in the webhooks", lambda: "" not in self.told(), timeout_s=180)
        service = {"spec": {"type": "ExternalName", "externalName": "localhost", "clusterIP": None, "clusterIPs": None}}
        self._patch("service", "gp-gracepoint", service)
        kinds = ("mutatingwebhookconfiguration", PLACES.mutating), ("validatingwebhookconfiguration", PLACES.validating)
        for kind, name in kinds:
            webhooks = self.get(kind, name)["webhooks"]
            for webhook in webhooks:
                webhook["clientConfig"]["service"]["port"] = operator.webhooks
            self._patch(kind, name, {"webhooks": webhooks})

    def _patch(self, kind: str, name: str, patch: object) -> None:
        argv = ("patch", kind, name, f"--namespace={NAMESPACE}", "--type=merge", f"--patch={json.dumps(patch)}")
        self.server.kubectl(*argv)

    def _credentials(self, folder: Path, account: str) -> Path:
        """Those of the operator's service account."""
        made = self.server.kubectl("create", "token", account, f"--namespace={NAMESPACE}")
        config = json.loads(self.server.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": made.stdout.strip()}
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def _run(self, *arguments: str) -> str:
        done = self._helm_run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _helm_run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self._helm, f"--kubeconfig={self.server.kubeconfig}", f"--namespace={NAMESPACE}", *arguments]
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
