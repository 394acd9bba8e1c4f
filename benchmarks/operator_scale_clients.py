"""Many connected pods in one process: each subscribes, is told, and sends its receipt, as the library does.

    python -m benchmarks.operator_scale_clients FILE

The file has ``{"ca": PEM, "ports": [...], "clients": [...]}``. Each client connects from an address of its own. If its
stream ends, it connects to the next port, as pods do through a Service. Lines on standard output, each a JSON list:
``["connected", n]`` whenever the number of open streams changed, ``["told", pod UID, preemption, time]``,
``["retracted", ...]`` and ``["acknowledged", ...]``; ``["placed", pod UID, "", time]``: it may write to snapshot
servers. Ends when standard input does.

One event loop, with one task for each client and one that writes the lines. It runs at a low priority, as the pods of a
gang would have processors of their own.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import json
import os
import random
import ssl
import sys
import time
from pathlib import Path
from typing import Any

from gracepoint.process_group import SingleProcess
from gracepoint.receivers.operator import receipt_after_s
from gracepoint.version import __version__
from gracepoint.wire import names
from gracepoint.wire.messages import Acknowledgement, Subscription

_PRIORITY = 5
_SAY_EVERY_S = 0.2
_HANDSHAKES_AT_ONCE = 64
_CONNECT_TIMEOUT_S = 60.0
_AGAIN_S = (0.2, 1.0)
_TLS_BUFFER_BYTES = 16 * 1024


class Place(SingleProcess):
    """Where a client stands in its gang."""

    def __init__(self, index: int, count: int) -> None:
        self.process_index = index
        self.process_count = count


class Client:
    """One pod.

    Args:
        known: Its entry in the file.
        ports: Where the replicas listen; it begins with the first.
        context: Trusts their certificate.
        at_once: Limits how many connect at the same time.
        said: Gets the lines.
    """

    connected = 0

    def __init__(
        self,
        known: dict[str, Any],
        ports: list[int],
        context: ssl.SSLContext,
        at_once: asyncio.Semaphore,
        said: list[list[Any]],
    ) -> None:
        self._known = known
        self._ports = ports
        self._context = context
        self._at_once = at_once
        self._said = said
        self._session = f"session-{known['pod_uid']}"
        self._receipts: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Stays connected until cancelled."""
        while True:
            with contextlib.suppress(OSError, ValueError, EOFError, TimeoutError, asyncio.IncompleteReadError):
                await self._subscribed()
            self._ports = [*self._ports[1:], self._ports[0]]
            await asyncio.sleep(random.uniform(*_AGAIN_S))

    async def _subscribed(self) -> None:
        known = self._known
        who = Subscription(
            namespace=known["namespace"],
            pod_name=known["pod_name"],
            pod_uid=known["pod_uid"],
            session=self._session,
            workload_uid=known["workload_uid"],
            restart_attempt=0,
            process_index=known["index"],
            process_count=known["count"],
            library_version=__version__,
            takes_hints=False,
            takes_snapshots=True,
        )
        async with self._at_once:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await self._request(names.PATH_SUBSCRIBE, who.to_json())
                await reader.readline()  # the chunk's length
                await reader.readline()  # Hello
                await reader.readline()
        Client.connected += 1
        try:
            while (length := int(await reader.readline(), 16)) > 0:
                lines = (await reader.readexactly(length + 2)).split(b"\n")
                for line in lines:
                    if line.strip():
                        self._take(json.loads(line))
        finally:
            Client.connected -= 1
            writer.transport.abort()

    def _take(self, frame: dict[str, Any]) -> None:
        if frame.get("write_to"):
            self._said.append(["placed", self._known["pod_uid"], "", time.time()])
        if "preemption" not in frame:
            return  # a ping
        what = "told" if "deadline" in frame else "retracted"
        self._said.append([what, self._known["pod_uid"], frame["preemption"], time.time()])
        if what == "told":
            receipt = asyncio.create_task(self._acknowledge(frame["preemption"]))
            self._receipts.add(receipt)
            receipt.add_done_callback(self._receipts.discard)

    async def _acknowledge(self, preemption: str) -> None:
        known = self._known
        await asyncio.sleep(receipt_after_s(Place(known["index"], known["count"])))
        receipt = Acknowledgement(
            pod_uid=known["pod_uid"], session=self._session, preemption=preemption, process_index=known["index"]
        )
        until_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while time.monotonic() < until_s:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    _, writer = await self._request(names.PATH_ACKNOWLEDGE, receipt.to_json())
            except (OSError, ValueError, EOFError, TimeoutError):
                await asyncio.sleep(random.uniform(*_AGAIN_S))  # the library tries again, too
                continue
            writer.transport.abort()
            self._said.append(["acknowledged", known["pod_uid"], preemption, time.time()])
            return

    async def _request(self, path: str, body: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects and sends a request. Returns once its status and headers are read.

        Raises:
            ValueError: It was refused.
        """
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self._ports[0],
            ssl=self._context,
            server_hostname="localhost",
            local_addr=(self._known["address"], 0),
        )
        try:
            head = [
                f"POST {path} HTTP/1.1",
                "Host: localhost",
                f"Authorization: Bearer {self._known['token']}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            ]
            writer.write("\r\n".join([*head, "", body]).encode())
            status = await reader.readline()
            if b" 20" not in status:
                raise ValueError(f"refused: {status!r}")
            while (await reader.readline()).strip():
                pass
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


async def run(given: dict[str, Any]) -> None:
    """Runs all clients until standard input ends. ``given``: what the file has."""
    asyncio.sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
    context = ssl.create_default_context(cadata=given["ca"])
    at_once = asyncio.Semaphore(_HANDSHAKES_AT_ONCE)
    said: list[list[Any]] = []
    ports = given["ports"]
    clients = [
        Client(known, ports[known["first_port"] :] + ports[: known["first_port"]], context, at_once, said)
        for known in given["clients"]
    ]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    ends = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    before = -1
    while not ends.done():
        await asyncio.sleep(_SAY_EVERY_S)
        lines, said[:] = list(said), []
        if Client.connected != before:
            before = Client.connected
            lines.append(["connected", before])
        for line in lines:
            print(json.dumps(line))
        sys.stdout.flush()
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    os.nice(_PRIORITY)
    asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))
