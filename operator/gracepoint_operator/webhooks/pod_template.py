"""Checks a pod template for conflicts with the release contract and with the injected parts. Pure."""

from __future__ import annotations

from collections.abc import Collection

from gracepoint.wire.names import TOKEN_AUDIENCE, TOKEN_DIRECTORY
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob

#: Name of the volume with the projected token. The name is reserved.
TOKEN_VOLUME = "gracepoint-token"
_CLUSTER_DNS = "ClusterFirstWithHostNet"


def check_template(member: TrainingJob, codes: Collection[int], problems: Problems) -> None:
    """Fills in missing fields of the pod template, and adds conflicts to ``problems``.

    Args:
        member: The replicatedJob of the template.
        codes: Exit codes of the training container after a save.
        problems: Gets the conflicts.
    """
    _stays_ended(member, codes, problems)
    _finds_names(member, problems)
    _leaves_room_for_the_token(member, problems)


def _stays_ended(member: TrainingJob, codes: Collection[int], problems: Problems) -> None:
    """Adds a problem if a rule of the container makes it restart in place."""
    container = member.container
    path = f"{member.path}.template.spec.containers[{container['name']}]"
    why = "as a container restarted in place stays on the node that is going away"
    if container.get("restartPolicy") not in (None, "Never"):
        problems.add(
            f"{path}.restartPolicy",
            found=container["restartPolicy"],
            expected=f"Never or nothing, {why}",
            fix="Remove it",
        )
    for i, rule in enumerate(container.get("restartPolicyRules") or []):
        on: Json = rule.get("exitCodes") or {}
        named = set(on.get("values") or []) & set(codes)
        matches = bool(named) if on.get("operator") == "In" else len(named) < len(set(codes))
        if matches:
            problems.add(
                f"{path}.restartPolicyRules[{i}]",
                found=f"{rule.get('action')} for exit codes {on.get('operator')} {on.get('values')}",
                expected=f"none that matches {sorted(codes)}, {why}",
                fix="Remove the rule, or these codes from it"
                if on.get("operator") == "In"
                else "Remove the rule, or add these codes to it",
            )


def _finds_names(member: TrainingJob, problems: Problems) -> None:
    """Handles pods on the host network, which use the node's resolver.

    That resolver knows the name of neither process 0 nor the operator.
    """
    pod = member.template["spec"]
    if not pod.get("hostNetwork"):
        return
    if pod.get("dnsPolicy") is None:
        pod["dnsPolicy"] = _CLUSTER_DNS
    elif pod["dnsPolicy"] in ("ClusterFirst", "Default"):
        problems.add(
            f"{member.path}.template.spec.dnsPolicy",
            found=f"{pod['dnsPolicy']}, which beside hostNetwork means the node's own resolver",
            expected=f"{_CLUSTER_DNS}: process 0 and the operator are reached by their names in the cluster",
            fix=f"Write dnsPolicy: {_CLUSTER_DNS}",
        )


def _leaves_room_for_the_token(member: TrainingJob, problems: Problems) -> None:
    pod, container = member.template["spec"], member.container
    for i, volume in enumerate(pod.get("volumes") or []):
        if volume.get("name") == TOKEN_VOLUME and not _is_token(volume):
            problems.add(
                f"{member.path}.template.spec.volumes[{i}].name",
                found=TOKEN_VOLUME,
                expected="another name: this one is kept for the token that shows the operator who the pod is",
                fix="Rename the volume",
            )
    for i, mount in enumerate(container.get("volumeMounts") or []):
        at = str(mount.get("mountPath") or "").rstrip("/")
        if at == TOKEN_DIRECTORY and mount.get("name") != TOKEN_VOLUME:
            problems.add(
                f"{member.path}.template.spec.containers[{container['name']}].volumeMounts[{i}].mountPath",
                found=at,
                expected="another path: the token that shows the operator who the pod is will be mounted there",
                fix="Mount it elsewhere",
            )


def _is_token(volume: Json) -> bool:
    """Returns True if an earlier injection made the volume, possibly by another version of the operator."""
    sources: list[Json] = (volume.get("projected") or {}).get("sources") or []
    return any((source.get("serviceAccountToken") or {}).get("audience") == TOKEN_AUDIENCE for source in sources)
