"""Checks a JobSet before a preemption does.

* ``findings``: what a finding is;
* ``processes``: what becomes of SIGTERM and of the exit code in the container;
* ``pods``: volumes, tolerations, probes and grace periods of the pod templates;
* ``jobsets``: puts these together with the checks that the operator makes at creation;
* ``effects``: what a preemption would do to the JobSet, in sentences;
* ``manifests``: the objects of a file.
"""
