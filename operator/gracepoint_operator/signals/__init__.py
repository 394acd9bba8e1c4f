"""The disruption catalogue: what in the cluster says that a pod is going to be disrupted. Data and pure code.

* ``rows``: what a row contains: how to recognise a signal, its cause, how certain it is, whether it may be taken back,
  and when the pod will be gone;
* ``catalogue``: the built-in rows, the rows of users, and the list of all in the docs;
* ``matching``: which rows match an object of the API server (``Mark``), the time that it names, and what the marks mean
  for a pod (``Signal``).

Rows of confidence "hint" let a gang prepare, and start no preemption.

``model``, the packages above it and the command line call it. It calls ``resources`` and ``kube``.
"""

from gracepoint_operator.signals.catalogue import BUILT_IN, GKE_SPOT_GRACE_S, UserRowsError, read_user_rows
from gracepoint_operator.signals.matching import (
    HORIZON_S,
    KNOWN_TO_GANG,
    REPORTED_BEFORE,
    REPORTED_BY_GANG,
    Mark,
    Signal,
    is_suspension,
    marks,
    marks_node,
    of_pod,
    reported_by_gang,
)
from gracepoint_operator.signals.rows import Cause, On, Row

__all__ = [
    "BUILT_IN",
    "GKE_SPOT_GRACE_S",
    "HORIZON_S",
    "KNOWN_TO_GANG",
    "REPORTED_BEFORE",
    "REPORTED_BY_GANG",
    "Cause",
    "Mark",
    "On",
    "Row",
    "Signal",
    "UserRowsError",
    "is_suspension",
    "marks",
    "marks_node",
    "of_pod",
    "read_user_rows",
    "reported_by_gang",
]
