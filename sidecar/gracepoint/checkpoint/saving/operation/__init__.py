"""One save in one process: planned, written, made durable, and committed together with the other processes.

``background``, the checkpointers and ``loading`` call it. It calls ``process_part``, ``planning``, ``transfer``,
``writing`` and ``steps``.
"""
