"""The stages of a preemption, in the order in which they usually come. Pure data."""

from __future__ import annotations

#: Stages of a Preemption's ``status.timings``, and what they mean.
STAGES = {
    "noticeSent": "notice sent",
    "firstAck": "first process acknowledged",
    "lastAck": "all acknowledged",
    "frozen": "all frozen",
    "agreed": "agreed on the step to save",
    "drained": "queued steps done",
    "written": "shards written",
    "durable": "on stable storage",
    "committed": "checkpoint committed",
    "exited": "all trainers have left",
    "podsBack": "new trainers run",
    "started": "new processes started",
    "attaching": "modules imported",
    "joined": "processes joined",
    "restored": "state restored",
    "compiled": "programs compiled or loaded",
    "training": "training again",
}
