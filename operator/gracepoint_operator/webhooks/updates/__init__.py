"""Later changes of a workload: what its creation filled in is kept, and new pods get the size that it has now.

``routes``, the server and the command line call it. It calls ``training_jobs``.
"""
