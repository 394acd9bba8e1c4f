"""What the operator and the library send each other. Standard library only. Both sides import it; it imports neither.

``names`` holds labels, paths and environment variables. ``frames`` holds what the operator sends to a process,
``messages`` what a process sends, ``spent`` parts of such messages, and ``codec`` how all are read and written.
"""
