"""Checks a JobSet, Job or TrainJob before a preemption does.

* ``job_checks``: checks one workload, together with the checks that the operator makes at creation; says what a
  preemption would do to it;
* ``pods``: the pod templates: time to save, volumes, tolerations, probes, and what becomes of SIGTERM and of the exit
  code in the container;
* ``manifests``: the objects of a file, and the JobSet that the Kubeflow Trainer makes of a TrainJob.

Only ``lint_command`` calls it.
"""
