"""When the Jobs and pods of a restart changed, as the API server told it: Kubernetes' part of a restart, by who works.

``ObjectWatch`` has two daemon threads ("watch-jobs" and "watch-pods"). Each reads a stream of changes, which the API
server ends every few seconds, and writes down when it heard of what for the first time. After ``stop`` each reads one
more stream, and ends. ``parts`` is pure.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import urllib3.exceptions
from kubernetes import client, config

from gracepoint.wire import names

Json = dict[str, Any]
#: (number of restarts, what was heard) -> when each of these objects was in that state for the first time.
Heard = dict[tuple[int, str], dict[str, float]]

log = logging.getLogger(__name__)

_STREAM_S = 5
_REQUEST_TIMEOUT_S = 20.0
_AGAIN_S = 2.0

#: What ends each part: of the attempt before (-1) or of the new one (0); and the part in words.
PARTS = (
    (-1, "pod ended", "exit -> the API server knows it of all pods (kubelets)"),
    (-1, "job failed", "-> the Job has failed (Job controller)"),
    (-1, "job gone", "-> the Job is deleted (JobSet controller, garbage collector)"),
    (0, "pod created", "-> new pods are created (JobSet and Job controllers)"),
    (0, "pod scheduled", "-> they are scheduled (scheduler)"),
)
LAST = "-> their processes run (kubelet, container runtime)"


def heard_of_pod(kind: str, pod: Json) -> Iterator[str]:
    """Returns what a change of a pod says."""
    yield "pod created"
    if pod["spec"].get("nodeName"):
        yield "pod scheduled"
    if pod.get("status", {}).get("podIP"):
        yield "pod has an address"
    if pod.get("status", {}).get("phase") in ("Failed", "Succeeded") or kind == "DELETED":
        yield "pod ended"


def heard_of_job(kind: str, job: Json) -> Iterator[str]:
    """Returns what a change of a Job says."""
    yield "job created"
    conditions = job.get("status", {}).get("conditions") or []
    if any(each["type"] == "Failed" and each["status"] == "True" for each in conditions) or kind == "DELETED":
        yield "job failed"
    if kind == "DELETED":
        yield "job gone"


class ObjectWatch:
    """Watches the Jobs and pods of a namespace.

    Args:
        kubeconfig: Of the cluster.
        namespace: The namespace.
    """

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._connection = config.new_client_from_config(str(kubeconfig))
        self._namespace = namespace
        self._lock = threading.Lock()
        self._heard: Heard = {}
        self._stopped = threading.Event()
        pods, jobs = client.CoreV1Api(self._connection), client.BatchV1Api(self._connection)
        watches = (
            ("watch-pods", pods.list_namespaced_pod, heard_of_pod),
            ("watch-jobs", jobs.list_namespaced_job, heard_of_job),
        )
        self._threads = [
            threading.Thread(target=self._watch, args=(asks, says), name=name, daemon=True)
            for name, asks, says in watches
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Heard:
        """Ends the watches and returns what they heard."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_STREAM_S + 2 * _REQUEST_TIMEOUT_S)
        self._connection.close()
        with self._lock:
            return {key: dict(times) for key, times in self._heard.items()}

    def _watch(self, asks: Callable[..., Any], says: Callable[[str, Json], Iterator[str]]) -> None:
        version = ""  # the first stream begins with all that is there
        is_last = False
        while not is_last:
            is_last = self._stopped.is_set()
            try:
                stream = asks(
                    self._namespace,
                    watch=True,
                    resource_version=version,
                    timeout_seconds=1 if is_last else _STREAM_S,
                    _preload_content=False,
                    _request_timeout=_REQUEST_TIMEOUT_S,
                )
                for line in stream:
                    change = json.loads(line)
                    version = self._note(change, says)
                stream.release_conn()
            except (client.ApiException, urllib3.exceptions.HTTPError) as error:
                log.warning("a watch has ended, and begins again: %s", error)
                version = ""
                self._stopped.wait(_AGAIN_S)

    def _note(self, change: Json, says: Callable[[str, Json], Iterator[str]]) -> str:
        """Writes down what a change says. Returns the version from which the next stream goes on."""
        now_s, seen = time.time(), change["object"]
        if change["type"] == "ERROR":
            return ""
        attempt = seen["metadata"].get("labels", {}).get(names.JOBSET_LABEL_RESTART_ATTEMPT)
        if attempt is not None:
            with self._lock:
                for what in says(change["type"], seen):
                    self._heard.setdefault((int(attempt), what), {}).setdefault(seen["metadata"]["uid"], now_s)
        return str(seen["metadata"]["resourceVersion"])


def parts(heard: Heard, attempt: int, ended_unix_s: float, started_unix_s: float) -> dict[str, float | None]:
    """Returns how long each part of the pods' return took, by its words. None for a part that was not heard of.

    A part lasts from the end of the part before to its own end in the last object. So the parts together are the time
    from the end of the last process to the start of the last new one.

    Args:
        heard: What was heard.
        attempt: The new number of restarts.
        ended_unix_s: When the last process of the attempt before ended.
        started_unix_s: When the last new process started.
    """
    found: dict[str, float | None] = {}
    until_s = ended_unix_s
    for before, what, words in PARTS:
        ends: Sequence[float] = list(heard.get((attempt + before, what), {}).values())
        end_s = min(max(until_s, *ends), started_unix_s) if ends else None
        found[words] = None if end_s is None else end_s - until_s
        until_s = until_s if end_s is None else end_s
    found[LAST] = started_unix_s - until_s
    return found
