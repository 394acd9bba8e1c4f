"""Writes one process's files of one save, in parallel and durably.

``saving`` and ``handlers`` call it. It calls ``planning``, ``format``, ``storage`` and ``memory``. It knows nothing of
other processes or of steps.
"""
