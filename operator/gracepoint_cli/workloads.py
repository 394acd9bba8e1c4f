"""Finds workloads in the cluster: the one that a user names, and all that are under a policy."""

from __future__ import annotations

from typing import Any

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_cli.cluster import Cluster
from gracepoint_cli.errors import CommandError, ExitCode, NotAllowed
from gracepoint_cli.naming import Named, WorkloadMatch, called, made_by, owner, parse
from gracepoint_operator.cache.policy_store import PolicyStore
from gracepoint_operator.kube.fields import owner_uid, read_labels, true_conditions
from gracepoint_operator.kube.kinds import CLUSTER_POLICIES, NAMESPACES, PODS, POLICIES
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, default_of
from gracepoint_operator.resources.policy import DEFAULT_LONGEST_HOLD_S
from gracepoint_operator.workloads import (
    ANY_NAME_OR_MAKER,
    BY_NAME,
    MAKERS,
    TYPES,
    WorkloadMaker,
    WorkloadType,
    membership_of,
)

Json = dict[str, Any]

#: Conditions of a maker that has ended. Its workload may have been deleted.
_ENDED = {"Complete", "Failed"}
_TO_LIST = "To see the jobs there are: kubectl gracepoint status -A"


def find(cluster: Cluster, namespace: str, text: str, *, todo: str = _TO_LIST) -> WorkloadMatch:
    """Returns the workload that a user names.

    Args:
        cluster: The cluster.
        namespace: The namespace.
        text: What the user wrote.
        todo: Advice if there is none.

    Raises:
        CommandError: There is none, there are several, or it cannot be read.
    """
    named = parse(text)
    refused: list[NotAllowed] = []
    found = [
        WorkloadMatch(known, {**body, "kind": known.name}, made_by(body))
        for known in TYPES
        if named.kind in (None, known.name)
        if (body := _look(cluster, known, namespace, named, refused)) is not None
    ]
    if len(found) > 1:
        kinds = " and a ".join(item.type.name for item in found)
        choice = " or ".join(f"{item.type.name.lower()}/{named.name}" for item in found)
        raise CommandError(f"found a {kinds} named {named.name!r}", f"Say which: {choice}", ExitCode.USAGE)
    if found:
        _belongs_to_no_other(found[0])
        return found[0]
    for maker in MAKERS:
        if named.kind in (None, maker.name):
            made = _look(cluster, maker, namespace, named, refused)
            if made is not None:
                return _made_by(cluster, maker, made)
    what = named.kind or ANY_NAME_OR_MAKER
    message = f"found no {what} named {named.name!r} in the namespace {namespace!r} at {cluster.server}"
    raise CommandError("; ".join([message, *(f"not all kinds could be looked at: {why}" for why in refused[:1])]), todo)


def listed(cluster: Cluster, namespace: str | None) -> tuple[list[Json], list[str]]:
    """Returns the workloads under a policy, with their kinds, and why some kinds could not be listed."""
    found: list[Json] = []
    problems: list[str] = []
    for known in TYPES:
        try:
            bodies = cluster.list(known.kind, namespace, labels=known.selector)
        except NotAllowed as error:
            problems.append(f"{known.name}s are not shown: {error}")
            continue
        found += [{**body, "kind": known.name} for body in bodies]
    return found, problems


def without_workload(cluster: Cluster, namespace: str | None, workloads: list[Json]) -> list[tuple[str, str]]:
    """Returns the makers (such as TrainJobs) under a policy that have no workload under a policy.

    Each with its name on the command line, and with what that means. Makers that have ended are left out.
    """
    uids = {str(owner(body).get("uid", "")) for body in workloads}
    found = []
    for maker in MAKERS:
        try:
            bodies = cluster.list(maker.kind, namespace, labels=LABEL_POLICY)
        except NotAllowed:
            continue  # a cluster that lacks the kind refuses those who may not read everything
        for body in bodies:
            meta = body["metadata"]
            if meta["uid"] not in uids and not _ENDED & true_conditions(body.get("status") or {}).keys():
                why = (
                    f"it has no {maker.makes.name} under a policy, so it is not protected. Its controller says why: "
                    f"kubectl describe {maker.name.lower()} {meta['name']} -n {meta['namespace']}"
                )
                found.append((called(maker.name, meta["name"]), why))
    return found


def completed(cluster: Cluster, namespace: str, incomplete: str) -> list[str]:
    """Returns the names of workloads under a policy that complete what a user has begun to type."""
    written, slash, begun = incomplete.rpartition("/")
    if not slash:
        bodies, _ = listed(cluster, namespace)
        return sorted({name for body in bodies if (name := str(body["metadata"]["name"])).startswith(begun)})
    named = parse(f"{written}/x")
    kinds = [known for known in TYPES if known.name == named.of_workload]
    bodies = [body for known in kinds for body in cluster.list(known.kind, namespace, labels=known.selector)]
    names = (str(body["metadata"]["name"]) for body in bodies if named.kind in (made_by(body), named.of_workload))
    return sorted(f"{written}/{name}" for name in names if name.startswith(begun))


def pods_of(cluster: Cluster, namespace: str, kind: str, name: str, uid: str) -> list[Json]:
    """Returns the pods of a workload that exist now."""
    labels = BY_NAME[kind].record_labels(name, uid)
    return cluster.list(PODS, namespace, labels=",".join(f"{key}={value}" for key, value in labels.items()))


def _look(
    cluster: Cluster, known: WorkloadType | WorkloadMaker, namespace: str, named: Named, refused: list[NotAllowed]
) -> Json | None:
    """Returns the object of that name. None if there is none, or if one of several kinds may not be read."""
    try:
        return cluster.find(known.kind, namespace, named.name)
    except NotAllowed as error:
        if named.kind is not None:
            raise
        # A cluster may lack the kind. It then refuses those who may not read everything.
        refused.append(error)
        return None


def _belongs_to_no_other(found: WorkloadMatch) -> None:
    """Raises if a part of a workload was named, such as a Job of a JobSet."""
    meta = found.body["metadata"]
    belongs = membership_of(read_labels(meta)).workload_uid
    if belongs in ("", meta["uid"]):
        return
    reference = owner(found.body)
    kind, name = str(reference.get("kind", "")), str(reference.get("name", ""))
    raise CommandError(
        f"the {found.title} belongs to the {kind} {name}", f"Name that one: {called(kind, name)}", ExitCode.USAGE
    )


def _made_by(cluster: Cluster, maker: WorkloadMaker, body: Json) -> WorkloadMatch:
    meta, known = body["metadata"], maker.makes
    found = cluster.find(known.kind, meta["namespace"], meta["name"])
    if found is None or owner_uid(found["metadata"]) != meta["uid"]:
        raise CommandError(
            f"the {maker.name} {meta['name']} has no {known.name} yet",
            f"Its controller says why: kubectl describe {maker.name.lower()} {meta['name']} -n {meta['namespace']}",
        )
    return WorkloadMatch(known, {**found, "kind": known.name}, maker.name)


def applied_policy(cluster: Cluster, namespace: str, name: str | None) -> CheckpointPolicy | None:
    """Returns the policy that applies to workloads of a namespace, under the limits of administrators.

    Args:
        cluster: The API server. If its user may not read what is not in the namespace, that is left out.
        namespace: The namespace.
        name: The policy that a workload names. None: it names none, and gets the default.

    Raises:
        CommandError: The policy cannot be used, or the API server does not answer.
    """
    store = PolicyStore(DEFAULT_LONGEST_HOLD_S)
    try:
        try:
            of_cluster = [_cluster_policy(body) for body in cluster.list(CLUSTER_POLICIES, None)]
            labels = read_labels(cluster.get(NAMESPACES, None, namespace)["metadata"]) if of_cluster else {}
        except NotAllowed:
            of_cluster, labels = [], {}
        for policy in of_cluster:
            store.put_cluster(policy)
        store.put_labels(namespace, labels)
        if name is None:
            default = default_of(of_cluster, labels)
            name = None if default is None else default.name
        if name and (body := cluster.find(POLICIES, namespace, name)) is not None:
            store.put((namespace, name), CheckpointPolicy.of(body))
    except Unreadable as error:
        raise CommandError(f"the policy {name!r} cannot be used: {error}", code=ExitCode.BAD) from error
    return store.get((namespace, name)) if name else None


def _cluster_policy(body: Json) -> ClusterCheckpointPolicy:
    try:
        return ClusterCheckpointPolicy.of(body)
    except Unreadable as error:
        text = f"the ClusterCheckpointPolicy {body['metadata']['name']!r} cannot be used: {error}"
        raise CommandError(text, code=ExitCode.BAD) from error
