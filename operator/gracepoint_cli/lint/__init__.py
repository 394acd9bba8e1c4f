"""Checks a JobSet, Job or TrainJob before a preemption does.

* ``findings``: what a finding is;
* ``processes``: what becomes of SIGTERM and of the exit code in the container;
* ``pods``: volumes, tolerations, probes and grace periods of the pod templates;
* ``defaults``: what the API server fills into a Job of a file;
* ``trainjob_expansion``: the JobSet that the Kubeflow Trainer makes of a TrainJob of a file;
* ``workloads``: puts these together with the checks that the operator makes at creation;
* ``effects``: what a preemption would do to the workload, in sentences;
* ``manifest_files``: the objects of a file.

Only ``lint_command`` calls it.
"""
