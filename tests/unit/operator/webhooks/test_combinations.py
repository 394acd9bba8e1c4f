"""Every combination of fields that a JobSet has rightly, wrongly or not at all: one table, and one rule for all."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable

from gracepoint_operator.webhooks import ContractViolation, Patched, release_contract
from gracepoint_operator.webhooks.contracts import NO_LIMIT
from gracepoint_operator.webhooks.updates import shown
from tests.unit.operator.fakes.samples import (
    POLICY,
    Json,
    by_jobset,
    injected,
    job_of,
    jobset,
    pod_of,
    policy,
    replicated_job,
)

OURS = {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [77, 78]}}
IGNORED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field with what it is without the user's word, a right value of theirs, and a wrong one."""

    path: str
    of: Callable[[Json], Json]
    key: str
    given: object
    right: object
    wrong: object

    def value(self, body: Json) -> object:
        return self.of(body).get(self.key)


def _network(body: Json) -> Json:
    made: Json = body["spec"].setdefault("network", {})
    return made


def _failure_policy(body: Json) -> Json:
    made: Json = body["spec"].setdefault("failurePolicy", {"maxRestarts": 7})
    return made


def _container(body: Json) -> Json:
    made: Json = pod_of(body)["containers"][0]
    return made


_JOB = "spec.replicatedJobs[0].template.spec"
FIELDS = (
    Field(f"{_JOB}.template.spec.restartPolicy", pod_of, "restartPolicy", "Never", "Never", "OnFailure"),
    Field(f"{_JOB}.backoffLimit", job_of, "backoffLimit", NO_LIMIT, NO_LIMIT, 6),
    Field(f"{_JOB}.completionMode", job_of, "completionMode", "Indexed", "Indexed", "NonIndexed"),
    Field(f"{_JOB}.parallelism", job_of, "parallelism", None, 1, 2),
    Field(f"{_JOB}.podReplacementPolicy", job_of, "podReplacementPolicy", None, "Failed", "TerminatingOrFailed"),
    Field(
        f"{_JOB}.podFailurePolicy.rules[0].action",
        job_of,
        "podFailurePolicy",
        None,
        {"rules": [OURS]},
        {"rules": [IGNORED]},
    ),
    Field("spec.network.enableDNSHostnames", _network, "enableDNSHostnames", None, True, False),
    Field(
        "spec.failurePolicy.restartStrategy",
        _failure_policy,
        "restartStrategy",
        None,
        "BlockingRecreate",
        "InPlaceRestart",
    ),
    Field(
        f"{_JOB}.template.spec.containers[train].restartPolicy", _container, "restartPolicy", None, "Never", "Always"
    ),
)
#: What ends a problem, by the field that it is about.
ABSENT, RIGHT, WRONG = range(3)


def _body(choice: tuple[int, ...]) -> Json:
    body = jobset(replicated_job())
    del job_of(body)["parallelism"]
    job_of(body)["completions"] = 1
    for field, state in zip(FIELDS, choice, strict=True):
        if state != ABSENT:
            field.of(body)[field.key] = copy.deepcopy(field.right if state == RIGHT else field.wrong)
    return body


def test_wrong_fields_are_refused_by_name_and_the_rest_is_kept() -> None:
    seen = 0
    for choice in itertools.product((ABSENT, RIGHT, WRONG), repeat=len(FIELDS)):
        if choice.count(WRONG) > 2:
            continue  # problems are found one by one: two show that they don't hide one another
        body = _body(choice)
        result = release_contract(body, POLICY)
        wrong = [field for field, state in zip(FIELDS, choice, strict=True) if state == WRONG]
        seen += 1
        if wrong:
            assert isinstance(result, ContractViolation), choice
            found = [problem.partition(":")[0] for problem in result.problems]
            assert sorted(found) == sorted(field.path for field in wrong), choice
            continue
        assert isinstance(result, Patched), (choice, result)
        for field, state in zip(FIELDS, choice, strict=True):
            if field.key == "podFailurePolicy":
                assert job_of(result.object)["podFailurePolicy"]["rules"][0] == OURS
            elif field.path.endswith("restartStrategy") and state == ABSENT:
                assert field.key not in result.object["spec"]["failurePolicy"]
            else:
                assert field.value(result.object) == (field.right if state == RIGHT else field.given), (choice, field)
    assert seen > 5000


def test_every_combination_that_is_taken_is_done_with_after_one_call() -> None:
    """Whatever JobSet's own webhook adds in between: called again, there is nothing to do."""
    for choice in itertools.product((ABSENT, RIGHT), repeat=len(FIELDS)):
        once = _made(_body(choice))
        assert _made(once) == once, choice
        later = by_jobset(once)
        assert _made(later) == later, choice


def _made(body: Json) -> Json:
    return shown(body, injected(body), policy())
