"""Checks one JobSet or Job under its policy, and says in sentences what a preemption would do to it. Pure.

What the API server fills into a Job is filled in first, as a file lacks it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from gracepoint.wire.messages import Mode
from gracepoint.wire.names import ENV_JAX_CACHE_DIR, LABEL_POLICY, Env
from gracepoint_cli.lint import pods
from gracepoint_cli.lint.pods import Finding, Severity
from gracepoint_operator.read_errors import CAUSES, said
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.webhooks import AdmissionSettings, ContractViolation, inject_workload, release_contract
from gracepoint_operator.webhooks.release_contract import creation_warnings
from gracepoint_operator.webhooks.training_jobs import Problems, gang, helpers, is_job
from gracepoint_operator.webhooks.updates import overruled

Json = dict[str, Any]

#: From k8s.io/kubernetes/pkg/apis/batch/v1 and core/v1 (defaults).
_JOB = {"completionMode": "NonIndexed"}
_POD = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 30}


def is_stored(workload: Json) -> bool:
    """Returns whether the object was read from the API server."""
    return "uid" in (workload.get("metadata") or {})


def filled_in(workload: Json) -> Json:
    """Returns the workload as the API server passes it to webhooks, where its defaults change what they do.

    A Job that is read from the cluster has these values. A Job of a file does not. The values of a JobSet's Jobs are
    filled in after the webhooks, so they do not count.
    """
    if not is_job(workload) or is_stored(workload):
        return workload
    copy_of_workload = copy.deepcopy(workload)
    job = copy_of_workload.setdefault("spec", {})
    pod = job.setdefault("template", {}).setdefault("spec", {})
    for part, defaults in ((job, _JOB), (pod, _POD)):
        part |= {name: value for name, value in defaults.items() if part.get(name) is None}
    return copy_of_workload


def default_findings(workload: Json) -> Iterator[Finding]:
    """Points out a grace period that its user did not choose."""
    if not is_job(workload) or is_stored(workload):
        return
    if workload["spec"]["template"]["spec"].get("terminationGracePeriodSeconds") is None:
        yield Finding(
            Severity.WARNING,
            "default-grace-period",
            "spec.template.spec.terminationGracePeriodSeconds",
            f"found nothing, which means {_POD['terminationGracePeriodSeconds']} s: if no notice comes before SIGTERM, "
            "agreement, save and exit must fit into it. Write how long that takes",
        )


def effects(injected: Json, policy: CheckpointPolicy) -> list[str]:
    """Returns what a preemption would do to a JobSet or a Job, in sentences.

    Args:
        injected: The workload with everything that the operator fills in.
        policy: Its policy.
    """
    spec, members = policy.spec, gang(injected, policy.spec.training, Problems())
    processes = sum(member.processes for member in members)
    names = ", ".join(member.name for member in members if member.name)
    grace_s = min(int(member.template["spec"]["terminationGracePeriodSeconds"]) for member in members)
    sentences = [f"The gang has {processes} process{'' if processes == 1 else 'es'}{f': {names}' if names else ''}."]
    if helping := ", ".join(helper.name for helper in helpers(injected, spec.training)):
        sentences.append(
            f"Pods of {helping} do not train. Where the end of one would restart the JobSet, its disruption counts as "
            "one of the gang."
        )
    if spec.mode is Mode.OBSERVE:
        return [*sentences, "The policy has mode Observe: a disruption is recorded, and pods get no notice."]
    head_start_s = spec.deadline.head_start_seconds
    sentences.append(
        f"On a notice with more than {head_start_s:g} s, training continues until {head_start_s:g} s before the "
        f"deadline, or stops earlier if the predicted save times {spec.deadline.margin:g} is longer. On a shorter "
        "notice, the gang saves at once."
    )
    sentences.append(
        f"On a SIGTERM without a notice, agreement, save and exit have {grace_s} s, the grace period of the pods. "
        "Then comes SIGKILL."
    )
    if spec.mode is Mode.DRILL:
        return [
            *sentences,
            "The policy has mode Drill: the gang saves, and continues to train until it gets a SIGTERM.",
        ]
    if spec.eviction_hold.enabled:
        bound_s = spec.eviction_hold.bound_seconds
        sentences.append(f"An eviction, for example by kubectl drain, waits for the save, for at most {bound_s} s.")
    codes = spec.after_save
    sentences.append(f"All processes exit with {codes.saved_exit_code} after the save. {_return(injected)}")
    every = [f"{spec.checkpoint.every_steps} steps"] if spec.checkpoint.every_steps else []
    every += [f"{spec.checkpoint.every_seconds} s"] if spec.checkpoint.every_seconds else []
    sentences.append(
        f"If nothing can be saved in time, they exit with {codes.unsaved_exit_code}, and the job continues from its "
        "newest "
        + (
            f"periodic save (every {' or '.join(every)})."
            if every
            else "emergency save, as there are no periodic saves."
        )
    )
    if memory := spec.checkpoint.memory:
        interval = f"{memory.every_steps} steps" if memory.every_steps else f"{memory.every_seconds} s"
        survives = "of a node" if memory.copies > 1 else "of pods, but not that of a node"
        sentences.append(
            f"Every {interval} the state is sent to the memory of {memory.copies} nodes, if the operator has snapshot "
            f"servers: an end without notice {survives} loses no more than that."
        )
    if spec.exit_breaker.saved_exits:
        sentences.append(
            f"After {spec.exit_breaker.saved_exits} such exits within {spec.exit_breaker.within_seconds} s it saves "
            "at the next notice and continues to train, until it gets a SIGTERM."
        )
    return sentences


def _return(injected: Json) -> str:
    """Returns how the workload comes back after a save."""
    if is_job(injected):
        limit = injected["spec"].get("backoffLimitPerIndex")
        return (
            "The Job replaces its pods on other nodes, which does not count towards backoffLimitPerIndex "
            f"({limit}), and continues from that step. Kubernetes waits 10 s before the first replacement, and twice "
            "as long before each next one, up to 10 minutes."
        )
    restarts = (injected["spec"].get("failurePolicy") or {}).get("maxRestarts", 0)
    return (
        "The JobSet starts again on other nodes, which does not count towards maxRestarts "
        f"({restarts}), and continues from that step."
    )


#: Only the form of what the operator injects counts here.
_SETTINGS = AdmissionSettings(operator_url="https://operator", ca_certificate="")
_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


@dataclasses.dataclass(frozen=True)
class LintReport:
    """What was found about one workload.

    Attributes:
        kind: Kind of the object that was checked.
        paths_of: The object that the paths of the findings lead through, as text, if it is not the one that was
            checked. Empty if it is.
        findings: The findings, the worst first.
        effects: What a preemption would do to it. Empty if it would be refused.
    """

    kind: str
    name: str
    paths_of: str
    findings: tuple[Finding, ...]
    effects: tuple[str, ...]

    def worst(self) -> Severity | None:
        """Returns the severity of the worst finding. None if there is none."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> Json:
        """Returns the report as JSON."""
        return {
            "kind": self.kind,
            "name": self.name,
            "pathsOf": self.paths_of or None,
            "findings": [finding.to_json() for finding in self.findings],
            "effects": list(self.effects),
        }


def check(
    workload: Json, policy: CheckpointPolicy | None, claims: Mapping[str, Json], *, maker: str = ""
) -> LintReport:
    """Checks a JobSet or a Job.

    Args:
        workload: The object with its kind, as its user writes it or as the API server has it.
        policy: Its policy. None if it is not known. Then nothing that depends on the policy is checked.
        claims: The PersistentVolumeClaims of its namespace that are known, by name.
        maker: Kind of the object of the same name from which the JobSet was made. Empty if its user wrote it.
    """
    kind = _kind(workload)
    try:
        findings, sentences = _check(workload, policy, claims, maker or kind)
    except CAUSES as error:
        problem = f"found parts that are not of {kind}'s schema ({said(error)}). Correct them"
        findings, sentences = [Finding(Severity.ERROR, "unreadable", "spec", problem)], []
    paths_of = f"of the {kind} that is made of it" if maker else ""
    return report(workload, findings, sentences, kind=maker or kind, paths_of=paths_of)


def report(
    body: Json, findings: Sequence[Finding], sentences: Sequence[str] = (), *, kind: str, paths_of: str = ""
) -> LintReport:
    """Returns the report about an object, with the worst finding first."""
    meta = body.get("metadata") or {}
    name = str(meta.get("name") or f"{meta.get('generateName', '')}...")
    return LintReport(
        kind, name, paths_of, tuple(sorted(findings, key=lambda item: _ORDER[item.severity])), tuple(sentences)
    )


def _kind(workload: Json) -> str:
    return "Job" if is_job(workload) else "JobSet"


def _check(
    workload: Json, policy: CheckpointPolicy | None, claims: Mapping[str, Json], kind: str
) -> tuple[list[Finding], list[str]]:
    findings = list(_label(workload, policy, kind))
    under = policy or _stand_in()
    handed_over = filled_in(workload)
    kept = release_contract(handed_over, under.spec)
    if isinstance(kept, ContractViolation):
        # The operator's messages begin with the path.
        findings += [Finding(Severity.ERROR, "release-contract", *_split(problem)) for problem in kept.problems]
        return findings, []
    injected = inject_workload(kept.object, under.name, under.spec, _SETTINGS)
    if policy is not None:
        findings += [
            Finding(Severity.WARNING, "at-creation", *_split(text)) for text in creation_warnings(injected, policy)
        ]
        if not is_stored(workload):  # a stored workload has our own variables
            texts = overruled(handed_over, injected, policy)
            findings += [Finding(Severity.WARNING, "overruled", *_split(text)) for text in texts]
        variables = {
            variable["name"]
            for member in gang(workload, under.spec.training, Problems())
            for variable in member.container.get("env") or []
        }
        findings += _without_effect(policy, variables)
    findings += _restarts(workload)
    findings += default_findings(workload)
    for member in gang(injected, under.spec.training, Problems()):
        path = f"{member.path}.template.spec"
        findings += pods.process_findings(member.container, f"{path}.containers[{member.container['name']}]")
        findings += [item for item in pods.pod_findings(member, path, claims) if policy or "volume" not in item.rule]
        if member.job.get("activeDeadlineSeconds"):
            text = "found a time limit: the gang saves before it, and the Job then fails"
            text += "" if is_job(workload) else ". The JobSet starts again"
            findings.append(Finding(Severity.INFO, "time-limit", f"{member.path}.activeDeadlineSeconds", text))
    return findings, effects(injected, policy) if policy is not None else []


def _label(workload: Json, policy: CheckpointPolicy | None, kind: str) -> Iterator[Finding]:
    label = ((workload.get("metadata") or {}).get("labels") or {}).get(LABEL_POLICY)
    path = f"metadata.labels[{LABEL_POLICY}]"
    if label is None and policy is not None:
        text = f"found no label: the {kind} gets the default policy {policy.name} of its namespace when it is created, "
        text += "if nothing below is an error"
        yield Finding(Severity.INFO, "default-policy", path, text)
    elif label is None:
        text = f"found no label: Gracepoint leaves the {kind} alone, unless its namespace has a default policy, which "
        text += "was not seen. Add the name of a CheckpointPolicy"
        yield Finding(Severity.WARNING, "no-policy", path, text)
    elif policy is None:
        text = f"the CheckpointPolicy {label!r} was not found, so what depends on it is not checked. Add it to the "
        text += "file, or ask a cluster that has it"
        yield Finding(Severity.WARNING, "policy-not-seen", path, text)


def _without_effect(policy: CheckpointPolicy, variables: Set[str]) -> Iterator[Finding]:
    cache = policy.spec.compilation_cache
    usual = type(cache)()
    chosen = variables & {ENV_JAX_CACHE_DIR, Env.COMPILATION_CACHE, Env.DIRECTORY}
    if (
        cache.enabled
        and not chosen
        and not cache.directory
        and policy.spec.checkpoint.directory.startswith(("gs://", "s3://"))
    ):
        text = "the policy's spec.compilationCache.enabled has no effect: checkpoint.directory is a bucket. Write a "
        yield Finding(Severity.WARNING, "without-effect", "", f"{text}directory into spec.compilationCache, too")
    fields = {"maxBytes": cache.max_bytes != usual.max_bytes, "unusedDays": cache.unused_days != usual.unused_days}
    for field in (name for name, is_set in fields.items() if cache.enabled and is_set):
        text = (
            f"the policy's spec.compilationCache.{field} has no effect: JAX's cache deletes nothing. For a bound, set "
        )
        yield Finding(Severity.INFO, "without-effect", "", f"{text}JAX_COMPILATION_CACHE_MAX_SIZE in the container")


def _restarts(workload: Json) -> Iterator[Finding]:
    spec = workload["spec"]
    if is_job(workload):
        path, none = "spec.backoffLimitPerIndex", spec.get("backoffLimitPerIndex") == 0
    else:
        path, failure_policy = "spec.failurePolicy.maxRestarts", spec.get("failurePolicy")
        none = failure_policy is not None and not failure_policy.get("maxRestarts")
    if none:
        text = "found 0: a node that dies without a notice ends the job for good. Allow a few; exits after a save do "
        yield Finding(Severity.WARNING, "no-restarts", path, f"{text}not count")


def _stand_in() -> CheckpointPolicy:
    spec = {"checkpoint": {"directory": "gs://not-known"}}
    body = {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": "x"},
        "spec": spec,
    }
    return CheckpointPolicy.of(body)


def _split(problem: str) -> tuple[str, str]:
    path, _, text = problem.partition(": ")
    return (path, text) if text and " " not in path else ("", problem)
