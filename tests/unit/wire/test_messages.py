"""The channel's messages refuse what they cannot read, in words, and tolerate a newer sender."""

from __future__ import annotations

import json

import pytest

from gracepoint.errors import WireError
from gracepoint.wire.frames import Frame, Hello, Notice
from gracepoint.wire.messages import Acknowledgement, Confidence, Mode, Phase, Report

NOTICE = Notice(
    preemption="train-1a2b3c4d-1",
    pod_uid="pod-uid",
    session="nonce",
    workload_uid="jobset-uid",
    cause="SpotTermination",
    signal="taint cloud.google.com/impending-node-termination",
    confidence=Confidence.SURE,
    nodes=["node-1"],
    remaining_s=14.5,
    deadline="2026-01-01T00:00:15Z",
    mode=Mode.ENFORCE,
)


def test_a_frame_is_one_line_and_reads_back_as_itself() -> None:
    line = NOTICE.to_json()
    assert "\n" not in line
    assert Frame.read(line) == NOTICE


def test_fields_of_a_newer_sender_are_ignored() -> None:
    data = json.loads(NOTICE.to_json()) | {"colour": "red"}
    assert Frame.read(json.dumps(data)) == NOTICE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"version": 2}, "Notice.version: expected 1, found 2", id="another version"),
        pytest.param({"type": "gossip"}, "Frame.type: expected one of", id="unknown type"),
        pytest.param({"remaining_s": "soon"}, "Notice.remaining_s: expected float, found 'soon'", id="string"),
        pytest.param({"remaining_s": True}, "Notice.remaining_s: expected float, found True", id="bool"),
        pytest.param({"nodes": "node-1"}, "Notice.nodes: expected list", id="no list"),
        pytest.param({"nodes": [1]}, r"Notice.nodes\[0\]: expected str, found 1", id="wrong item"),
        pytest.param({"mode": "Destroy"}, "Notice.mode: expected one of", id="no such mode"),
        pytest.param({"session": None}, "Notice.session: expected str, found None", id="null"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name(change: dict[str, object], words: str) -> None:
    data = json.loads(NOTICE.to_json()) | change
    with pytest.raises(WireError, match=words):
        Frame.read(json.dumps(data))


def test_a_missing_field_is_refused_with_its_name() -> None:
    data = json.loads(NOTICE.to_json())
    del data["preemption"]
    with pytest.raises(WireError, match="Notice.preemption: missing"):
        Frame.read(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '"text"', b"\xff"], ids=repr)
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(WireError, match="expected a JSON object"):
        Acknowledgement.from_json(text)


def test_an_infinite_duration_is_refused() -> None:
    data = json.loads(Hello(replica="a", heartbeat_s=5).to_json()) | {"heartbeat_s": float("inf")}
    with pytest.raises(WireError, match=r"Hello.heartbeat_s: expected float, found inf"):
        Frame.read(json.dumps(data))


def test_an_integer_is_a_duration_but_a_float_is_no_count() -> None:
    data = json.loads(NOTICE.to_json()) | {"remaining_s": 15}
    frame = Frame.read(json.dumps(data))
    assert isinstance(frame, Notice)
    assert frame.remaining_s == 15.0
    with pytest.raises(WireError, match="process_index: expected int, found 1.0"):
        Acknowledgement.from_dict(
            {"version": 1, "pod_uid": "u", "session": "s", "preemption": "p", "process_index": 1.0}
        )


def test_an_optional_field_may_be_null_but_not_missing() -> None:
    report = Report(
        pod_uid="u", session="s", workload_uid="j", preemption="", phase=Phase.FROZEN, cause="",
        process_count=2, participants=[0, 1], ordinal=None, step=None, steps_lost=None, bytes=None,
        seconds_to_spare=None,         stages={}, message="",
    )  # fmt: skip
    assert Report.from_json(report.to_json()) == report
    data = json.loads(report.to_json())
    del data["step"]
    with pytest.raises(WireError, match="Report.step: missing"):
        Report.from_dict(data)


def test_phases_are_ordered_and_end() -> None:
    assert Phase.NOTICED.rank < Phase.AGREED.rank < Phase.COMMITTED.rank
    assert [phase.value for phase in Phase if phase.ended] == [
        "Evacuated", "Committed", "Promoted", "Retracted", "Expired", "Failed",
    ]  # fmt: skip
