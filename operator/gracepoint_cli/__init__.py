"""The command line: ``kubectl gracepoint``, or ``gracepoint``.

``app`` puts the commands together. Each module of ``commands`` has the arguments of one command, reads what it needs,
and prints the answer. What is computed is in pure modules: ``status_report`` (status), ``goodput_report`` (goodput),
``drill_report`` (drill), ``timeline``, ``lint`` and ``doctor``. ``cluster`` reads and writes the API server through the
operator's client. ``workloads`` finds a workload in the cluster by the name that a user gives (``naming``). It knows
the kinds of the operator's registry.

Nothing else imports this package. The library does not need it, so a training image does not contain it.
"""
