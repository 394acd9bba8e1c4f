"""Everything that this replica writes to the API server in the background, as one object.

The writers run on the controller's event loop, each with the tasks of its write queue. ``close`` ends them all.
"""

from __future__ import annotations

import asyncio
import dataclasses

from gracepoint_operator.kube.objects import PREEMPTIONS, REQUESTS, Kind
from gracepoint_operator.recording.event_recorder import EndedPods
from gracepoint_operator.recording.first_seen_writer import FirstSeenWriter
from gracepoint_operator.recording.kueue_writer import KueueWriter
from gracepoint_operator.recording.pod_writer import PodProtector, SidecarEnder
from gracepoint_operator.recording.policy_writer import PolicyWriter
from gracepoint_operator.recording.preemption_writer import AcknowledgementLog, PreemptionWriter, RequestWriter
from gracepoint_operator.recording.trouble_recorder import SnapshotRecorder, StallRecorder, TroubleRecorder
from gracepoint_operator.recording.wait_recorder import WaitRecorder
from gracepoint_operator.resources import CheckpointPolicy


@dataclasses.dataclass(frozen=True)
class Writers:
    """The writers of one replica.

    Attributes:
        acknowledgements: Which pods this replica has notified, and which have acknowledged. Part of its records.
        preemptions: The records of preemptions, and their Events.
        policies: The statuses of policies.
        stalls: The gangs that make no progress.
        troubles: The gangs that train while something fails.
        waits: What gangs wait for before they run.
        requests: The answers to requests.
        pods: The annotations that protect pods from autoscalers.
        sidecars: The ends of pods that outlive their training.
        first_seen: When marks were first seen.
        kueue: Other nodes for workloads that Kueue pins to those that go away.
        ended_pods: The Events about pods that were ended without notice.
        snapshots: What of gangs is safe in snapshot servers.
    """

    acknowledgements: AcknowledgementLog
    preemptions: PreemptionWriter
    policies: PolicyWriter
    stalls: StallRecorder
    troubles: TroubleRecorder
    waits: WaitRecorder
    requests: RequestWriter
    pods: PodProtector
    sidecars: SidecarEnder
    first_seen: FirstSeenWriter
    kueue: KueueWriter
    ended_pods: EndedPods
    snapshots: SnapshotRecorder

    def follow(self, policy: CheckpointPolicy) -> None:
        """Takes from a policy's status what the other replica knows."""
        self.stalls.follow(policy)
        self.troubles.follow(policy)

    def finish(self, uid: str) -> None:
        """Ends what is known to go wrong in a workload that has finished. It may be kept for long."""
        self.stalls.resumed(uid)
        self.troubles.forget(uid)

    def forget(self, uid: str, place: tuple[Kind, str, str] | None) -> None:
        """Forgets an object that was deleted.

        Args:
            uid: Its UID.
            place: Its kind, namespace and name. None if they are not known.
        """
        # UIDs are unique across kinds, so this does nothing for an object of another kind.
        self.policies.forget(uid)  # a workload
        self.stalls.forget(uid)
        self.troubles.forget(uid)
        self.snapshots.forget(uid)
        self.waits.forget(uid)
        self.pods.forget(uid)
        self.kueue.forget(uid)
        if place is not None and place[0] is PREEMPTIONS:
            self.acknowledgements.forget(place[1:])
            self.preemptions.forget(place[1:])
        if place is not None and place[0] in (PREEMPTIONS, REQUESTS):
            self.requests.forget(*place)

    async def close(self, timeout_s: float) -> None:
        """Writes what is left, for at most ``timeout_s`` seconds."""
        writers = (
            self.preemptions,
            self.policies,
            self.stalls,
            self.troubles,
            self.waits,
            self.requests,
            self.pods,
            self.sidecars,
            self.first_seen,
            self.kueue,
            self.ended_pods,
            self.snapshots,
        )
        await asyncio.gather(*(writer.close(timeout_s) for writer in writers))
