"""Values in the memory of a node, for the workloads of many namespaces: a server, and its client.

``python -m gracepoint.snapshots`` runs the server. It knows no checkpoint format: it keeps named values with a
checksum each, and serves put, get of ranges, list and drop over TLS. A key is ``STEP/ATTEMPT/PART/PATH``: the step, the
attempt of the workload that wrote it, the process's part, and a path of any depth. Who may do what is said by a
capability (``gracepoint.wire.snapshot_requests``), and by nothing else.

* ``exchange`` is what both sides send: frames, keys, refusals.
* ``held_values`` is what a server holds, and the exact account of its memory. It has no threads and no sockets.
* ``snapshot_server`` is ports, threads and limits. ``snapshot_client`` is the other side.
* ``snapshot_servers`` is what one process of a job sees of many servers: where its part goes, and where others are.

It needs the standard library alone. With ISA-L (``gracepoint[jax]``), checksums cost a fifth.
"""
