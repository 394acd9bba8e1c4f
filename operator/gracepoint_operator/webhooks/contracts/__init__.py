"""Release contracts: what a JobSet or Job must say so that an exit after a save restarts it without counting.

``routes``, the server and the command line call it. It calls ``training_jobs`` and ``pod_template``. All of it is pure.
"""
