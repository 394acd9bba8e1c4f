"""Runs a save from the state to the commit, in the background or while the caller waits, and decides when one is due.

A save passes three classes: a checkpointer (``engine``, ``async_checkpointer``) says what is saved where and what
follows the commit, ``executor.SaveExecutor`` runs the saves one at a time, and ``operation.SaveOperation`` is one save.
"""
