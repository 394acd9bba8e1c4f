"""Starts a worker process: ``python -m gracepoint.async_calls FD``, where FD is its socket to the trainer."""

import socket
import sys

from gracepoint.async_calls.worker import main

main(socket.socket(fileno=int(sys.argv[1])))
