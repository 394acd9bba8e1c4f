"""What the operator and the library send each other. Standard library only; both sides call it, and it calls nothing.

``names`` holds labels, paths and environment variables. ``frames`` holds what the operator sends to a process,
``messages`` what a process sends, and ``codec`` how both are read and written.
"""
