"""What a person sees of a preemption with kubectl, and what the replicas' metrics sum up to."""

from __future__ import annotations

import pytest

from demo import nodes
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster import operator
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MIDDLE = 20
STORY = ["PreemptionNoticed", "SaveAgreed", "CheckpointCommitted", "Resumed"]


def table(cluster: Cluster, namespace: str, kind: str, name: str) -> dict[str, str]:
    """The row of ``kubectl get -o wide``, by column; columns are as far apart as kubectl puts them."""
    head, row = cluster.kubectl("get", kind, name, f"--namespace={namespace}", "--output=wide").stdout.splitlines()
    starts = [at for at, letter in enumerate(head) if letter != " " and (at == 0 or head[at - 2 : at] == "  ")]
    ends = [*starts[1:], None]
    return {head[at:end].strip(): row[at:end].strip() for at, end in zip(starts, ends, strict=True)}


def events(described: str) -> list[str]:
    """Reasons in the order in which ``kubectl describe`` shows them."""
    lines = described.partition("\nEvents:")[2].splitlines()
    return [line.split()[1] for line in lines if line.split()[:1] in (["Normal"], ["Warning"])]


def test_a_preemption_reads_well_and_is_counted_once(run: TrainingRun) -> None:
    cluster, namespace = run.cluster, run.namespace
    before = operator.counted(cluster)
    run.start()
    nodes.taint(cluster, run.wait_for_trainers(MIDDLE)[0].node)
    run.wait_for_phase(Phase.COMMITTED)
    record = run.wait_for_record("that it trains again", lambda status: "restoredStep" in status)
    name, status = record["metadata"]["name"], record["status"]

    shown = table(cluster, namespace, "preemptions", name)
    assert (shown["JOBSET"], shown["PHASE"], shown["CAUSE"]) == (run.name, "Committed", "SpotTermination")
    assert (shown["STEP"], shown["STEPSLOST"], shown["RESUMED"]) == (str(status["step"]), "0", str(status["step"]))
    assert float(shown["SPARE(S)"]) > 0
    assert (shown["ACKS"], shown["PODS"]) == ("2", "2")
    assert shown["MESSAGE"] == status["message"]

    def described() -> str:
        return cluster.kubectl("describe", "preemption", name, f"--namespace={namespace}").stdout

    wait_until("the Events on the Preemption", lambda: events(described()) == STORY, timeout_s=30, hint=described)
    on_jobset = cluster.kubectl("describe", "jobset", run.name, f"--namespace={namespace}").stdout
    assert [reason for reason in events(on_jobset) if reason in STORY] == STORY

    after = before

    def since(metric: str) -> float:
        return after.get(metric, 0.0) - before.get(metric, 0.0)

    def ended(phase: str) -> str:
        return f'gracepoint_preemption_phases_total{{cause="SpotTermination",mode="Enforce",phase="{phase}"}}'

    committed = ended("Committed")
    after = operator.wait_for_count(
        cluster, "the committed preemption", lambda now: now.get(committed, 0.0) > before.get(committed, 0.0)
    )
    for phase in ("Noticed", "Committed"):
        assert since(ended(phase)) == 1, phase
    for metric in (
        'signal_lead_seconds_count{cause="SpotTermination"}',
        'emergency_seconds_count{part="save"}',
        'spare_seconds_bucket{le="+Inf"}',
    ):
        assert since(f"gracepoint_{metric}") == 1, metric
    assert since("gracepoint_steps_lost_total") == 0
    assert since("gracepoint_notices_undelivered_total") == 0
