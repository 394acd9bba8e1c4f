"""One replica reads an array, and the other replicas get it over the network of the devices.

The other modules of ``loading`` and the ``handlers`` call it. It calls ``reading`` and ``planning``, and the protocol
``ProcessGroup`` to agree that reading succeeded everywhere.
"""
