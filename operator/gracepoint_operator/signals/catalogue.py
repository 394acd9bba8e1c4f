"""The built-in rows of the disruption catalogue, in the order in which they are tried.

The ``about`` of a row says where its deadline comes from. If a signal tells no time, the pod's own grace period is
assumed, because a pod that is deleted or evicted at once gets this time.
"""

from __future__ import annotations

from gracepoint_operator.signals import clouds, jobs_and_nodes
from gracepoint_operator.signals.rows import Row

BUILT_IN: tuple[Row, ...] = (*clouds.ROWS, *jobs_and_nodes.ROWS)
