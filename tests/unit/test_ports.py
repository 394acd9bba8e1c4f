"""Ports that tests hold for a server."""

from __future__ import annotations

import errno
import socket

import pytest

from tests.ports import held_ports, hold_coordinator_port


def test_a_server_listens_on_a_held_port_again_and_again() -> None:
    with held_ports(1) as (port,):
        for _ in range(2):
            with (
                socket.create_server(("127.0.0.1", port)) as server,
                socket.create_connection(("127.0.0.1", port), timeout=10) as client,
            ):
                server.accept()[0].close()
                assert client.recv(1) == b""


def test_nobody_else_is_given_a_held_port() -> None:
    with held_ports(3) as ports:
        assert len(set(ports)) == 3
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use") as raised:
                other.bind(("127.0.0.1", port))
            assert raised.value.errno == errno.EADDRINUSE


def test_a_port_is_free_after_the_block() -> None:
    with held_ports(1) as (port,):
        pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_shares_ports_listens_on_a_coordinators_port_and_nobody_else_does(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with hold_coordinator_port() as held:
        port = held.getsockname()[1]
        with (
            socket.create_server((host, port), family=family, reuse_port=True) as server,
            socket.create_connection((host, port), timeout=10) as client,
        ):
            server.accept()[0].close()
            assert client.recv(1) == b""
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
