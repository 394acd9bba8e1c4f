"""What a process does from the notice of a preemption until it exits, or until a drill ends.

``session`` is the only caller. Its sessions call ``coordinator.Coordinator``, ``forecast`` and ``reporter``. Its
``attach``, which has no coordinator yet, calls ``reporter`` and ``stall_detector``. This package calls
``multihost`` (the agreement on one sync point), ``receivers`` (notices in, reports out), ``async_calls`` (the worker
process that looks at this one) and the ``checkpoint`` engine.
"""
