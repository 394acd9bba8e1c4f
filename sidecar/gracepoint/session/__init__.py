"""What a training loop holds: attach, the session, its sync points and its periodic saves.

User code calls ``attach`` and ``Session``. This package calls ``preemption``, ``compile_cache``, ``checkpoint``,
``multihost`` and ``receivers``.
"""
