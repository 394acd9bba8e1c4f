"""HTTP requests to object stores: sockets, connections that are kept, credentials, repetition and hedging.

``providers`` and the other modules of ``objects`` call it. It needs the standard library alone for requests. Any thread
can end a request that another one waits for.
"""
