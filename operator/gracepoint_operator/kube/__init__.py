"""The API server: its client, the kinds of objects, small records read from them, and a queue of writes.

Every package that reads or writes the cluster calls it. It calls only ``logs`` and ``metrics``.
"""
