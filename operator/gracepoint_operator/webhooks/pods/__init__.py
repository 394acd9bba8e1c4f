"""What the webhook puts into pods: label, environment, token, keeper, node affinity.

``routes`` calls it. It calls ``training_jobs`` and ``pod_template``. All of it is pure.
"""
