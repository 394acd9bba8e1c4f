"""The custom resources as pydantic models, and the CRDs that are generated from them.

``CheckpointPolicy.of(body)`` reads an object of the API server, ``part.to_json()`` writes one. ``python -m
gracepoint_operator.resources`` prints the CRDs, or with ``--write`` puts them where the project keeps them.

``signals``, ``model``, the rooms above them and the command line call it. It calls no other room.
"""

from gracepoint_operator.resources.base import WORKLOAD_FIELD, WORKLOAD_KIND, Condition, ConditionStatus
from gracepoint_operator.resources.cluster_policy import (
    ClusterCheckpointPolicy,
    default_of,
    made_from,
    why_no_default,
)
from gracepoint_operator.resources.goodput import (
    GangLife,
    PassedStep,
    SaveSuggestion,
    SecondsByCategory,
    WorkloadGoodput,
)
from gracepoint_operator.resources.policy import (
    AfterSave,
    CheckpointPolicy,
    CheckpointPolicySpec,
    DeadlinePolicy,
    PolicyInForce,
    SignalKind,
    Training,
)
from gracepoint_operator.resources.policy_checkpoint import Checkpoint
from gracepoint_operator.resources.policy_status import (
    CheckpointPolicyStatus,
    LastSave,
    PolicyReplica,
    PolicyWorkloads,
    WorkloadConnections,
    WorkloadForecast,
)
from gracepoint_operator.resources.preemption import (
    Acknowledgements,
    Laggard,
    Lags,
    PolicyCopy,
    Preemption,
    PreemptionSpec,
    PreemptionStatus,
    Replica,
    RequestReference,
    StageTime,
    WorkloadReference,
)
from gracepoint_operator.resources.request import PreemptionRequest, RequestPhase, RequestSpec, RequestStatus

__all__ = [
    "WORKLOAD_FIELD",
    "WORKLOAD_KIND",
    "Acknowledgements",
    "AfterSave",
    "Checkpoint",
    "CheckpointPolicy",
    "CheckpointPolicySpec",
    "CheckpointPolicyStatus",
    "ClusterCheckpointPolicy",
    "Condition",
    "ConditionStatus",
    "DeadlinePolicy",
    "GangLife",
    "Laggard",
    "Lags",
    "LastSave",
    "PassedStep",
    "PolicyCopy",
    "PolicyInForce",
    "PolicyReplica",
    "PolicyWorkloads",
    "Preemption",
    "PreemptionRequest",
    "PreemptionSpec",
    "PreemptionStatus",
    "Replica",
    "RequestPhase",
    "RequestReference",
    "RequestSpec",
    "RequestStatus",
    "SaveSuggestion",
    "SecondsByCategory",
    "SignalKind",
    "StageTime",
    "Training",
    "WorkloadConnections",
    "WorkloadForecast",
    "WorkloadGoodput",
    "WorkloadReference",
    "default_of",
    "made_from",
    "why_no_default",
]
