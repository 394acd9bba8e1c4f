"""Tells the operator how far a preemption is and what the time went into, by one process for all.

``preemption``, ``stall_detection`` and ``session`` call it. It calls ``receivers`` to send, ``multihost`` to learn who
reports if process 0 does not run, and ``forecast``.
"""
