"""The objects of a file of manifests, and the JobSet that the Kubeflow Trainer makes of a TrainJob. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli import CommandError, ExitCode
from gracepoint_cli.lint.pods import Finding, Severity
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.read_errors import CAUSES, said
from gracepoint_operator.webhooks.training_jobs import label_handed_on
from gracepoint_operator.workloads import ANY_NAME_OR_MAKER, BY_NAME, MAKERS

Json = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Leaves times as texts, as JSON has them."""


def _as_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _as_text)


def objects(text: str, name: str) -> list[Json]:
    """Returns the objects of a YAML or JSON text, those of Lists one by one.

    Args:
        text: The text.
        name: Name of the file, for errors.

    Raises:
        CommandError: It is no YAML, or not made of Kubernetes objects.
    """
    try:
        documents = [item for item in yaml.load_all(text, _Loader) if item is not None]
    except yaml.YAMLError as error:
        hint = "A Helm template is no manifest: render it first (helm template)" if "{{" in text else ""
        raise CommandError(f"{name}: expected YAML: {error}", hint, ExitCode.BAD) from error
    bodies: list[Json] = []
    for item in documents:
        if not isinstance(item, dict) or "kind" not in item:
            raise CommandError(f"{name}: expected Kubernetes objects, found {str(item)[:60]!r}", code=ExitCode.BAD)
        bodies += item.get("items") or [] if str(item["kind"]).endswith("List") else [item]
    return bodies


def of_kind(items: list[Json], kind: str) -> list[Json]:
    """Returns the objects of a kind."""
    return [item for item in items if item.get("kind") == kind]


def named(items: list[Json], kind: str, name: str) -> Json | None:
    """Returns the object of a kind and name. None if there is none."""
    return next((item for item in of_kind(items, kind) if (item.get("metadata") or {}).get("name") == name), None)


def to_check(files: dict[str, list[Json]]) -> dict[str, list[Json]]:
    """Returns the workloads of each file, and the objects of which workloads are made.

    Jobs do many other things. So a Job without the policy's label is left out, if its file has anything else to check.

    Args:
        files: The objects of each file, by its name.

    Raises:
        CommandError: No file has any.
    """
    selected = {name: _to_check(items) for name, items in files.items()}
    if files and not any(selected.values()):
        items = [item for several in files.values() for item in several]
        others = ", ".join(sorted({str(item.get("kind")) for item in items})) or "nothing"
        hint = (
            "A runtime is checked with a TrainJob that uses it: give both, in one file or in several"
            if "Runtime" in others
            else ""
        )
        raise CommandError(f"{', '.join(files)}: found {others}, expected a {ANY_NAME_OR_MAKER}", hint, ExitCode.BAD)
    return selected


def _to_check(items: list[Json]) -> list[Json]:
    kinds = [*BY_NAME, *(maker.name for maker in MAKERS)]
    selected = [item for item in items if item.get("kind") in kinds]
    return [item for item in selected if item["kind"] != "Job" or _has_label(item)] or selected


def _has_label(item: Json) -> bool:
    return LABEL_POLICY in ((item.get("metadata") or {}).get("labels") or {})


(_TRAINJOB,) = (maker for maker in MAKERS if maker.name == "TrainJob")
KIND = _TRAINJOB.name
#: The runtimes that a TrainJob may name, by kind.
RUNTIMES = {
    name: Kind(_TRAINJOB.kind.prefix, f"{name.lower()}s") for name in ("TrainingRuntime", "ClusterTrainingRuntime")
}

_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_TRAINER = "trainer"
_CONTAINER = "node"
#: Fields of its metadata that a TrainJob shares with its JobSet. A file may leave the name to the API server.
_IDENTITY = ("name", "generateName", "namespace")
#: Fields by which the items of a list are merged. Other lists of an override replace those of the runtime.
_KEYS = {
    "volumes": "name",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "schedulingGates": "name",
    "imagePullSecrets": "name",
}


def runtime_of(trainjob: Json) -> tuple[str, str]:
    """Returns kind and name of the runtime that a TrainJob names."""
    reference = (trainjob.get("spec") or {}).get("runtimeRef") or {}
    return str(reference.get("kind") or "ClusterTrainingRuntime"), str(reference.get("name") or "")


class NotMade(Exception):
    """The JobSet that the Trainer would make cannot be determined.

    Args:
        finding: Says why.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def jobset_of(trainjob: Json, runtime: Json | None) -> Json:
    """Returns the JobSet that the Kubeflow Trainer makes of a TrainJob and its runtime.

    It follows pkg/runtime of github.com/kubeflow/trainer: labels and annotations of the runtime's template and of the
    TrainJob, the number of nodes, what ``spec.trainer`` sets in the container ``node``, and overrides of pods. What the
    Trainer adds for launchers of other frameworks is left out, because no check depends on it.

    Args:
        trainjob: The TrainJob, as its user writes it.
        runtime: Its runtime. None if it is not known.

    Raises:
        NotMade: The runtime is not known, or a part of it or of the TrainJob is not of the schema.
    """
    if runtime is None:
        kind, name = runtime_of(trainjob)
        text = (
            f"the {kind} {name!r} was not found, so the JobSet that is made of it cannot be checked. Put it into the "
            "same file, or check the TrainJob in the cluster"
        )
        raise NotMade(Finding(Severity.WARNING, "runtime-not-seen", "spec.runtimeRef", text))
    try:
        return _jobset_of(trainjob, runtime)
    except CAUSES as error:
        text = f"found parts that are not of the schema of TrainJob or {runtime['kind']} ({said(error)}). Correct them"
        raise NotMade(Finding(Severity.ERROR, "unreadable", "spec", text)) from error


def _jobset_of(trainjob: Json, runtime: Json) -> Json:
    job, of = label_handed_on(trainjob)["spec"], copy.deepcopy(runtime["spec"])
    meta, template = of["template"].get("metadata") or {}, of["template"]["spec"]
    nodes = (of.get("mlPolicy") or {}).get("numNodes")
    trainer = job.get("trainer") or {}
    for replicated in template.get("replicatedJobs") or ():
        spec = replicated["template"]["spec"]
        labels = (replicated["template"].get("metadata") or {}).get("labels") or {}
        _override(replicated["name"], spec["template"], job)
        if labels.get(_STEP) == _TRAINER:
            replicated["replicas"] = 1
            count = trainer.get("numNodes") or nodes or 1
            spec |= {"parallelism": count, "completions": count}
            _train(spec["template"]["spec"], trainer)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            **{key: value for key, value in trainjob["metadata"].items() if key in _IDENTITY},
            "labels": {**(meta.get("labels") or {}), **(job.get("labels") or {})},
            "annotations": {**(meta.get("annotations") or {}), **(job.get("annotations") or {})},
        },
        "spec": template,
    }


def _train(pod: Json, trainer: Mapping[str, Any]) -> None:
    """Sets what ``spec.trainer`` says of the training container."""
    for container in pod.get("containers") or ():
        if container["name"] == _CONTAINER:
            container |= {key: trainer[key] for key in ("image", "command", "args") if trainer.get(key) is not None}
            container["env"] = _items(container.get("env") or (), trainer.get("env") or (), "name")


def _override(name: str, template: Json, job: Mapping[str, Any]) -> None:
    """Merges the overrides of one replicatedJob into its pod template."""
    # Trainer 2.0 and older have podSpecOverrides, 2.1 and newer podTemplateOverrides.
    overrides = [{**item, "spec": item} for item in job.get("podSpecOverrides") or ()]
    overrides += job.get("podTemplateOverrides") or ()
    for item in overrides:
        if name in [target["name"] for target in item["targetJobs"]]:
            changes = {key: value for key, value in (item.get("spec") or {}).items() if key != "targetJobs"}
            template["spec"] = _merged(template["spec"], changes)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Json:
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict):
            merged[key] = _merged(merged.get(key) or {}, value)
        elif key in _KEYS and isinstance(value, list):
            merged[key] = _items(merged.get(key) or (), value, _KEYS[key])
        else:
            merged[key] = value
    return merged


def _items(base: Iterable[Json], changes: Iterable[Json], key: str) -> list[Json]:
    by_key = {item[key]: item for item in base}
    for item in changes:
        by_key[item[key]] = _merged(by_key.get(item[key], {}), item)
    return list(by_key.values())
