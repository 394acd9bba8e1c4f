"""What a training loop holds: attach, the session, its sync points and its periodic saves.

User code calls ``attach`` and ``Session``. This package calls ``preemption``, ``checkpoint``, ``multihost``
and ``receivers``.
"""
