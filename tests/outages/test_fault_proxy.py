"""The proxy itself, in front of a server that answers no goodbye."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
import urllib.request
import warnings
from pathlib import Path

import trustme

from tests.outages.fault_proxy import FaultProxy


def _endless(listener: socket.socket, tls: ssl.SSLContext, ends: threading.Event) -> None:
    """Answers one request with the beginning of a stream, and reads no more from then on."""
    with listener.accept()[0] as accepted, tls.wrap_socket(accepted, server_side=True) as connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx")
        ends.wait(60)


def test_it_leaves_no_connection_behind_when_the_server_does_not_answer_its_goodbye(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    ends = threading.Event()
    gc.collect()  # what earlier tests have left is not of this one
    with warnings.catch_warnings(record=True) as seen, socket.create_server(("127.0.0.1", 0)) as listener:
        warnings.simplefilter("always")
        server = threading.Thread(target=_endless, args=(listener, tls, ends), daemon=True)
        server.start()
        port = listener.getsockname()[1]
        proxy = FaultProxy(f"https://127.0.0.1:{port}", tmp_path / "ca.pem")
        try:
            with urllib.request.urlopen(f"{proxy.url}/x", timeout=60) as answer:
                assert answer.read(1) == b"x"
                proxy.cut()
            proxy.close()
            gc.collect()
        finally:
            ends.set()
        server.join(60)
    assert not [text for warning in seen if f"raddr=('127.0.0.1', {port})" in (text := str(warning.message))]
