"""Values on their way from the memory of devices to the host's, and the host memory that holds a snapshot.

``writing`` and ``saving`` call it. It calls ``planning``, ``format`` and ``memory``.
"""
