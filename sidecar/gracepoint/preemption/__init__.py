"""From a notice to the exit of the process: agree, decide what fits, save, report, leave.

``session`` calls it. It calls ``multihost``, ``receivers`` and, through a protocol, the checkpoint engine.
"""
