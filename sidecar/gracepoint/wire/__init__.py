"""What the operator and the library send each other. Both import it; it imports only ``gracepoint.errors``.

``names`` holds labels, paths and environment variables. ``frames`` holds what the operator sends to a process,
``messages`` what a process sends, ``spent`` parts of such messages, and ``codec`` how all are read and written.
"""
