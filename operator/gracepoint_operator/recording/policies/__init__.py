"""Writes the statuses of policies: conditions, connected pods, stalls, and where the time of each workload goes.

The controller, ``channel`` and ``preemption_writer`` call it. It calls ``event_recorder``, ``decisions``, ``goodput``
and ``kube``.
"""
