"""Watches the cloud's metadata server, from inside the pod, for notices that this machine is going to end.

The operator sees most of these notices earlier, and for all pods at once. This package is for the time when the
operator is down, and for notices that appear on no Kubernetes object. It is off unless ``GRACEPOINT_METADATA`` names a
cloud.

Threads, all daemons, all ended by ``MetadataWatchers.close``:

* "gracepoint-metadata", only with ``auto``: finds out which cloud this is, starts the watchers of that cloud, and ends.
* "gracepoint-metadata-<cloud>-<what>": one for each ``Watcher``. Google's server answers when something changes, so
  each of its keys has a thread that blocks in a request. AWS and Azure are polled by one thread each.

A watcher owns its HTTP client, its sources and their boards. Watchers share only the mailbox, which is thread-safe.
Nothing here can make training wait or fail. An error is logged once, and the request is tried again.

One look at a source returns all events of that moment (``Look``). The source's ``Board`` compares them with the events
of the look before, and posts, moves or retracts notices. A look that failed changes nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from gracepoint.deadline import Backoff, jittered
from gracepoint.receivers.mailbox import Mailbox
from gracepoint.receivers.metadata import aws, azure, gce
from gracepoint.receivers.metadata.source import Board, MetadataClient, MetadataError, WatchGroup
from gracepoint.settings import Settings
from gracepoint.wire.names import METADATA_AUTO

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


def detect(client: MetadataClient) -> str | None:
    """Returns the name of the cloud whose metadata server answers. None if none answers. Takes at most 12 s."""
    for cloud, is_it in _QUESTIONS.items():
        try:
            if is_it(client):
                return cloud
        except MetadataError:
            continue
    return None


def _gce(client: MetadataClient) -> bool:
    # The server also sends this header; see cloud.google.com/compute/docs/instances/detect-compute-engine.
    answer = client.request("/", gce.HEADERS, timeout_s=_TIMEOUT_S)
    return answer.headers.get("metadata-flavor") == "Google"


def _azure(client: MetadataClient) -> bool:
    answer = client.request(azure.NAME_PATH, azure.HEADERS, timeout_s=_TIMEOUT_S)
    return answer.status == 200


def _aws(client: MetadataClient) -> bool:
    answer = client.request(aws.TOKEN_PATH, aws.TOKEN_TTL_HEADERS, timeout_s=_TIMEOUT_S, method="PUT")
    return answer.status == 200 and answer.text.strip() != ""


_QUESTIONS: dict[str, Callable[[MetadataClient], bool]] = {"gce": _gce, "azure": _azure, "aws": _aws}


#: The same in all three clouds. The address is link-local, so requests do not leave the machine and need no DNS.
BASE_URL = "http://169.254.169.254"
_MOST_BACKOFF_S = 30.0
_JITTER = 0.2
_JOIN_S = 1.0


class Watcher:
    """A thread that looks at a group of sources repeatedly.

    Args:
        group: The sources.
        boards: One board for each source.
    """

    def __init__(self, group: WatchGroup, boards: Sequence[Board]) -> None:
        self._group = group
        self._boards = boards
        self._closed = threading.Event()
        self._said: set[str] = set()  # errors that were logged since the last look without an error
        self._thread = threading.Thread(target=self._run, name=f"gracepoint-metadata-{group.name}", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Tells the thread to end."""
        self._closed.set()
        self._group.client.interrupt()

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended, for at most ``timeout_s``."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff = Backoff(first_s=1.0, most_s=_MOST_BACKOFF_S)
        while True:
            answered, trouble = self._look()
            if self._closed.is_set():
                return
            self._say(trouble)
            if answered:
                backoff.reset()
                pause_s = jittered(min(source.pause_s for source in self._group.sources), _JITTER)
            else:
                pause_s = backoff.next_s()
            if self._closed.wait(pause_s):
                return

    def _look(self) -> tuple[bool, str]:
        """Looks once at each source. Returns whether any look succeeded, and the first error, or an empty text."""
        answered, trouble = False, ""
        for source, board in zip(self._group.sources, self._boards, strict=True):
            try:
                look = source.look()
            except MetadataError as error:
                trouble = trouble or str(error)
            else:
                answered = True
                board.update(look)
        return answered, trouble

    def _say(self, trouble: str) -> None:
        # Each error is logged once, so a server that cannot be reached for a day does not fill the log.
        if trouble and trouble not in self._said:
            self._said.add(trouble)
            logger.warning(
                "cannot read what the cloud announces, trying again watcher=%s error=%s", self._group.name, trouble
            )
        elif self._said and not trouble:
            self._said.clear()
            logger.info("the cloud's metadata can be read again watcher=%s", self._group.name)


class MetadataWatchers:
    """Watches the metadata of the given clouds.

    Args:
        clouds: ``gce``, ``aws`` or ``azure``. ``auto`` alone detects the cloud.
        mailbox: Gets the notices.
        host: The name of this machine in the notices.
        in_pod: True if Kubernetes ends the processes of this machine before the machine ends.
        grace_period_s: Seconds that a pod lives after a SIGTERM. Assumed as the time left if a cloud gives none.
        gce_notice_s: Seconds of the instance's ``preemptionNoticeDuration``. 0: it has none.
        base_url: The address of the metadata server.
    """

    def __init__(
        self,
        clouds: Sequence[str],
        mailbox: Mailbox,
        *,
        host: str,
        in_pod: bool,
        grace_period_s: float,
        gce_notice_s: float = 0.0,
        base_url: str,
    ) -> None:
        self._mailbox = mailbox
        self._host = host
        self._in_pod = in_pod
        self._grace_period_s = grace_period_s
        self._gce_notice_s = gce_notice_s
        self._base_url = base_url
        self._lock = threading.Lock()  # guards _closed and _watchers
        self._closed = False
        self._watchers: list[Watcher] = []
        self._probe = self._client()
        self._seeker = threading.Thread(target=self._detect, name="gracepoint-metadata", daemon=True)
        if METADATA_AUTO in clouds:
            self._seeker.start()
        else:
            for cloud in clouds:
                self._watch(cloud)

    @classmethod
    def known_to(cls, settings: Settings, mailbox: Mailbox) -> Self | None:
        """Returns the watchers that the settings ask for. None if they ask for none."""
        if not settings.metadata:
            return None
        return cls(
            settings.metadata,
            mailbox,
            host=settings.node_name or settings.pod_name or socket.gethostname(),
            in_pod=settings.pod_uid is not None,
            grace_period_s=settings.grace_period_s,
            gce_notice_s=settings.gce_notice_s,
            base_url=BASE_URL,
        )

    def close(self) -> None:
        """Ends all threads. Safe to repeat."""
        with self._lock:
            self._closed = True
            watchers = list(self._watchers)  # none is added after this
        self._probe.interrupt()
        for watcher in watchers:
            watcher.interrupt()
        give_up_at_s = time.monotonic() + _JOIN_S
        if self._seeker.is_alive():
            self._seeker.join(_JOIN_S)
        for watcher in watchers:
            watcher.join(max(0.0, give_up_at_s - time.monotonic()))

    def _detect(self) -> None:
        cloud = detect(self._probe)
        if cloud is not None:
            logger.info("detected cloud=%s", cloud)
            self._watch(cloud)
        elif not self._closed:
            logger.warning("no cloud's metadata is watched, as none answered base_url=%s", self._base_url)

    def _watch(self, cloud: str) -> None:
        for group in self._groups(cloud):
            boards = [Board(cloud, self._host, self._mailbox) for _ in group.sources]
            with self._lock:
                if self._closed:
                    return
                self._watchers.append(Watcher(group, boards))
        logger.info("watching the cloud's metadata cloud=%s", cloud)

    def _groups(self, cloud: str) -> list[WatchGroup]:
        grace_s = self._grace_period_s
        if cloud == "gce":
            preempted_s = min(gce.PREEMPTED_POD_S, grace_s) if self._in_pod else gce.PREEMPTED_VM_S
            return gce.groups(self._client, preempted_s=self._gce_notice_s + preempted_s, grace_period_s=grace_s)
        if cloud == "aws":
            return aws.groups(self._client, grace_period_s=grace_s)
        return azure.groups(self._client, grace_period_s=grace_s)

    def _client(self) -> MetadataClient:
        return MetadataClient(self._base_url)


__all__ = ["MetadataWatchers"]
