"""What ``attach`` does before a session is open: checks arguments, loads modules ahead, joins, says if it hangs.

User code calls ``attach`` alone, as ``gracepoint.attach``. This package calls ``multihost``, ``compile_cache``,
``checkpoint``, ``receivers``, ``preemption`` and the rest of ``session``.
"""
