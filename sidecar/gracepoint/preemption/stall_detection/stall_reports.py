"""What follows from a stall: a report to the operator and, if the settings say so, the end of this process.

The threads of the stall watch call everything here but ``watch``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gracepoint.multihost.coordination.stalls import StallBoard, Suspicion
from gracepoint.multihost.naming import Pods, pods_of
from gracepoint.preemption.process_exit import ProcessExit
from gracepoint.preemption.reporting.reporter import Reporter
from gracepoint.preemption.stall_detection import trainer_watch
from gracepoint.preemption.stall_detection.stall_detector import Activity, Stalled
from gracepoint.preemption.stall_detection.stall_watch import StallWatch
from gracepoint.process_group import ProcessGroup
from gracepoint.settings import Settings
from gracepoint.wire.names import STALL_RESTART

log = logging.getLogger(__name__)


class StallReports:
    """See the module.

    Args:
        settings: Say whether a stall ends the process, and with which exit code.
        reporter: Tells the operator.
        process_exit: Ends the process.
        step: Returns the step that training has reached.
    """

    def __init__(
        self, settings: Settings, reporter: Reporter, process_exit: ProcessExit, step: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._reporter = reporter
        self._exit = process_exit
        self._step = step
        self._pods: Pods = ()

    def watch(
        self,
        workers: trainer_watch.Workers,
        group: ProcessGroup,
        activities: Callable[[], Sequence[Activity]],
        board: StallBoard,
        pods: Pods,
        clock: Callable[[], float],
    ) -> StallWatch | None:
        """Begins to watch this process, also from its worker processes. Called in the training thread.

        Args:
            workers: Has the worker processes.
            group: The processes.
            activities: As ``StallWatch``.
            board: As ``StallWatch``.
            pods: As ``StallWatch``.
            clock: As ``StallWatch``.

        Returns:
            The watch. None: the settings do not want one.
        """
        limit_s = self._settings.stall_after_s
        if limit_s <= 0:
            return None
        self._pods = pods
        session = self._reporter.session
        heartbeat = trainer_watch.watched(workers, self._settings, session, group.process_index, self._step)
        return StallWatch(limit_s, activities, board, pods, self, heartbeat, clock=clock)

    def stalled(self, stalled: Stalled, suspicion: Suspicion) -> None:
        """Tells the operator of a stall. Called in one process for all, unless the store does not answer.

        Args:
            stalled: The stalled part of this process.
            suspicion: Who is suspected.
        """
        stage, why, suspects = stalled.activity.stage, suspicion.why, suspicion.processes
        pods = pods_of(suspects, self._pods)
        self._reporter.stall(stage, self._step(), stalled.for_s, suspects, why, suspicion.stack, pods)

    def over(self, part: str) -> None:
        """Tells the operator that a part makes progress again. Called in the process that told of the stall."""
        self._reporter.stall_over(part, self._step())

    def limit(self, why: str) -> None:
        """Ends the process if the settings say so. Called in every process when the operator was told.

        Within a preemption the deadline is the limit, and the watchdog ends the process: the save may still succeed.
        """
        if self._settings.stall_action == STALL_RESTART and not self._exit.decided and not self._exit.watches:
            log.error("this process exits, so that the job starts again reason=%s", why)
            self._exit.decide(self._settings.unsaved_exit_code)
