"""Ports of the loopback for servers that have to be told theirs, and connections on it that fall silent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Gives ports that the kernel chose, all different, and that it gives to nobody else until the end of the block.

    A server that sets SO_REUSEADDR, as those written in Go and with asyncio do, can listen on them: the sockets that
    hold them do not listen (Linux, ``inet_csk_bind_conflict``).
    """
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [int(one.getsockname()[1]) for one in held]


def hold_coordinator_port() -> socket.socket:
    """Holds a port that the kernel chose until the socket is closed.

    The coordination service can listen on it meanwhile, as gRPC sets SO_REUSEPORT, and so can process 0 while it waits
    for the others, as it sets SO_REUSEADDR.
    """
    held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("::", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


_SO_ATTACH_FILTER = 26
#: A program of the kernel's packet filter: no byte of a packet is taken.
_TAKE_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)


def silence(sock: socket.socket) -> None:
    """Has the kernel answer nothing more on a TCP socket, as that of a machine that is off: the other end sees no end.

    A filter of Linux drops what comes, before it is acknowledged. On a socket that listens, nobody is accepted.
    """
    program = ctypes.create_string_buffer(_TAKE_NOTHING, len(_TAKE_NOTHING))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)


def silence_all() -> None:
    """The same for all sockets of this process that are on TCP."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:  # else it is no socket
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                silence(sock)
