"""Whatever a pod says, its record can still be written, and nothing that it says controls a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracepoint.wire.messages import (
    Forecast,
    Message,
    Phase,
    Report,
    Resumption,
    StageTiming,
    Stall,
    Trouble,
    WireError,
    json_key,
)
from gracepoint_operator.channel.reports import UnknownPreemption
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import Replica, cluster, report, running, until

CRDS = Path(__file__).parents[4] / "crds"
#: What the API server keeps of an Event's note.
_NOTE_BYTES = 1024


def _schemas() -> dict[str, JsonObject]:
    made = {}
    for path in CRDS.glob("*.yaml"):
        spec = yaml.safe_load(path.read_text())["spec"]
        made[spec["names"]["kind"]] = spec["versions"][0]["schema"]["openAPIV3Schema"]
    return made


SCHEMAS = _schemas()


def violations(schema: JsonObject, value: Any, path: str = "") -> list[str]:
    """What the API server would refuse of a value beside what JSON Schema says: numbers of 64 bits, keys of lists."""
    found: list[str] = []
    match value:
        case dict():
            for key, item in value.items():
                found += violations(schema.get("properties", {}).get(key) or {}, item, f"{path}.{key}")
        case list():
            keys = schema.get("x-kubernetes-list-map-keys") or []
            ids = [tuple(item.get(key) for key in keys) for item in value] if keys else []
            found += [f"{path}: two entries {one}" for one in set(ids) if ids.count(one) > 1]
            for item in value:
                found += violations(schema.get("items") or {}, item, f"{path}[]")
        case bool():
            pass
        case int() if not -(2**63) <= value < 2**63:
            found.append(f"{path}: {value} has more than 64 bits")
        case str() if any(not c.isprintable() and c not in "\n\t" for c in value):
            found.append(f"{path}: {value!r} could control a terminal")
    return found


class StrictApi(MemoryApi):
    """Refuses what the API server would refuse by the CRDs' schemas, and remembers it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.refused: list[str] = []

    def store(self, body: JsonObject) -> None:
        schema = SCHEMAS.get(
            {"Preemption": "preemptions", "CheckpointPolicy": "checkpointpolicies"}.get(body.get("kind", ""), "")
        )
        wrong = [] if schema is None else violations(schema, body)
        if schema is not None:
            checked = jsonschema.Draft7Validator(schema)
            wrong += [f"{list(error.absolute_path)}: {error.message[:200]}" for error in checked.iter_errors(body)]
        if body.get("kind") == "Event":
            wrong += violations({}, body)
            if not body["note"].isprintable():
                wrong.append(f"the note {body['note']!r} has several lines")
            if len(body["note"].encode()) > _NOTE_BYTES:
                wrong.append("the note is too long")
        if wrong:
            self.refused += wrong
            raise client.Refused(f"refused: {wrong[0]}")


TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", "\x1b]0;title\x07", "\x1b[2J\x9b31m", "\u202eevil", "x" * 1500, "\ud800", "a\nb", "Committed"]
    ),
)
#: Mostly what a message may have: one wrong field refuses all of it.
NUMBERS = st.one_of(st.integers(0, 2**40), st.integers(0, 2**63 - 1), st.sampled_from([-1, 2**63, 2**70]))
REALS = st.one_of(
    st.floats(0, 1e6), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([float("inf"), 1e308])
)
#: Stages as later versions may have them, and as nobody has.
KEYS = st.one_of(st.from_regex(r"[a-z][A-Za-z]{0,8}", fullmatch=True), TEXTS)
MANY_KEYS = st.text("abcdefgh", min_size=3, max_size=8)


def values(wanted: Any, name: str) -> st.SearchStrategy[Any]:
    """JSON values for a field of a message."""
    origin, arms = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if arm is type(None) else values(arm, name) for arm in arms))
    if origin is list:
        return st.lists(values(arms[0], name), max_size=20)
    if origin is dict:
        item = values(arms[1], name)
        many = st.builds(dict.fromkeys, st.sets(MANY_KEYS, min_size=20, max_size=32), item)
        return st.one_of(many, st.dictionaries(KEYS, item, max_size=40))
    if dataclasses.is_dataclass(wanted):
        return bodies(typing.cast(type, wanted))
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        return st.sampled_from([str(one) for one in wanted])
    return {str: TEXTS, int: NUMBERS, float: REALS, bool: st.booleans()}[wanted]


def bodies(kind: type, **given: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Messages of a kind as JSON, with anything in all fields that are not given."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return st.fixed_dictionaries(
        {
            json_key(name): st.just(given[name]) if name in given else values(wanted, name)
            for name, wanted in fields.items()
        }
    )


OF_POD = {"version": 1, "pod_uid": "uid-pod-0-0", "session": "s-0", "workload_uid": objects.JOBSET_UID}
MESSAGES: dict[type[Message], st.SearchStrategy[dict[str, Any]]] = {
    Report: bodies(Report, **OF_POD, preemption=""),
    Forecast: bodies(Forecast, **OF_POD),
    Resumption: bodies(Resumption, **OF_POD),
    Stall: bodies(Stall, **OF_POD),
    Trouble: bodies(Trouble, **OF_POD),
}


#: Reports the most: they are what a record is made of.
KINDS: st.SearchStrategy[type[Message]] = st.one_of(st.just(Report), st.sampled_from(list(MESSAGES)))


async def say(replica: Replica, kind: type[Message], body: Mapping[str, Any]) -> None:
    """What the channel does with the body of a request. A refusal is an answer."""
    pod = replica.core.cache.objects.pods["uid-pod-0-0"]
    with contextlib.suppress(WireError, ValueError, UnknownPreemption, client.KubeError):
        await replica.core.reports.take(pod, typing.cast(Any, kind.from_dict(body)))


async def _all_written(replica: Replica, api: StrictApi) -> None:
    """The record gets a phase that comes after whatever was said. What is said after an end may begin another one."""
    newest = max(replica.preemptions, key=lambda body: body["spec"]["epoch"])
    await replica.report(Phase.COMMITTED, preemption=newest["metadata"]["name"])
    ends = {"Evacuated", "Committed", "Promoted", "Failed", "Retracted", "Expired"}

    def ended() -> bool:
        return {body.get("status", {}).get("phase") for body in replica.preemptions} <= ends

    await until(lambda: api.refused or ended(), "the end to be written")
    assert not api.refused


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(st.data())
def test_a_record_can_be_written_whatever_pods_say(data: st.DataObject) -> None:
    async def scene() -> None:
        clock = Clock()
        api = StrictApi(clock)
        cluster(api)
        async with running(api, clock) as replica:
            replica.taint()
            await replica.phase("Noticed")
            for kind in data.draw(st.lists(KINDS, min_size=1, max_size=4)):
                await say(replica, kind, data.draw(MESSAGES[kind]))
            await _all_written(replica, api)

    asyncio.run(scene())


HOSTILE = "\x1b]0;x\x07\x9b2J\u202e\ud800\nall is well" + "x" * 2000


def _disrupted_pod(text: str) -> JsonObject:
    made = objects.pod(0, disruption=text)
    made["status"]["conditions"][-1]["message"] = text
    return made


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(kinds.PODS, _disrupted_pod(HOSTILE), id="a pod"),
        pytest.param(
            kinds.NODES,
            objects.node("node-1", conditions=[objects.condition("Ready", "False", reason=HOSTILE, message=HOSTILE)]),
            id="a node's condition",
        ),
        pytest.param(
            kinds.NODES,
            objects.node(
                "node-1",
                taints=[objects.taint() | {"value": HOSTILE}],
                labels={"cloud.google.com/x": HOSTILE},
                annotations={"gracepoint.dev/x": HOSTILE},
            ),
            id="a node's taint, labels and annotations",
        ),
        pytest.param(
            kinds.POLICIES,
            objects.policy(signals=[HOSTILE]) | {"status": {"conditions": [{"type": HOSTILE, "message": HOSTILE}]}},
            id="a policy",
        ),
        pytest.param(
            JOBSETS,
            objects.jobset() | {"status": {"conditions": [objects.condition(HOSTILE, reason=HOSTILE)]}},
            id="a JobSet",
        ),
    ],
)
async def test_a_record_can_be_written_whatever_objects_say(kind: Kind, body: JsonObject, clock: Clock) -> None:
    api = StrictApi(clock)
    cluster(api)
    async with running(api, clock) as replica:
        replica.core.feed(kind, "MODIFIED", body)
        replica.taint("node-2")
        await replica.phase("Noticed")
        await _all_written(replica, api)


async def test_a_record_keeps_its_own_stages_when_a_pod_makes_up_others(clock: Clock) -> None:
    api = StrictApi(clock)
    cluster(api)
    async with running(api, clock) as replica:
        replica.taint()
        name = (await replica.phase("Noticed"))["metadata"]["name"]
        for first in ("a", "b"):
            stages = {first + chr(ord("a") + number): StageTiming(p50_s=0.1, max_s=0.1) for number in range(20)}
            made_up = dataclasses.replace(report(Phase.FROZEN, preemption=name), stages=stages)
            await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], made_up)
        await _all_written(replica, api)
        written = {timing["stage"] for timing in replica.preemptions[0]["status"]["timings"]}
        assert {"frozen", "agreed"} <= written
        assert len(written) == 32


@pytest.mark.parametrize("text", ["\x1b]0;x\x07", "\x1b[2J", "\x9b2J", "\u202e", "\x00", "\x7f"])
def test_texts_of_messages_are_printable(text: str) -> None:
    body = dataclasses.asdict(report(Phase.FAILED)) | {"message": f"a{text}b\n\tc"}
    body["jobset_uid"] = body.pop("workload_uid")
    read = Report.from_dict(body).message
    assert read.startswith("a\\")
    assert read.endswith("b\n\tc")
