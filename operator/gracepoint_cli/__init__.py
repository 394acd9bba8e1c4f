"""The command line: ``kubectl gracepoint``, or ``gracepoint``.

``app`` puts the commands together. ``status``, ``goodput``, ``drill``, ``doctor``, ``signals`` and ``checkpoints`` are
a command each, as are ``lint_command`` and ``timeline_command``, whose computations are in ``lint`` and ``timeline``. A
command reads what it needs, and prints the answer; what it computes is in pure functions. ``cluster`` reads and writes
the API server through the operator's client, and finds a workload by the name that a user gives. It knows the kinds of
the operator's registry.

Nothing else imports this package. The library does not need it, so a training image does not contain it.
"""
