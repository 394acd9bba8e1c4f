"""Writes what was decided to the API server: Preemptions, the status of policies and requests, Events.

The controller and ``channel`` call it. Nothing that notifies a pod waits for it. It calls ``kube`` and reads ``cache``.
"""
