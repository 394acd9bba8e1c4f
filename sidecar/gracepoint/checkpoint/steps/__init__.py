"""The steps of a directory: commit, recovery after a crash, listing, retention, deletion, and the directory's lease.

``saving``, ``reading``, ``restoring``, ``engine`` and ``checkpoint_manager`` call it. It calls ``format``, ``storage``
and ``memory``. A crash after any operation leaves the directory valid. Several processes may run the same operation at
the same time.
"""
