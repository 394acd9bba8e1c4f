"""What uses up a workload's restarts, by the real controllers: ``python -m tests.restart_budget``.

A real API server, Job controller, scheduler, JobSet controller and operator work on nodes and pods that no kubelet
runs: a test sets their states as a kubelet does. Each failure of the infrastructure must leave the restarts that count
as they are, and must be named within half a minute. Each error of the program must count.
"""
