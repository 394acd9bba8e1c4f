"""Which steps a directory holds: commit, recovery after a crash, listing, retention, deletion, and who may use it.

``saving``, ``reading`` and ``loading`` call it. It calls ``format`` and ``storage``. Everything here is safe against
a crash after any operation, and against other processes that do the same at the same time.
"""
