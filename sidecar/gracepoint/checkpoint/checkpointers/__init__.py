"""What the session and the public checkpointers are made of: saves to steps of a directory, or to single paths.

The session, ``AsyncCheckpointer``, ``CheckpointManager`` and ``handlers`` call it. It calls ``saving``, ``loading`` and
``steps``.
"""
