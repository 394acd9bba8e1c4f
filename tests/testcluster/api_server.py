"""etcd and an API server alone, on ports of the loopback that the kernel chooses: no nodes, no controllers.

Pods, nodes and JobSets are objects there that a test writes itself. Needs the built parts, and no root.

Processes: the two, each in a process group of its own, from ``start`` to ``stop``. Threads: none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ports import held_ports
from tests.testcluster import parts, pki
from tests.testcluster.api import ClusterError
from tests.testcluster.shell import log_tail, run, wait_until
from tests.testcluster.waiting import wait_for_definitions

_ADMIN = "admin"
_PROGRAMS = ("etcd", "kube-apiserver")
_READY_S = 120.0
_KILLED_S = 10.0


class ApiServer:
    """One etcd with one API server. ``open_api_server`` starts and stops them.

    Args:
        folder: An empty folder for keys, credentials, etcd's data and the logs.
        ports: Two of etcd, for clients and peers, and one of the API server.
        service_accounts: Whether pods must have a service account. Nothing makes the default ones here.
        etcd_flags: More flags of etcd.
        fill: Called with etcd's URL while the API server does not run yet, to write objects into etcd.
        ready_s: How long the API server may take to be ready, in seconds. It reads all objects before.
        other: The version of the API server (``parts.NEWEST_KUBERNETES``). Empty: the usual one, or that which
            ``TESTCLUSTER_API_SERVER`` names.
        flags: More flags of the API server.

    Attributes:
        url: Where the API server listens.
        ca: Certificate of the authority that it is trusted by.
        token: An administrator's.
        kubeconfig: An administrator's.
    """

    def __init__(
        self,
        folder: Path,
        ports: Sequence[int],
        *,
        service_accounts: bool = False,
        etcd_flags: Sequence[str] = (),
        fill: Callable[[str], None] | None = None,
        ready_s: float = _READY_S,
        other: str = "",
        flags: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._other = other or os.environ.get("TESTCLUSTER_API_SERVER", "")
        self._flags = flags
        self._service_accounts = service_accounts
        self._etcd_flags = etcd_flags
        self._fill = fill
        self._ready_s = ready_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        client, peer, self._port = ports
        self._client_url, self._peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        authority = pki.authority(folder, "ca")
        names = ["IP:127.0.0.1", "DNS:localhost", "DNS:kubernetes.default.svc"]
        pki.issue(folder, authority, "apiserver", names)
        pki.signing_key(folder)
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca = authority.certificate
        self.token = pki.token()
        (folder / "tokens.csv").write_text(f"{self.token},{_ADMIN},{_ADMIN},system:masters\n")
        self.kubeconfig = self.kubeconfig_for(self.url)

    def start(self) -> None:
        """Starts both, and waits until the API server is ready.

        Raises:
            ClusterError: A program is not built, or the API server was not ready in time; with the ends of the logs.
        """
        folder = self._folder
        self._spawn(
            "etcd",
            f"--data-dir={folder}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={self._client_url}",
            f"--advertise-client-urls={self._client_url}",
            f"--listen-peer-urls={self._peer_url}",
            f"--initial-advertise-peer-urls={self._peer_url}",
            f"--initial-cluster=default={self._peer_url}",
            *self._etcd_flags,
        )
        if self._fill is not None:
            wait_until("etcd", self._etcd_is_ready, timeout_s=_READY_S, hint=self._logs)
            self._fill(self._client_url)
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._client_url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self._port}",
            f"--tls-cert-file={folder}/apiserver.crt",
            f"--tls-private-key-file={folder}/apiserver.key",
            f"--token-auth-file={folder}/tokens.csv",
            "--anonymous-auth=false",
            "--authorization-mode=RBAC",
            *([] if self._service_accounts else ["--disable-admission-plugins=ServiceAccount"]),
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={folder}/service-accounts.pub",
            f"--service-account-signing-key-file={folder}/service-accounts.key",
            *self._flags,
            other=self._other,
        )
        wait_until("the API server", self._is_ready, timeout_s=self._ready_s, hint=self._logs)
        if ended := self._ended():
            raise ClusterError(f"{ended} ended before the API server was ready{self._logs()}")

    def stop(self) -> None:
        """Kills both. Their data stay."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait(_KILLED_S)
        self._processes.clear()

    def save(self, name: str) -> None:
        """Keeps a copy of etcd's data as they are now, as if etcd were killed. It does nothing meanwhile."""
        pid = self._processes["etcd"].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            shutil.copytree(self._folder / "etcd", self._folder / name)
        finally:
            os.kill(pid, signal.SIGCONT)

    def restore(self, name: str) -> None:
        """Goes back to that copy. Call it while stopped."""
        shutil.rmtree(self._folder / "etcd")
        shutil.copytree(self._folder / name, self._folder / "etcd")

    def kubectl(
        self, *args: str | Path, stdin: str | None = None, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as an administrator.

        Raises:
            ClusterError: It took too long, or ``check`` is set and it failed.
        """
        argv = [parts.program("kubectl"), f"--kubeconfig={self.kubeconfig}", *args]
        return run(argv, stdin=stdin, timeout_s=timeout_s, check=check, env={"NO_PROXY": "*"})

    def create(self, *bodies: Mapping[str, Any]) -> None:
        """Creates objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(bodies)}
        self.kubectl("create", "--filename=-", stdin=json.dumps(listed))

    def define(self, *manifests: Path, bodies: tuple[Mapping[str, Any], ...] = ()) -> None:
        """Creates definitions of resources, from files or folders of manifests and from bodies, and waits until they
        are served."""
        for manifest in manifests:
            self.kubectl("create", f"--filename={manifest}")
        if bodies:
            self.create(*bodies)
        wait_for_definitions(self.kubectl, timeout_s=_READY_S)

    def kubeconfig_for(self, url: str) -> Path:
        """Writes an administrator's credentials for the API server as it is reached under ``url``."""
        trust = {"certificate-authority": str(self.ca)} if url.startswith("https:") else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lone", "cluster": {"server": url, **trust}}],
            "users": [{"name": _ADMIN, "user": {"token": self.token}}],
            "contexts": [{"name": "lone", "context": {"cluster": "lone", "user": _ADMIN}}],
            "current-context": "lone",
        }
        path = self._folder / f"{url.rpartition(':')[2]}.kubeconfig"
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def _spawn(self, program: str, *args: str, other: str = "") -> None:
        with (self._folder / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                [parts.program(program, other), *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _etcd_is_ready(self) -> bool:
        host, _, port = self._client_url.removeprefix("http://").rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return bool(self._ended())

    def _is_ready(self) -> bool:
        return bool(self._ended()) or self.kubectl("get", "--raw=/readyz").stdout == "ok"

    def _ended(self) -> str:
        """The programs that do not run any more."""
        return ", ".join(name for name, process in self._processes.items() if process.poll() is not None)

    def _logs(self) -> str:
        return "".join(log_tail(self._folder / f"{program}.log") for program in _PROGRAMS)


def why_not(other: str = "") -> str:
    """Why there can be none on this machine, in that version; empty where there can."""
    wanted = ("kubernetes", "etcd", *((f"kubernetes-{other}",) if other else ()))
    missing = [name for name in wanted if parts.missing((name,))]
    how = f"python -m tests.testcluster build --parts {' '.join(missing)}"
    return f"not built: {', '.join(missing)}; run: {how}" if missing else ""


@contextlib.contextmanager
def open_api_server(
    folder: Path,
    *,
    service_accounts: bool = False,
    etcd_flags: Sequence[str] = (),
    fill: Callable[[str], None] | None = None,
    ready_s: float = _READY_S,
    other: str = "",
    flags: Sequence[str] = (),
) -> Iterator[ApiServer]:
    """Starts an ``ApiServer``, and stops it in the end. The arguments are its own; its ports stay the same.

    Raises:
        ClusterError: As ``ApiServer.start`` says.
    """
    with held_ports(3) as ports:
        server = ApiServer(
            folder,
            ports,
            service_accounts=service_accounts,
            etcd_flags=etcd_flags,
            fill=fill,
            ready_s=ready_s,
            other=other,
            flags=flags,
        )
        try:
            server.start()
            yield server
        finally:
            server.stop()
