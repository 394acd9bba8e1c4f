"""Label selectors, as metav1.LabelSelector. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from gracepoint_operator.resources.base import Model, cel, rules

_VALUES_MESSAGE = "values must be there for In and NotIn, and only for them"
_Key = Annotated[str, Field(min_length=1, max_length=317)]
_Value = Annotated[str, Field(max_length=63)]


class LabelOperator(StrEnum):
    """How a label is compared."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"

    @property
    def has_values(self) -> bool:
        return self in (LabelOperator.IN, LabelOperator.NOT_IN)


class Requirement(Model):
    """A label that an object must have, or must not have."""

    key: _Key
    """Key of the label."""
    operator: LabelOperator
    """How the label is compared with values."""
    values: list[_Value] = Field(default=[], max_length=64)
    """Values for In and NotIn."""

    model_config = ConfigDict(
        json_schema_extra=rules(cel("(self.operator in ['In', 'NotIn']) == (self.values.size() > 0)", _VALUES_MESSAGE))
    )

    @model_validator(mode="after")
    def _has_values(self) -> Requirement:
        if self.operator.has_values != bool(self.values):
            raise ValueError(f"{_VALUES_MESSAGE}; found {self.operator} with {self.values}")
        return self


class LabelSelector(Model):
    """Selects objects by their labels, as everywhere in Kubernetes. Empty ({}): all of them."""

    match_labels: dict[str, _Value] = Field(default={}, max_length=64)
    """Labels that an object must have, with these values."""
    match_expressions: list[Requirement] = Field(default=[], max_length=64)
    """Further conditions. An object must meet all of them."""

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Returns whether it selects an object with these labels."""
        return selects(self.to_json(), labels)


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Returns whether a selector matches the labels, as metav1.LabelSelectorAsSelector.

    An empty selector matches every object. None matches none.
    """
    if selector is None:
        return False
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _meets(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def _meets(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return key in labels and labels[key] in values
        case "NotIn":
            return key not in labels or labels[key] not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"matchExpressions.operator: found {other!r}, expected In, NotIn, Exists or DoesNotExist")
