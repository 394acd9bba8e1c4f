"""Where the time of each workload went: an account in which every millisecond is in exactly one category. Pure.

``life`` is one start of a gang, from its pods' creation to their end, with the times at which its stages were reached,
and says what the time can go into. ``accounts`` has the account of one workload: the totals of the lives that are
settled, and the lives that may still change. It suggests how often to save, and how the account is kept in the status
of a policy. ``pods_seen`` finds out from the pods what becomes known of a life, and whether the newest checkpoint is
young enough for a voluntary disruption.

Times are whole milliseconds since the epoch (``_ms``), so that sums are exact.

``recording`` and the command line call it. It calls ``model``, ``workloads``, ``resources`` and ``kube``.
"""
