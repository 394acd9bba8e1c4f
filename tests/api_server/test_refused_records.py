"""The API server refuses the records of a gang: it is told all the same, each time, and the records come later."""

from __future__ import annotations

from gracepoint.wire.messages import Phase
from gracepoint_operator.kube.objects import Kind
from tests.api_server.gang import Body, Gang, running, told, until

_VALIDATING = Kind("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicies")
_BINDINGS = Kind("/apis/admissionregistration.k8s.io/v1", "validatingadmissionpolicybindings")
_MESSAGE = "no Preemptions in this namespace, says the platform team"


def _policy(name: str) -> Body:
    rule = {
        "apiGroups": ["gracepoint.dev"],
        "apiVersions": ["*"],
        "operations": ["CREATE"],
        "resources": ["preemptions"],
    }
    return {
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "false", "message": _MESSAGE}],
        },
    }


def _binding(name: str) -> Body:
    selector = {"matchLabels": {"kubernetes.io/metadata.name": name}}
    return {
        "metadata": {"name": name},
        "spec": {
            "policyName": name,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": selector},
        },
    }


async def test_gang_with_refused_records_is_notified_in_its_next_life(gang: Gang) -> None:
    await gang.make()
    await gang.api.create(_VALIDATING, None, _policy(gang.name))
    await gang.api.create(_BINDINGS, None, _binding(gang.name))
    await until(gang.is_refused, "the API server to refuse Preemptions")

    async with running(gang) as replica:
        subscriber = await replica.connect(0)
        await gang.taint(0)
        await replica.watch()
        first = await told(subscriber)
        assert first.preemption == gang.epoch(1)
        for phase in (Phase.FROZEN, Phase.COMMITTED):
            await replica.report(phase, first.preemption)

        await gang.taint(0, on=False)
        await gang.run_attempt(1)
        await replica.watch()
        restarted = await replica.connect(0)
        await gang.taint(1)
        await replica.watch()
        second = await told(restarted)
        assert second.preemption == gang.epoch(2)
        await replica.report(Phase.COMMITTED, second.preemption)

        async def said() -> bool:
            condition = await gang.policy_condition("Recorded")
            return condition.get("status") == "False" and _MESSAGE in condition["message"]

        await until(said, "the policy's condition Recorded=False with the API server's words")
        assert replica.sample("gracepoint_preemptions_unrecorded") == 2
        assert await gang.records() == []

        gang.server.kubectl("delete", "validatingadmissionpolicybinding", gang.name)

        async def recorded() -> bool:
            found = {body["metadata"]["name"]: body.get("status", {}).get("phase") for body in await gang.records()}
            return found == {gang.epoch(1): "Committed", gang.epoch(2): "Committed"}

        await until(recorded, "both records, as they ended", within_s=60)
        by_epoch = {body["spec"]["epoch"]: body["spec"] for body in await gang.records()}
        assert {number: spec["restartAttempt"] for number, spec in by_epoch.items()} == {1: 0, 2: 1}

        async def is_well() -> bool:
            return (await gang.policy_condition("Recorded")).get("status") == "True"

        await until(is_well, "the policy's condition Recorded=True")
        assert replica.sample("gracepoint_preemptions_unrecorded") == 0
