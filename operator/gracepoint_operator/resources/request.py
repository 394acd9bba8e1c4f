"""PreemptionRequest: what a user or a controller asks for, to save and exit, or to rehearse that."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from gracepoint.wire.messages import Mode
from gracepoint_operator.resources.base import (
    IMMUTABLE,
    Count,
    LabelName,
    Model,
    ObjectName,
    OfWorkload,
    Resource,
    Seconds,
    Text,
    Time,
    Uid,
    cel,
    rules,
)

_DEADLINE_MESSAGE = "a request has exactly one of deadline and deadlineSeconds"


class RequestedWorkload(OfWorkload):
    """A JobSet in the namespace of the request."""

    name: ObjectName
    """Name of the JobSet."""
    uid: Uid | None = None
    """UID of the JobSet. Absent: any JobSet of that name."""


class RequestSpec(Model):
    """Written by a user or a controller. It asks a JobSet to save and exit, or to rehearse that.

    To withdraw the request, delete it or set ``retracted``. This has no effect when the gang has frozen.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(cel("has(self.deadline) != has(self.deadlineSeconds)", _DEADLINE_MESSAGE))
    )

    workload: Annotated[RequestedWorkload, Field(json_schema_extra=IMMUTABLE)]
    """The JobSet that is asked."""
    cause: Annotated[LabelName, Field(json_schema_extra=IMMUTABLE)] = "Requested"
    """Cause in one word. The record and the notice contain it."""
    deadline: Time | None = None
    """When the pods are expected to be killed. The gang continues to train until it must save. The deadline may be
    edited until the gang has frozen. Absent: deadlineSeconds is used."""
    deadline_seconds: Seconds | None = None
    """Deadline as a number of seconds after the request was created. Absent: deadline is used."""
    mode: Annotated[Literal[Mode.ENFORCE, Mode.DRILL], Field(json_schema_extra=IMMUTABLE)] = Mode.ENFORCE
    """Enforce: save and exit, unless the mode of the policy is Observe or Drill. Drill: rehearse everything except the
    exit."""
    retracted: bool = False
    """True: the request is withdrawn."""

    @model_validator(mode="after")
    def _one_deadline(self) -> RequestSpec:
        if (self.deadline is None) == (self.deadline_seconds is None):
            raise ValueError(_DEADLINE_MESSAGE)
        return self


class RequestPhase(StrEnum):
    """State of a request. When its Preemption has ended, the final phase of that."""

    ADOPTED = "Adopted"
    SUPERSEDED = "Superseded"
    COMMITTED = "Committed"
    PROMOTED = "Promoted"
    RETRACTED = "Retracted"
    EXPIRED = "Expired"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        return self is not RequestPhase.ADOPTED


class RequestStatus(Model):
    """Written by the operator."""

    observed_generation: Count | None = None
    """The generation of the object from which the rest of the status was computed. Absent: it was written by an
    operator that did not have this field."""
    phase: RequestPhase | None = None
    """Adopted: a Preemption was made for the request, or the request joined one. Superseded: the request has no effect;
    the message says why. Otherwise the final phase of the Preemption. Absent: not decided yet."""
    message: Text | None = None
    """Description of the phase."""
    preemption: ObjectName | None = None
    """Name of the Preemption that was made for the request, or that the request joined. Absent: there is none."""


class PreemptionRequest(Resource):
    """A request of a user or a controller: a JobSet is to save and exit, or to rehearse that."""

    kind_name: ClassVar[str] = "PreemptionRequest"
    plural: ClassVar[str] = "preemptionrequests"
    #: A request that is not understood as a whole is not acted upon: what is passed over may be what limits it.
    passes_over = frozenset({"status"})
    #: Failed: nobody acts upon it, and nothing is written over the phase.
    in_place_of_unknown: ClassVar[Mapping[tuple[str, ...], str]] = {("status", "phase"): "Failed"}

    #: Preemption: a request that was made under version 0.2, which had one kind for requests and records.
    kind: Literal["PreemptionRequest", "Preemption"]
    spec: RequestSpec
    status: RequestStatus = RequestStatus()

    @staticmethod
    def is_one(spec: Any) -> bool:
        """True if the spec of a Preemption is a request's, of version 0.2: the operator's own have a number."""
        return "epoch" not in spec
