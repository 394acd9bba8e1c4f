"""One process's part of a save, written by this process or by a worker process that outlives it.

``operation`` and ``background`` call it. It calls ``writing``, ``steps`` and ``async_calls``. ``worker_side`` runs in
the worker and loads no JAX.
"""
