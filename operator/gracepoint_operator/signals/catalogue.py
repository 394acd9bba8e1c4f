"""The built-in rows of the disruption catalogue, in the order in which they are tried.

Where a deadline comes from stands in the row's ``about``. What says nothing of when: the pod's own grace period is
assumed, as that is what a pod gets that is deleted or evicted at once.
"""

from __future__ import annotations

from gracepoint_operator.signals import clouds, jobs_and_nodes
from gracepoint_operator.signals.rows import Row

BUILT_IN: tuple[Row, ...] = (*clouds.ROWS, *jobs_and_nodes.ROWS)
