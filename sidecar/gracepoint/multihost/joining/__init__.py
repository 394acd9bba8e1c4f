"""Joins the JAX cluster: finds it from the pod's environment, waits for process 0, and exchanges names.

``session`` and ``preemption`` call this package, and so do ``all_processes`` and ``utilities``. It calls
``coordination``. Only ``distributed_state`` and ``distributed`` touch JAX's distributed state.
"""
