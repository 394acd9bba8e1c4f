"""Checks an installation.

* ``checks``: what a check says;
* ``installation``: versions, definitions, the operator, webhooks, certificates; from objects of the API;
* ``probe_pod``: a pod like those of a job, which checks the channel and the storage from where the job runs.

Only ``commands.doctor`` calls it.
"""
