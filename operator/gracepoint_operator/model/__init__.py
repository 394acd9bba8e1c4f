"""What decisions are made on: preemptions, requests, evictions and gangs as immutable records.

Pure. ``cache`` makes them, ``decisions`` reads them.
"""
