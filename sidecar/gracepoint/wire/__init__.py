"""What the operator and the library send each other. Both import it; it imports only ``gracepoint.errors``.

``names`` holds labels, paths and environment variables, ``messages`` what a process sends and how every message is
written and read, and ``frames`` what the operator sends to a process. ``snapshot_requests`` is what a client shows to a
snapshot server.
"""
