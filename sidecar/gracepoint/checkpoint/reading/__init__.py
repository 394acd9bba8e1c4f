"""Opens stored checkpoints, and reads their values in parallel.

``restoring``, ``handlers``, ``metadata``, ``verification`` and the session call it. It calls ``format``, ``planning``,
``steps`` and ``storage``. It does not know where the caller places the values.
"""
