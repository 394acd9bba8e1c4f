"""What ``attach`` does before a session is open: checks arguments, loads modules ahead, joins, says if it hangs.

User code calls ``attach`` alone, as ``gracepoint.attach``. It calls ``multihost``, ``checkpoint``, ``preemption`` and
``session``.
"""
