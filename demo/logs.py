"""Keeps the logs of pods, also of those that will be gone before anybody can ask for them.

Who runs: one thread for each followed pod, in which ``kubectl logs --follow`` runs until the pod's container
ends, the time limit is over or the cluster goes away; then the thread writes the pod's file and ends. Threads
are daemons and share nothing but the set of names, which only the caller's thread touches.
"""

from __future__ import annotations

import threading
from pathlib import Path

from tests.testcluster.api import Cluster, ClusterError

_FOLLOW_S = 900.0


class PodLogs:
    """Collects logs of pods into a folder, one file a pod."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._threads: dict[str, threading.Thread] = {}
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def follow(self, namespace: str, pod: str) -> None:
        """Keeps the log of a running pod until it ends; the second call for a pod does nothing."""
        if pod not in self._threads:
            thread = threading.Thread(target=self._follow, args=(namespace, pod), name=f"logs {pod}", daemon=True)
            self._threads[pod] = thread
            thread.start()

    def finish(self, timeout_s: float) -> None:
        """Waits, at most so long for each, for the followed pods that have ended."""
        for thread in self._threads.values():
            thread.join(timeout_s)

    def save(self, file: str, *kubectl: str) -> None:
        """Writes what a kubectl command says into a file; what it could not say is in the file too."""
        try:
            answer = self._cluster.kubectl(*kubectl, check=False)
            text = answer.stdout + answer.stderr
        except ClusterError as error:
            text = f"{error}\n"
        (self.folder / file).write_text(text)

    def _follow(self, namespace: str, pod: str) -> None:
        command = ("logs", "--follow", "--timestamps", f"--namespace={namespace}", f"pod/{pod}")
        try:
            answer = self._cluster.kubectl(*command, timeout_s=_FOLLOW_S, check=False)
            text = answer.stdout + answer.stderr
        except ClusterError as error:
            text = f"{error}\n"
        (self.folder / f"{pod}.log").write_text(text)
