"""Notes when the pods of a run were created, bound and ended, by a watch of its own and by the kernel.

Who runs: one thread that watches the pods, and for each pod one that waits for the end of its process on this machine.
``_lock`` guards what they note. ``close`` ends the watch; the other threads end with the processes, and are daemons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import select
import threading
import time
from types import TracebackType
from typing import Any, Self

import psutil
from kubernetes import client, config, watch

from demo.training import TrainingRun
from gracepoint.wire.names import Env
from tests.cluster.machine import is_beside_a_trainer
from tests.leftovers import processes_with
from tests.replay.account import PodTimes

_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_WATCH_S = 10
_AGAIN_S = 0.5
_PROCESS_END_S = 3600.0


class PodWatch:
    """Use as a context manager, around the life of the run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._pods: dict[str, PodTimes] = {}
        self._followed: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pod watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(_WATCH_S + 10)

    def pods(self) -> list[PodTimes]:
        """Returns all pods that were seen so far."""
        with self._lock:
            return list(self._pods.values())

    def _watch(self) -> None:
        selector = f"{self._run.form.name_label}={self._run.name}"
        with config.new_client_from_config(str(self._run.cluster.kubeconfig)) as connection:
            api = client.CoreV1Api(connection)
            while not self._closed.is_set():
                try:
                    events = watch.Watch().stream(
                        api.list_namespaced_pod,
                        self._run.namespace,
                        label_selector=selector,
                        timeout_seconds=_WATCH_S,
                        _request_timeout=_WATCH_S + 5,
                    )
                    for event in events:
                        self._note(event["type"], event["raw_object"], time.time())
                        if self._closed.is_set():
                            return
                # The API server is being restarted, or whatever it is: a watch that ends would hide all that comes.
                except Exception:  # noqa: BLE001
                    self._closed.wait(_AGAIN_S)

    def _note(self, kind: str, pod: dict[str, Any], now_s: float) -> None:
        metadata, status = pod["metadata"], pod.get("status", {})
        uid, name = metadata["uid"], metadata["name"]
        statuses = status.get("containerStatuses") or [{}]
        state = statuses[0].get("state", {})
        with self._lock:
            known = self._pods.get(uid) or PodTimes(
                name=name,
                attempt=self._run.form.attempt(metadata),
                process=int(metadata.get("labels", {}).get(_COMPLETION_INDEX, 0)),
                created_s=within(metadata["creationTimestamp"], now_s),
                bound_s=None,
                ended_s=None,
            )
            if known.bound_s is None and pod["spec"].get("nodeName"):
                bound = next((c for c in status.get("conditions", []) if c["type"] == "PodScheduled"), None)
                at = within(bound["lastTransitionTime"], now_s) if bound else now_s
                known = dataclasses.replace(known, bound_s=max(known.created_s, at))
            if known.ended_s is None and uid not in self._followed:
                if "terminated" in state:  # its process was never seen
                    known = dataclasses.replace(known, ended_s=within(state["terminated"]["finishedAt"], now_s))
                elif kind == "DELETED":
                    known = dataclasses.replace(known, ended_s=now_s)
            self._pods[uid] = known
        if "running" in state and uid not in self._followed:
            self._follow(uid)

    def _follow(self, uid: str) -> None:
        """Waits in a thread for the end of the pod's process."""
        found = [pid for pid in processes_with(Env.POD_UID, uid) if not is_beside_a_trainer(_command(pid))]
        if not found:
            return
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(found[0])
            self._followed.add(uid)
            threading.Thread(target=self._wait, args=(uid, handle), name=f"end of {uid}", daemon=True).start()

    def _wait(self, uid: str, handle: int) -> None:
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            ended = bool(poll.poll(_PROCESS_END_S * 1000))
        finally:
            os.close(handle)
        if ended:
            with self._lock:
                self._pods[uid] = dataclasses.replace(self._pods[uid], ended_s=time.time())


def _command(pid: int) -> list[str]:
    """The command line of a process. Empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def within(stamp: str, now_s: float) -> float:
    """Returns when something happened of which the API server has written the second, and which was seen now.

    If it is seen within that second or shortly after it, it was just before; else the second's middle is as good a
    guess as any.
    """
    second = datetime.datetime.fromisoformat(stamp).timestamp()
    if second <= now_s < second + 1:
        return now_s
    return second + 0.5
