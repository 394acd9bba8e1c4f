"""Finds what makes no progress: a part of this process, this process as its worker sees it, or another process.

``coordinator``, ``outcome`` and ``session.attaching`` call it. It calls ``reporting`` to tell the operator,
``process_exit`` to end this process, ``multihost`` for what the other processes say, and ``async_calls`` for memory
that the worker shares.
"""
