"""What a process does from the notice of a preemption until it exits, or until a drill ends.

``session`` is the only caller. Its sessions call ``coordinator.Coordinator``, ``forecast`` and ``reporting``. Its
``attaching``, which has no coordinator yet, calls ``reporting`` and ``stall_detection``. This package calls
``multihost`` (the agreement on one sync point), ``receivers`` (notices in, reports out), ``async_calls`` (the worker
process that looks at this one) and the ``checkpoint`` engine.
"""
