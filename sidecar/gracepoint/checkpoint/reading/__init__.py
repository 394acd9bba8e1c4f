"""Opens stored checkpoints, and reads their values in parallel.

``loading``, ``metadata`` and ``verification`` call it. It calls ``format``, ``steps`` and ``storage``. It knows
nothing of devices, or of what the caller does with the values.
"""
