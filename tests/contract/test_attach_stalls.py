"""A stall in ``attach``, before any session is open, shows in the cluster: library and operator over TLS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gracepoint.multihost import InMemoryStore, StoreGang
from gracepoint.session.attach_watch import AttachWatch
from gracepoint.settings import Settings
from gracepoint_operator.kube import kinds
from tests.contract.fakes.replicas import Replica, until
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE


@pytest.fixture
def replica(start: Callable[..., Replica], api: MemoryApi) -> Replica:
    return start(api)


def progressing(replica: Replica) -> tuple[str, str]:
    """Status and message of the policy's condition."""
    (policy,) = replica.api.of(kinds.POLICIES)
    conditions = policy.get("status", {}).get("conditions", [])
    found = [each for each in conditions if each["type"] == "Progressing"]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")


@pytest.mark.parametrize("restarted", [False, True], ids=["the pod is new", "its container was restarted"])
def test_the_policy_names_the_process_that_does_not_come(replica: Replica, restarted: bool) -> None:
    replica.channel("token-0").close()  # writes the token's file
    if restarted:
        before = replica.stream(0, "s-before")
        before.next()
        before.close()
    settings = Settings(
        operator_url=f"https://localhost:{replica.server.https_port}",
        ca_certificate=replica.ca,
        token_file=str(replica.tokens / "file-of-token-0"),
        namespace=NAMESPACE,
        pod_name="pod-0-0",
        pod_uid="uid-pod-0-0",
        jobset_uid=JOBSET_UID,
        stall_after_s=0.3,
    )
    gang = StoreGang(InMemoryStore(), 0, 2)
    with AttachWatch(settings) as watch, watch.at("meeting of the processes"):
        watch.met(gang, ["pod-0-0", "pod-0-1"])
        with gang.waiting.expecting("backend"):
            until(lambda: "in meeting of the processes" in progressing(replica)[1], "the condition")
            told = progressing(replica)
    assert told[0] == "False"
    assert "this process waits for process 1 (pod-0-1)" in told[1]
    until(lambda: progressing(replica)[0] == "True", "the end of the condition")
