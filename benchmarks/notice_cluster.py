"""The part of ``benchmarks.notice`` that needs a cluster: a gang of two real pods, as the record tells of them."""

from __future__ import annotations

import datetime

from benchmarks.notice_gang import TAINT
from benchmarks.notice_results import latencies
from benchmarks.report import Figure
from demo import install, nodes
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.messages import Phase
from tests import testcluster

NAMESPACE = "gracepoint-notices"
WHO = "2 pods of a cluster"
_STEPS = 1_000_000  # more than it ever gets to
_STEPS_BEFORE = 20


def measure(notices: int) -> list[Figure]:
    """Tells a gang that trains so often; each notice is taken back before anything is saved."""
    sent_s: list[float] = []
    acknowledged_s: list[float] = []
    with testcluster.open(nodes=2) as cluster:
        images = install.build_images(cluster, print)
        install.install_operator(cluster, images.operator)
        install.make_namespace(cluster, NAMESPACE)
        apply_policy(cluster, namespace=NAMESPACE, change=_patient)
        run = TrainingRun(cluster, "told", namespace=NAMESPACE, image=images.trainer, steps=_STEPS)
        run.start()
        node = run.wait_for_trainers(_STEPS_BEFORE)[0].node
        for number in range(notices):
            zero_unix_s = nodes.taint(cluster, node, {"key": TAINT, "value": str(number), "effect": "NoSchedule"})
            run.wait_for_phase(Phase.NOTICED, epoch=number)
            record = run.wait_for_record("both receipts", lambda status: "lastAck" in _stages(status))
            nodes.untaint(cluster, node, TAINT)
            run.wait_for_phase(Phase.RETRACTED, epoch=number)
            seen_s = datetime.datetime.fromisoformat(record["spec"]["observedAt"]).timestamp() - zero_unix_s
            reached = _stages(record["status"])
            sent_s.append(seen_s + reached["noticeSent"])
            acknowledged_s += [seen_s + reached["firstAck"], seen_s + reached["lastAck"]]
        run.delete()
    return [*latencies(WHO, "sent to both", sent_s), *latencies(WHO, "acknowledged", acknowledged_s)]


def _patient(spec: Json) -> None:
    """The save begins shortly before the deadline, the grace period: until then a notice can be taken back."""
    spec["deadline"] = {"headStartSeconds": 5}


def _stages(status: Json) -> dict[str, float]:
    return {timing["stage"]: timing["seconds"] for timing in status.get("timings", [])}
