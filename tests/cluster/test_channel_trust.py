"""Who may speak to the operator: pods, by their bound tokens, and the API server. Others are refused and counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from demo.snapshot import Json, Pod
from demo.training import TrainingRun
from tests.cluster.operator import counted, refused, wait_for_count

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# Runs in a trainer's pod, beside the training process, with the library's own client.
_PROBE = """
import http.client, json, os, ssl, tempfile, urllib.parse
from gracepoint.receivers.channel import OperatorConnection, ChannelError
from gracepoint.wire import names
from gracepoint.wire.messages import Acknowledgement, Subscription
env = os.environ
def channel(token):
    with tempfile.NamedTemporaryFile("w", dir="/tmp", delete=False) as file:
        file.write(token)
    return OperatorConnection(env["GRACEPOINT_OPERATOR_URL"], env["GRACEPOINT_CA_CERTIFICATE"], file.name)
def subscribe(token, **changes):
    who = dict(namespace=env["GRACEPOINT_NAMESPACE"], pod_name=env["GRACEPOINT_POD_NAME"],
               pod_uid=env["GRACEPOINT_POD_UID"], session="probe", workload_uid=env["GRACEPOINT_JOBSET_UID"],
               restart_attempt=0, process_index=0, process_count=2, library_version="0")
    try:
        channel(token).stream(names.PATH_SUBSCRIBE, Subscription(**(who | changes)))
        return 200
    except ChannelError as error:
        return error.status
def acknowledge(token, session):
    message = Acknowledgement(pod_uid=env["GRACEPOINT_POD_UID"], session=session, preemption="none", process_index=0)
    try:
        channel(token).post(names.PATH_ACKNOWLEDGE, message, timeout_s=5)
        return 204
    except ChannelError as error:
        return error.status
def evict(path, port):
    review = dict(apiVersion="admission.k8s.io/v1", kind="AdmissionReview",
                  request=dict(uid="r-1", namespace=env["GRACEPOINT_NAMESPACE"], name=env["GRACEPOINT_POD_NAME"],
                               object=dict(kind="Eviction")))
    host = urllib.parse.urlsplit(env["GRACEPOINT_OPERATOR_URL"]).hostname
    context = ssl.create_default_context(cadata=env["GRACEPOINT_CA_CERTIFICATE"])
    connection = http.client.HTTPSConnection(host, port, context=context, timeout=10)
    connection.request("POST", path, body=json.dumps(review))
    return connection.getresponse().status
tokens = json.loads(TOKENS)
print(json.dumps({
    "no token": subscribe(""),
    "another audience": subscribe(tokens["audience"]),
    "not bound to a pod": subscribe(tokens["unbound"]),
    "another pod's token": subscribe(tokens["other"]),
    "another JobSet": subscribe(tokens["own"], workload_uid="00000000-0000-0000-0000-000000000000"),
    "a session that is not": acknowledge(tokens["own"], "stopped"),
    "a forged eviction": evict("/validate/evictions", 9443),
    "a forged eviction with a guess": evict("/validate/evictions/" + "0" * 64, 9443),
    "a forged eviction on the channel": evict("/validate/evictions", 443),
}))
"""

FORGED = ("a forged eviction", "a forged eviction with a guess", "a forged eviction on the channel")


def token(run: TrainingRun, pod: Pod | None, audience: str = "gracepoint.dev") -> str:
    """A token of the pods' service account, bound to ``pod``."""
    bound: list[str] = []
    if pod is not None:
        made = run.cluster.kubectl(
            "get", "pod", pod.name, f"--namespace={run.namespace}", "--output=jsonpath={.metadata.uid}"
        )
        bound = ["--bound-object-kind=Pod", f"--bound-object-name={pod.name}", f"--bound-object-uid={made.stdout}"]
    command = ("create", "token", "default", f"--namespace={run.namespace}", f"--audience={audience}")
    return run.cluster.kubectl(*command, *bound).stdout.strip()


def webhooks_refused(counts: dict[str, float]) -> float:
    """How many requests have been refused on the webhooks' port, as their path was unknown."""
    return counts.get('gracepoint_webhook_requests_refused_total{reason="unknown_path"}', 0.0)


def test_nobody_but_the_pod_itself_is_heard(run: TrainingRun) -> None:
    def long(jobset: Json) -> None:  # it trains as long as the test asks, also on a busy machine
        (job,) = jobset["spec"]["replicatedJobs"]
        job["template"]["spec"]["template"]["spec"]["containers"][0]["args"].append("--steps=100000")

    run.start(long)
    pod, other = run.wait_for_trainers(5)
    tokens = {
        "own": token(run, pod),
        "other": token(run, other),
        "unbound": token(run, None),
        "audience": token(run, pod, "https://kubernetes.default.svc"),
    }
    before = counted(run.cluster)
    answer = run.cluster.kubectl(
        *("exec", "--stdin", pod.name, f"--namespace={run.namespace}", "--", "/opt/venv/bin/python", "-"),
        stdin=f"TOKENS = {json.dumps(tokens)!r}\n{_PROBE}",
    )
    found: dict[str, Any] = json.loads(answer.stdout)
    # Whichever replica is asked refuses: the one that has the pod's stream the session, the other one, which knows of
    # no session of the pod, what the message names.
    assert found.pop("a session that is not") in (403, 404)
    assert {name: found.pop(name) for name in FORGED} == dict.fromkeys(FORGED, 404)
    assert found == {
        "no token": 401,
        "another audience": 401,
        "not bound to a pod": 403,
        "another pod's token": 403,
        "another JobSet": 403,
    }
    # The forged eviction on the channel's port is one more than those found.
    refused_before, forged_before = refused(before), webhooks_refused(before)
    after = wait_for_count(
        *(run.cluster, "all refused requests"),
        lambda now: refused(now) > refused_before + len(found) and webhooks_refused(now) >= forged_before + 2,
    )
    assert webhooks_refused(after) == forged_before + 2

    # And nothing happened: the job trains on, and its own subscription stands.
    run.wait_for_step((run.newest() or pytest.fail("no step was recorded")).step + 5)
    assert run.look().preemptions == ()
