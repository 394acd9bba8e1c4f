"""Where the time of each workload went: an account in which every millisecond is in exactly one category. Pure.

``categories`` names what the time can go into. ``life`` is one start of a gang, from its pods' creation to their end,
with the times at which its stages were reached. ``ledger`` is the account of one workload: the totals of the lives that
are settled, and the lives that may still change. ``observations`` is what becomes known of them: ``pods_seen`` finds it
out from the pods, and ``reported_times`` reads what a process said, which ``life_updates`` puts into a life.
``save_interval`` suggests from the account how often to save, ``exposure`` says whether the newest checkpoint is young
enough for a voluntary disruption, and ``status_codec`` keeps the account in the status of a policy.

Times are whole milliseconds since the epoch (``_ms``), so that sums are exact.

``recording`` and the command line call it. It calls ``model``, ``workloads``, ``resources`` and ``kube``.
"""
