"""What the webhook puts into pods: label, environment, token, keeper, node affinity.

``routes`` and ``creation_warnings`` call it. It calls ``training_jobs``, ``pod_template``, ``model``, ``kube`` and
``resources``. All of it is pure.
"""
