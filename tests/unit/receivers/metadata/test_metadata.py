"""What is made of a cloud's words, and what of that the mailbox is told."""

from __future__ import annotations

import json
import time

import pytest

from gracepoint.receivers import Disruption, Mailbox
from gracepoint.receivers.metadata import aws, azure, gce
from gracepoint.receivers.metadata.source import (
    HORIZON_S,
    Board,
    Event,
    Look,
    MetadataClient,
    MetadataError,
    MetadataResponse,
)

NOW_S = 1_800_000_000.0


class Told(Mailbox):
    """The mailbox, with a memory of what it was told."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.words: list[tuple[str, float | None]] = []  # signal, seconds left; None: taken back

    def post(self, disruption: Disruption) -> None:
        self.words.append((disruption.signal, disruption.remaining_s))

    def retract(self, origin: str, reason: str = "") -> None:
        self.words.append((origin, None))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def board(told: Told) -> Board:
    """One that has looked before, and seen nothing."""
    board = Board("cloud", "node-7", told)
    board.update(Look([], NOW_S))
    return board


def event(
    starts_in_s: float | None = None, name: str = "reboot 1", *, cancelable: bool = True, hint: bool = False
) -> Event:
    starts_at_s = None if starts_in_s is None else NOW_S + starts_in_s
    return Event(name=name, cause="Maintenance", lead_s=40.0, starts_at_s=starts_at_s, cancelable=cancelable, hint=hint)


SIGNAL = "cloud reboot 1 on node-7"


def test_an_event_is_announced_once(board: Board, told: Told) -> None:
    for later_s in (0, 1, 2):
        board.update(Look([event(100)], NOW_S + later_s))
    assert told.words == [(SIGNAL, 100.0)]


@pytest.mark.parametrize("starts_in_s", [None, 0, -500], ids=["no time said", "now", "past"])
def test_event_without_a_time_gets_the_minimum_of_its_kind(board: Board, told: Told, starts_in_s: float | None) -> None:
    board.update(Look([event(starts_in_s)], NOW_S))
    assert told.words == [(SIGNAL, 40.0)]


@pytest.mark.parametrize("starts_in_s", [None, 0, -500], ids=["no time said", "now", "past"])
def test_findings_of_the_first_look_without_a_time_are_ignored(told: Told, starts_in_s: float | None) -> None:
    board = Board("cloud", "node-7", told)
    for later_s in (0, 1, 600):
        board.update(Look([event(starts_in_s)], NOW_S + later_s))
    board.update(Look([], NOW_S + 601))
    assert told.words == []


def test_what_the_first_look_finds_ahead_is_announced(told: Told) -> None:
    Board("cloud", "node-7", told).update(Look([event(100)], NOW_S))
    assert told.words == [(SIGNAL, 100.0)]


def test_an_old_event_that_gets_a_new_time_is_announced(told: Told) -> None:
    board = Board("cloud", "node-7", told)
    board.update(Look([event(-500)], NOW_S))
    board.update(Look([event(300)], NOW_S + 10))
    assert told.words == [(SIGNAL, 290.0)]


def test_what_is_far_ahead_is_announced_when_it_has_come_near(board: Board, told: Told) -> None:
    far = event(HORIZON_S + 100)
    board.update(Look([far], NOW_S))
    board.update(Look([far], NOW_S + 99))
    assert told.words == []
    board.update(Look([far], NOW_S + 101))
    assert told.words == [(SIGNAL, HORIZON_S - 1)]


@pytest.mark.parametrize("moved_s", [50.0, 400.0], ids=["earlier", "later"])
def test_an_event_that_is_moved_is_announced_again(board: Board, told: Told, moved_s: float) -> None:
    board.update(Look([event(100)], NOW_S))
    board.update(Look([event(moved_s)], NOW_S + 1))
    assert told.words == [(SIGNAL, 100.0), (SIGNAL, moved_s - 1)]


def test_postponed_event_is_retracted_until_it_is_near(board: Board, told: Told) -> None:
    board.update(Look([event(100)], NOW_S))
    board.update(Look([event(2 * HORIZON_S)], NOW_S + 1))
    assert told.words[1:] == [(SIGNAL, None)]
    board.update(Look([event(2 * HORIZON_S)], NOW_S + HORIZON_S))
    assert told.words[2:] == [(SIGNAL, HORIZON_S)]


def test_an_event_that_begins_keeps_the_deadline_that_was_announced(board: Board, told: Told) -> None:
    board.update(Look([event(100)], NOW_S))
    board.update(Look([event(None)], NOW_S + 50))
    board.update(Look([event(None)], NOW_S + 51))
    assert told.words == [(SIGNAL, 100.0)]


@pytest.mark.parametrize(
    ("cancelable", "words"), [(True, [(SIGNAL, 100.0), (SIGNAL, None)]), (False, [(SIGNAL, 100.0)])]
)
def test_vanished_event_is_retracted_if_its_kind_allows(
    board: Board, told: Told, cancelable: bool, words: list[tuple[str, float | None]]
) -> None:
    board.update(Look([event(100, cancelable=cancelable)], NOW_S))
    board.update(Look([], NOW_S + 1))
    board.update(Look([], NOW_S + 2))
    assert told.words == words


def test_an_event_that_is_gone_and_comes_again_is_announced_again(board: Board, told: Told) -> None:
    for events in ([event(100)], [], [event(100)]):
        board.update(Look(events, NOW_S))
    assert told.words == [(SIGNAL, 100.0), (SIGNAL, None), (SIGNAL, 100.0)]


def test_events_are_distinguished_by_their_names(board: Board, told: Told) -> None:
    board.update(Look([event(100), event(200, "reboot 2")], NOW_S))
    board.update(Look([event(200, "reboot 2")], NOW_S))
    assert told.words == [(SIGNAL, 100.0), ("cloud reboot 2 on node-7", 200.0), (SIGNAL, None)]


def test_a_hint_is_sent_to_nobody(board: Board, told: Told) -> None:
    board.update(Look([event(100, hint=True)], NOW_S))
    board.update(Look([], NOW_S))
    assert told.words == []


START = "2026-12-01T19:00:01Z"
START_S = 1796151601.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NONE",
        '"NONE"',
        "{ }",
        '{ "error": "no notifications have been received yet, try again later" }',
        json.dumps({"maintenance_status": "COMPLETE"}),
    ],
)
def test_google_says_in_many_ways_that_nothing_is_planned(text: str) -> None:
    assert gce.read_upcoming_maintenance(text, lambda: False, 40.0) == []


@pytest.mark.parametrize(
    "notice",
    [
        {"window_start_time": START, "maintenance_status": "PENDING"},
        {"windowStartTime": START, "maintenanceStatus": "PENDING", "canReschedule": True},
        {"Upcoming maintenance": {"window_start_time": START, "maintenance_status": "PENDING"}},
    ],
    ids=["snake case", "camel case", "wrapped"],
)
def test_google_spells_a_planned_maintenance_in_several_ways(notice: object) -> None:
    (found,) = gce.read_upcoming_maintenance(json.dumps(notice), lambda: False, 40.0)
    assert (found.starts_at_s, found.cause, found.cancelable, found.hint) == (START_S, "Maintenance", True, False)


def test_a_maintenance_of_google_that_has_begun_has_no_time_ahead() -> None:
    text = json.dumps({"window_start_time": START, "maintenance_status": "ONGOING"})
    (found,) = gce.read_upcoming_maintenance(text, lambda: False, 40.0)
    assert (found.starts_at_s, found.lead_s) == (None, 40.0)


def test_a_key_of_google_is_never_asked_for_without_a_pause() -> None:
    client = MetadataClient("http://127.0.0.1:9")
    assert gce.Key(client, "instance/preempted", lambda text: []).pause_s > 1


@pytest.mark.parametrize(("day", "state", "count"), [("21 Jan 2026", "active", 1), ("9 Jan 2026", "completed", 0)])
def test_amazons_dates_and_states_are_read(day: str, state: str, count: int) -> None:
    notice = {"Code": "system-reboot", "EventId": "e-1", "State": state, "NotBefore": f"{day} 09:00:43 GMT"}
    found = aws.read_scheduled(json.dumps([notice]), lead_s=40.0)
    assert [e.starts_at_s for e in found] == [1768986043.0] * count


@pytest.mark.parametrize(
    ("read", "text"),
    [
        pytest.param(lambda t: gce.read_preempted(t, 15.0), "maybe", id="preempted"),
        pytest.param(gce.read_maintenance_event, "SOMETHING", id="maintenance-event"),
        pytest.param(lambda t: gce.read_upcoming_maintenance(t, lambda: False, 1.0), "[1]", id="upcoming, a list"),
        pytest.param(
            lambda t: gce.read_upcoming_maintenance(t, lambda: False, 1.0), '{"a": 1}', id="upcoming, no time"
        ),
        pytest.param(lambda t: aws.read_instance_action(t, 1.0), '"stop"', id="action, no object"),
        pytest.param(lambda t: aws.read_instance_action(t, 1.0), '{"action": "stop", "time": 5}', id="action, no time"),
        pytest.param(lambda t: aws.read_scheduled(t, 1.0), "{}", id="scheduled, no list"),
        pytest.param(lambda t: aws.read_scheduled(t, 1.0), '[{"State": "active", "NotBefore": null}]', id="no date"),
        pytest.param(lambda t: azure.read_events(t, "vm", 1.0), "{}", id="no events"),
        pytest.param(
            lambda t: azure.read_events(t, "vm", 1.0),
            '{"Events": [{"EventType": "Reboot", "Resources": ["vm"], "NotBefore": "soon"}]}',
            id="events, no date",
        ),
        pytest.param(lambda t: azure.read_name(MetadataResponse(200, t, {}, 0.0)), "", id="no name"),
    ],
)
def test_what_is_not_understood_is_not_taken_for_nothing(read: object, text: str) -> None:
    assert callable(read)
    with pytest.raises(MetadataError, match="expected .* found"):
        read(text)


def test_azure_names_a_vm_in_any_case() -> None:
    item = {"EventType": "Preempt", "EventId": "1", "Resources": ["VM_0"], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}
    (found,) = azure.read_events(json.dumps({"Events": [item]}), "vm_0", 40.0)
    assert found.starts_at_s == 1474309787.0
