"""What the models of both resources share: their base class, bounded types and the CEL helper.

The CRDs are generated from the models (``crds``). Every string and list has a bound: the API server refuses a CRD
whose CEL rules could cost too much, and it computes the cost from the bounds.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from gracepoint.wire.names import API_VERSION, GROUP, OLD_API_VERSION
from gracepoint_operator.read_errors import Unreadable, reading, shortened

logger = logging.getLogger(__name__)

_PASSES = 3


def cel(rule: str, message: str, found: str = "") -> dict[str, Any]:
    """One CEL rule, to be put into a schema's ``json_schema_extra`` by ``rules``.

    Args:
        rule: CEL that holds for every good value.
        message: What was expected; without quotes.
        found: CEL of the string to add as what was found.
    """
    constraint = {"rule": rule, "message": message}
    return constraint | {"messageExpression": f"'{message}; found ' + {found}"} if found else constraint


def cel_from(rule: str, message: str) -> dict[str, Any]:
    """Like ``cel``, for a rule that asks what was there before: ``oldSelf`` is optional, and absent at creation."""
    return cel(rule, message) | {"optionalOldSelf": True}


def rules(*items: dict[str, Any]) -> dict[str, Any]:
    """The schema extension that holds CEL rules."""
    return {"x-kubernetes-validations": list(items)}


def list_map(*keys: str) -> dict[str, Any]:
    """The schema extension of a list whose entries are distinguished by ``keys``, each owned by its writer."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def _of_64_bits(value: int) -> int:
    """Refuses larger numbers. Pods report figures, and the API server would refuse a record with such a one forever."""
    if value >= 2**63:
        raise ValueError("expected a number of 64 bits, found a larger one")
    return value


LIST_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
IMMUTABLE = rules(cel("self == oldSelf", "is immutable"))

#: Time with a zone; microseconds are kept.
Time = AwareDatetime
#: Name of any Kubernetes object.
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
#: Name of a part of a pod or JobSet (RFC 1123 label).
LabelName = Annotated[str, Field(min_length=1, max_length=63)]
Uid = Annotated[str, Field(min_length=1, max_length=64)]
#: A sentence for people.
Text = Annotated[str, Field(max_length=1024)]
Count = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"}), AfterValidator(_of_64_bits)]
Seconds = Annotated[float, Field(ge=0)]


#: The kind of a workload to which a resource refers without a kind: the schema was made when no other was known.
WORKLOAD_KIND = "JobSet"
#: The field of a spec that refers to the workload.
WORKLOAD_FIELD = "jobSet"
#: Fields whose name in JSON says JobSet, for the same reason.
_JSON_NAMES = {"workload": WORKLOAD_FIELD, "workloads": "jobSets", "workload_kind": "kind"}


def _json_name(field: str) -> str:
    return _JSON_NAMES.get(field) or to_camel(field)


class Model(BaseModel):
    """Base of every part: camelCase in JSON, unknown fields refused, never changed in place."""

    model_config = ConfigDict(
        alias_generator=_json_name,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    def to_json(self) -> dict[str, Any]:
        """Returns this part as JSON for the API server: camelCase, plain values, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def changes_since(self, before: Self) -> dict[str, Any]:
        """Returns the fields whose value differs from ``before``, as ``to_json`` gives them."""
        then = before.to_json()
        return {name: value for name, value in self.to_json().items() if value != then.get(name)}


class OfWorkload(Model):
    """Base of the parts that are about one workload."""

    workload_kind: Literal["JobSet", "Job"] | None = None
    """Kind of the workload. Absent: JobSet."""

    @property
    def kind(self) -> str:
        """The workload's kind in the API."""
        return self.workload_kind or WORKLOAD_KIND

    @staticmethod
    def named(kind: str) -> Literal["Job"] | None:
        """Returns the value of the field for a kind. None for JobSet: older records do not have the field, and the API
        server refuses to add it to them."""
        return "Job" if kind == "Job" else None


class ConditionStatus(StrEnum):  # noqa: D101  a docstring would be in the CRDs
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Model):
    """A condition of the object, as in other Kubernetes APIs. A type without an entry in the list is not known yet."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Type of the condition."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Reason for the status as one CamelCase word, for programs."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Message for users: what was found, what was expected, and what to do."""
    last_transition_time: Time
    """When the status last changed."""
    observed_generation: Count | None = None
    """The generation of the object from which the condition was computed. Absent: not recorded."""


#: The list of conditions of a status.
Conditions = Annotated[list[Condition], Field(max_length=16, json_schema_extra=list_map("type"))]


#: What of the metadata is read in addition to the model.
_IDENTITY: dict[str, type] = {"name": str, "namespace": str, "uid": str, "generation": int}


class Resource(Model):
    """Base of the objects themselves."""

    kind_name: ClassVar[str]
    plural: ClassVar[str]
    #: Whether its objects are in no namespace.
    cluster_scoped: ClassVar[bool] = False
    #: What is read in place of a value that only a newer version knows, by the field's path without indices. For other
    #: fields, the value counts as absent.
    in_place_of_unknown: ClassVar[Mapping[tuple[str, ...], str]] = {}

    #: The parts in which unknown fields and values are passed over. In other parts they are an error.
    passes_over: ClassVar[frozenset[str]] = frozenset({"spec", "status"})

    _unknown: tuple[str, ...] = PrivateAttr(default=())

    api_version: Annotated[str, Field(pattern=f"^{GROUP}/({API_VERSION}|{OLD_API_VERSION})$".replace(".", r"\."))]
    kind: str
    metadata: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace", ""))

    @property
    def uid(self) -> str:
        return str(self.metadata.get("uid", ""))

    @property
    def generation(self) -> int:
        return int(self.metadata.get("generation", 0))

    @property
    def unknown(self) -> tuple[str, ...]:
        """What this version does not know and has passed over, as paths with the values found. Empty: nothing."""
        return self._unknown

    @classmethod
    def part(cls, name: str) -> type[Model]:
        """The model of ``spec`` or ``status``."""
        model = cls.model_fields[name].annotation
        if not (isinstance(model, type) and issubclass(model, Model)):
            raise TypeError(f"{cls.__name__}.{name}: expected a Model, found {model!r}")
        return model

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Reads an object as the API server gives it.

        An object of a newer version is read, too: after a rollback, or while replicas are replaced, an operator meets
        objects that a newer one, or the users of a newer one, wrote. Fields that this version does not know are passed
        over, and so are values that it does not know of fields that have a list of values (``in_place_of_unknown``);
        ``unknown`` names them. The API server refuses both from users who write such an object under this CRD.

        Raises:
            Unreadable: It is not of this version's schema for another reason; names the fields.
        """
        with reading(f"a {cls.__name__}"):
            read = cls._tolerantly(body)
            for field, kind in _IDENTITY.items():
                if not isinstance(value := read.metadata.get(field, kind()), kind):
                    raise Unreadable(
                        f"a {cls.__name__}: metadata.{field}: expected {kind.__name__}, found {shortened(repr(value))}"
                    )
            return read

    @classmethod
    def _tolerantly(cls, body: Mapping[str, Any]) -> Self:
        # Through JSON, since frameworks hand out read-only views that are no dict all the way down.
        text = json.dumps({**body, "status": body.get("status") or {}}, default=dict)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error
        plain: dict[str, Any] = json.loads(text)
        unknown: dict[str, None] = {}
        # One pass for fields and values. Further passes for fields that pydantic did not reach before.
        for _ in range(_PASSES):
            if not _pass_over(plain, first, cls, unknown):
                raise first
            try:
                read = cls.model_validate_json(json.dumps(plain))
            except ValidationError as error:
                first = error
                continue
            read._unknown = tuple(unknown)  # noqa: SLF001  made here
            name = f"{read.metadata.get('namespace')}/{read.metadata.get('name')}"
            _warn_once(cls.kind_name, name, tuple(unknown))
            return read
        raise first


def _pass_over(plain: dict[str, Any], error: ValidationError, model: type[Resource], unknown: dict[str, None]) -> bool:
    """Takes what only a newer version knows out of ``plain``; False if something else is wrong with it."""
    problems = error.errors(include_url=False, include_context=False)
    for problem in problems:
        if problem["type"] not in ("enum", "extra_forbidden") or problem["loc"][0] not in model.passes_over:
            return False
    # Entries of a list from its end, so that the indices of the others stay.
    for problem in sorted(problems, key=lambda item: [str(part).rjust(8, "0") for part in item["loc"]], reverse=True):
        *parents, key = problem["loc"]
        place: Any = plain
        for part in parents:
            place = place[part]
        path = tuple(part for part in problem["loc"] if isinstance(part, str))
        if problem["type"] == "extra_forbidden":
            unknown[".".join(map(str, problem["loc"]))] = None
        else:
            unknown[f"{'.'.join(path)}: {str(place[key])[:64]!r}"] = None
        if path in model.in_place_of_unknown and problem["type"] == "enum":
            place[key] = model.in_place_of_unknown[path]
        else:
            del place[key]
    return True


@functools.lru_cache(maxsize=4096)
def _warn_once(kind: str, name: str, unknown: tuple[str, ...]) -> None:
    logger.warning(
        "%s %s: found %s, which this version does not know and passes over; a newer operator does", kind, name, unknown
    )


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """The structural OpenAPI v3 schema of ``model``, as a CRD has it, from pydantic's JSON schema.

    What the API server does not take is translated: ``$ref`` is put in place, "or null" means "may be absent", and
    ``additionalProperties: false`` goes, as the API server prunes or refuses unknown fields by itself.

    Raises:
        ValueError: The model uses what a structural schema cannot say; names where.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _translate(schema, schema.get("$defs", {}), model.__name__)


def either(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the structural schema of an object that is of one of two kinds.

    A field may be absent unless both kinds require it. A default is kept only if both kinds have it. The description of
    a field that both kinds have is that of ``first``; the rules of both apply.
    """
    merged = {**second, **first}
    if first.get("default") != second.get("default"):
        merged.pop("default")
    if "properties" in first and "properties" in second:
        first_fields, second_fields = first["properties"], second["properties"]
        names = first_fields.keys() & second_fields.keys()
        shared = {name: either(first_fields[name], second_fields[name]) for name in names}
        of_one = {name: _without_default(field) for name, field in {**first_fields, **second_fields}.items()}
        merged["properties"] = {**of_one, **shared}
        merged["required"] = [name for name in first.get("required", []) if name in second.get("required", [])]
    if "enum" in first and "enum" in second:
        merged["enum"] = [*first["enum"], *(value for value in second["enum"] if value not in first["enum"])]
    rules = "x-kubernetes-validations"
    if rules in first and rules in second:
        merged[rules] = first[rules] + [rule for rule in second[rules] if rule not in first[rules]]
    return merged


def _without_default(field: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in field.items() if key != "default"}


#: Keywords that are taken over as they are.
_PLAIN = frozenset(
    {
        "type",
        "format",
        "description",
        "default",
        "enum",
        "required",
        "pattern",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "maxItems",
        "maxProperties",
        "x-kubernetes-validations",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
    }
)


def _translate(node: dict[str, Any], definitions: dict[str, Any], path: str) -> dict[str, Any]:
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        return _translate(_overlay(target, node, "$ref"), definitions, path)
    if "anyOf" in node:
        arms = [arm for arm in node["anyOf"] if arm != {"type": "null"}]
        if len(arms) != 1:
            raise ValueError(f"{path}: expected 'one type or null', found a union of {len(arms)} types")
        return _translate(_overlay(arms[0], node, "anyOf"), definitions, path)
    translated: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            translated[key] = {name: _translate(field, definitions, f"{path}.{name}") for name, field in value.items()}
        elif key == "additionalProperties" and isinstance(value, dict) and "maxProperties" in node:
            translated[key] = _translate(value, definitions, f"{path}{{}}")
        elif key == "items":
            translated[key] = _translate(value, definitions, f"{path}[]")
        elif key == "const":
            translated["enum"] = [value]
        elif key in _PLAIN:
            translated[key] = value
        elif key not in {"title", "$defs"} and (key, value) != ("additionalProperties", False):
            raise ValueError(f"{path}: {key!r} has no place in a structural schema")
    if translated.get("default", 0) is None:
        del translated["default"]
    if isinstance(default := translated.get("default"), dict):
        translated["default"] = {name: value for name, value in default.items() if value is not None}
    if "description" in translated:
        translated["description"] = reflow(translated["description"])
    return translated


def _overlay(target: dict[str, Any], node: dict[str, Any], reference: str) -> dict[str, Any]:
    """Returns ``target`` with the other keys of the node that refers to it. These win; the rules of both apply."""
    own = {key: value for key, value in node.items() if key != reference}
    rules = "x-kubernetes-validations"
    if rules in target and rules in own:
        own[rules] = target[rules] + own[rules]
    return {**target, **own}


def reflow(text: str) -> str:
    """Docstring to description: paragraphs stay, line breaks within them and code quotes go."""
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(paragraphs).replace("``", "")


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
    match_labels: Mapping[str, str] = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in match_labels.items()) and all(
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
