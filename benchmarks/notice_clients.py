"""Many of the library's own subscribers in one process: what a trainer has, without the training.

Started by ``benchmarks.notice`` with the name of a file of clients. Each client is the library's ``Operator`` (its
subscription and its sender, each with a thread) and a ``Mailbox``, as in a trainer. Lines on standard output:
``connected <n>`` once all are; and for each notice ``told <pod> <preemption> <time> <remaining_s>`` as the mailbox
has it, ``acknowledged ...`` as the operator has answered the receipt, ``retracted ...``. Ends when standard input does.

A gang has machines of its own, and must not take this one's cores from the operator: this runs at a low priority, what
the library logs of a notice is not written, and what is to be said is said a little later, by a thread that ends with
the process.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gracepoint.process_group import SingleProcess
from gracepoint.receivers import Mailbox, OperatorConnection
from gracepoint.receivers.mailbox import Disruption
from gracepoint.receivers.operator import Operator
from gracepoint.settings import Settings
from gracepoint.version import __version__
from gracepoint.wire.messages import Acknowledgement, Message

_CONNECT_TIMEOUT_S = 300.0
_PRIORITY = 5
_SAY_EVERY_S = 0.2
_said: collections.deque[tuple[object, ...]] = collections.deque()  # its ends may be used by any thread


def say(*words: object) -> None:
    """One line, soon."""
    _said.append(words)


def _say_all() -> None:
    while True:
        time.sleep(_SAY_EVERY_S)
        while _said:
            print(*_said.popleft())
        sys.stdout.flush()


class TimedMailbox(Mailbox):
    """Tells when a notice is here."""

    def __init__(self, pod: str) -> None:
        super().__init__(time.monotonic)
        self._pod = pod

    def post(self, disruption: Disruption) -> None:
        at = time.time()
        super().post(disruption)
        say("told", self._pod, disruption.preemption, f"{at:.6f}", disruption.remaining_s)

    def retract(self, origin: str, reason: str = "") -> None:
        super().retract(origin, reason)
        say("retracted", self._pod, origin, f"{time.time():.6f}")


class TimedChannel(OperatorConnection):
    """Tells when a receipt was taken; each goes over a connection of its own."""

    def __init__(self, url: str, ca_certificate: str | None, token_file: str, pod: str) -> None:
        super().__init__(url, ca_certificate, token_file)
        self._pod = pod

    def post(self, path: str, message: Message, *, timeout_s: float) -> bytes:
        answer = super().post(path, message, timeout_s=timeout_s)
        if isinstance(message, Acknowledgement):
            say("acknowledged", self._pod, message.preemption, f"{time.time():.6f}")
        self.close()  # as one that idled until then would have been
        return answer


class TimedOperator(Operator):
    """The library's, over channels that tell."""

    def _channel(self) -> OperatorConnection:
        settings = self._settings
        assert settings.operator_url is not None
        return TimedChannel(
            settings.operator_url, settings.ca_certificate, settings.token_file, settings.pod_name or ""
        )


class Place(SingleProcess):
    """Where a client stands in the gang; nothing else of a gang is asked for."""

    def __init__(self, index: int, count: int) -> None:
        self.process_index = index
        self.process_count = count


def connect(client: dict[str, Any]) -> Operator:
    """Starts one client."""
    operator = TimedOperator(Settings(**client["settings"]), time.monotonic)
    index, count = client["index"], client["count"]
    operator.subscribe(
        f"session-{index}", Place(index, count), TimedMailbox(client["settings"]["pod_name"]), __version__
    )
    return operator


def main() -> None:
    os.nice(_PRIORITY)
    logging.getLogger("gracepoint").setLevel(logging.ERROR)
    threading.Thread(target=_say_all, daemon=True).start()
    clients = [connect(client) for client in json.loads(Path(sys.argv[1]).read_text())]
    give_up_at = time.monotonic() + _CONNECT_TIMEOUT_S
    for done, client in enumerate(clients):
        if not client.wait_until_connected(max(give_up_at - time.monotonic(), 0.0)):
            sys.exit(f"{len(clients) - done} of {len(clients)} clients not connected in {_CONNECT_TIMEOUT_S:.0f} s")
    say("connected", len(clients))
    sys.stdin.read()


if __name__ == "__main__":
    main()
