"""The agreement of all processes on one sync point, at which they save.

``preemption`` calls it. It calls ``coordination``. ``protocol`` and ``ledger`` are the rules, without threads and
without a clock. ``bell`` is the log in the key-value store from which all processes read the same entries in the same
order.
"""
