"""What a process does from the notice of a preemption until it exits, or until a drill ends.

``session`` is the only caller, and calls ``coordinator.Coordinator`` alone. This package calls ``multihost`` (the
agreement on one sync point), ``receivers`` (notices in, reports out) and the ``checkpoint`` engine, through the
protocol ``emergency_save.StepSaver``.
"""
