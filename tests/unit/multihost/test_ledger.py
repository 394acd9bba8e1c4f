"""What the entries of the bell come to, and how they are written."""

from __future__ import annotations

import pytest

from gracepoint.multihost import InMemoryStore
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.ledger import (
    Agreed,
    Broken,
    Closed,
    Closing,
    Ended,
    Entry,
    Event,
    Failed,
    Finished,
    Gone,
    Ledger,
    Moot,
    Noticed,
    NoticeEntry,
    Opened,
    Retract,
    Retracted,
    Settled,
    StartEntry,
    Stop,
    from_json,
    to_json,
)


def notice(origin: str = "gpt-1", *, drill: bool = False, starts_at: int | None = None) -> NoticeEntry:
    return NoticeEntry(0, origin, 30.0, "{}", drill, True, None, starts_at, step=70)


ENTRIES = [
    notice(),
    Retract(1, "gpt-1", "the taint is gone"),
    StartEntry(1, 0, 0, 0),
    Agreed(2, 8, True),
    Failed(2, 1, "too late"),
    Stop(1, 8, 80, "RuntimeError: no batch"),
    Ended(2),
    Finished(1),
    Gone(1, "ValueError: NaN"),
    Closing(1),
]


def heard(*entries: Entry) -> tuple[Ledger, list[type[Event]]]:
    """The ledger after these entries, numbered from 0, and what has come of them."""
    ledger, kinds = Ledger(), []
    for number, entry in enumerate(entries):
        ledger, events = ledger.hear(number, entry)
        kinds += [type(event) for event in events]
    return ledger, kinds


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_an_entry_reads_back_as_itself(entry: Entry) -> None:
    assert from_json(to_json(entry)) == entry


@pytest.mark.parametrize(
    ("entries", "kinds"),
    [
        pytest.param([notice(), notice()], [Noticed, Noticed], id="a notice moves"),
        pytest.param([notice(), StartEntry(0, 0, 0, 0)], [Noticed, Opened], id="a start"),
        pytest.param([notice(starts_at=7)], [Noticed, Opened], id="a notice that starts at once"),
        pytest.param([notice(), notice("gpt-2", starts_at=7)], [Noticed, Noticed, Opened], id="the second one starts"),
        pytest.param(
            [notice(starts_at=7), notice("gpt-2", starts_at=8)], [Noticed, Opened, Noticed], id="it has started before"
        ),
        pytest.param([Finished(1), notice(starts_at=7)], [Moot], id="it would start after the end of training"),
        pytest.param([Gone(1, ""), notice(starts_at=7)], [Noticed, Opened, Broken], id="it starts without a process"),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), Failed(1, 0, ""), notice("gpt-2", starts_at=7)],
            [Noticed, Opened, Broken, Noticed],
            id="it would start after a failure",
        ),
        pytest.param([notice(), notice(), StartEntry(0, 0, 0, 0)], [Noticed, Noticed], id="a start on old news"),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), StartEntry(1, 0, 0, 0)], [Noticed, Opened], id="a second start is void"
        ),
        pytest.param([StartEntry(0, -1, 0, 0)], [], id="a start without a notice is void"),
        pytest.param(
            [notice(), Retract(1, "gpt-1", ""), StartEntry(0, 0, 0, 0)], [Noticed, Retracted], id="retracted in time"
        ),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), Retract(1, "gpt-1", "")], [Noticed, Opened], id="retracted too late"
        ),
        pytest.param([Retract(1, "gpt-1", "")], [], id="nothing to retract"),
        pytest.param([notice(), Retract(1, "gpt-1", ""), notice()], [Noticed, Retracted], id="a name comes once"),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), notice("gpt-2"), Retract(1, "gpt-2", "")],
            [Noticed, Opened, Noticed, Retracted],
            id="another notice is retracted in the epoch of the first",
        ),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), Agreed(1, 2, True), Failed(1, 0, ""), Agreed(1, 10, True)],
            [Noticed, Opened, Settled],
            id="the first decision counts",
        ),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), Failed(1, 0, ""), Agreed(1, 2, True)],
            [Noticed, Opened, Broken],
            id="the first decision counts (failed)",
        ),
        pytest.param([notice(), StartEntry(0, 0, 0, 0), Agreed(7, 2, True)], [Noticed, Opened], id="no epoch"),
        pytest.param([notice(), Finished(1)], [Noticed, Moot], id="training ends before the start"),
        pytest.param([Finished(1), notice(), StartEntry(0, 1, 0, 0)], [Moot], id="a notice after the end of training"),
        pytest.param(
            [notice(), Finished(1), StartEntry(0, 0, 0, 0)], [Noticed, Moot], id="a start after the end of training"
        ),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), Finished(1)], [Noticed, Opened], id="training ends in an open epoch"
        ),
        pytest.param(
            [Gone(1, ""), notice(), StartEntry(0, 1, 0, 0)], [Noticed, Opened, Broken], id="a start without a process"
        ),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), Gone(1, "")], [Noticed, Opened, Broken], id="a process breaks off"
        ),
        pytest.param(
            [notice(), StartEntry(0, 0, 0, 0), Agreed(1, 2, True), Gone(1, "")],
            [Noticed, Opened, Settled, Broken],
            id="a process breaks off before the agreed point",
        ),
        pytest.param(
            [
                notice(drill=True),
                StartEntry(0, 0, 0, 0),
                Agreed(1, 2, True),
                Ended(1),
                notice("gpt-2"),
                StartEntry(0, 4, 0, 0),
            ],
            [Noticed, Opened, Settled, Closed, Noticed, Opened],
            id="a drill ends and another epoch follows",
        ),
        pytest.param(
            [notice(drill=True), StartEntry(0, 0, 0, 0), Failed(1, 0, ""), notice("gpt-2"), StartEntry(0, 3, 0, 0)],
            [Noticed, Opened, Broken, Noticed, Opened],
            id="a drill comes to nothing and another epoch follows",
        ),
        pytest.param(
            [notice(drill=True), StartEntry(0, 0, 0, 0), Gone(1, "")],
            [Noticed, Opened, Broken],
            id="a process breaks off before the point of a drill",
        ),
        pytest.param(
            [notice(drill=True), StartEntry(0, 0, 0, 0), Agreed(1, 2, True), Gone(1, "")],
            [Noticed, Opened, Settled],
            id="a process breaks off at the point of a drill",
        ),
        pytest.param([Closing(1), Closing(0), Ended(7)], [], id="nothing of note"),
    ],
)
def test_the_order_of_the_entries_decides(entries: list[Entry], kinds: list[type[Event]]) -> None:
    assert heard(*entries)[1] == kinds


@pytest.mark.parametrize(("drills", "drill"), [([True, True], True), ([True, False], False), ([False], False)])
def test_an_epoch_is_a_drill_only_if_every_notice_is_one(drills: list[bool], drill: bool) -> None:
    notices = [notice(f"gpt-{i}", drill=d) for i, d in enumerate(drills)]
    ledger, _ = heard(*notices, StartEntry(0, len(notices) - 1, 0, 0))
    assert ledger.epoch is not None
    assert ledger.epoch.drill is drill
    assert ledger.epoch.origins == {n.origin for n in notices}


@pytest.mark.parametrize(("once", "kinds"), [(True, [Noticed, Retracted]), (False, [Noticed, Retracted, Noticed])])
def test_an_origin_may_come_again_unless_its_name_is_used_once(once: bool, kinds: list[type[Event]]) -> None:
    told = NoticeEntry(0, "gpt-1", 30.0, "{}", False, once)
    assert heard(told, Retract(1, "gpt-1", ""), told)[1] == kinds


def test_a_drill_deals_with_its_own_notices_only() -> None:
    ledger, _ = heard(notice(drill=True), StartEntry(0, 0, 0, 0), notice("gpt-2"), Agreed(1, 2, True), Ended(1))
    assert list(ledger.standing) == ["gpt-2"]
    assert ledger.epoch is None


# The bell.


def test_all_read_the_same_entries_in_the_same_order() -> None:
    store = InMemoryStore()
    bells = [Bell(store) for _ in range(3)]
    for by, bell in enumerate(bells):
        bell.ring(Closing(by))
    read = [[bell.try_next() for _ in range(4)] for bell in bells]
    assert read == [[(0, Closing(0)), (1, Closing(1)), (2, Closing(2)), None]] * 3


def test_what_stands_there_unread_is_not_said_again() -> None:
    store = InMemoryStore()
    first, second = Bell(store), Bell(store)
    first.ring(Gone(0, "first"))
    second.ring(Gone(1, "second"), unless=lambda there: isinstance(there, Gone))
    assert (first.try_next(), first.try_next()) == ((0, Gone(0, "first")), None)


def test_closing_ends_the_reading_after_what_was_written_before() -> None:
    store = InMemoryStore()
    bell, other = Bell(store), Bell(store)
    other.ring(notice())
    bell.close(0)
    assert [bell.next(), bell.next(), bell.next()] == [(0, notice()), (1, Closing(0)), None]


def test_only_the_first_process_that_ends_writes_so() -> None:
    store = InMemoryStore()
    bells = [Bell(store) for _ in range(3)]
    bells[0].ring(Finished(0))
    for by, bell in enumerate(bells):
        bell.close(by)
        assert bell.next() == (0, Finished(0))
        assert bell.next() is None


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([notice(), StartEntry(1, 0, 7, 70)], id="a start"),
        pytest.param([Closing(1), notice(starts_at=7)], id="a notice that starts at once"),
    ],
)
def test_an_epoch_has_the_place_of_the_process_that_started_it(entries: list[Entry]) -> None:
    epoch = heard(*entries)[0].epoch
    assert epoch is not None
    assert (epoch.number, epoch.origins, epoch.ordinal, epoch.step) == (1, frozenset({"gpt-1"}), 7, 70)


@pytest.mark.parametrize("meets", [True, False])
def test_a_decision_says_where_all_save_and_whether_they_meet(meets: bool) -> None:
    ledger, _ = heard(notice(), StartEntry(0, 0, 0, 0), Agreed(1, 8, meets))
    assert ledger.epoch is not None
    assert (ledger.epoch.agreed, ledger.epoch.meets) == (8, meets)


def stop(by: int, ordinal: int) -> Stop:
    return Stop(by, ordinal, 10 * ordinal, "RuntimeError: no batch")


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([notice()], id="before the freeze"),
        pytest.param([notice(starts_at=7)], id="before all said where they are"),
        pytest.param([notice(starts_at=7), Agreed(0, 9, False)], id="after a later point was agreed"),
    ],
)
def test_who_breaks_off_after_a_notice_decides_where_all_save(before: list[Entry]) -> None:
    ledger, kinds = heard(*before, stop(1, 8), Agreed(0, 10, False), stop(2, 8))
    assert kinds[-1] is Settled
    assert kinds.count(Opened) == 1
    assert ledger.epoch is not None
    assert (ledger.epoch.agreed, ledger.epoch.meets, ledger.epoch.stop) == (8, True, stop(1, 8))


def test_processes_that_save_there_anyway_need_not_meet_for_one_that_breaks_off() -> None:
    ledger, _ = heard(notice(starts_at=7), Agreed(0, 8, False), stop(1, 8))
    assert ledger.epoch is not None
    assert not ledger.epoch.meets


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (Failed(0, 2, "process 2: the state is gone"), "process 2: the state is gone"),
        (
            stop(2, 9),
            "process 1 broke off after sync point 8 (RuntimeError: no batch), and process 2 after sync point 9",
        ),
        (Gone(2, "ValueError"), "process 2 broke off: ValueError"),
    ],
)
def test_nobody_saves_where_one_broke_off_if_another_cannot(then: Entry, why: str) -> None:
    ledger, kinds = heard(notice(starts_at=7), stop(1, 8), then)
    assert kinds[-1] is Broken
    assert ledger.failed is not None
    assert why in ledger.failed


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="without a notice"),
        pytest.param([notice(drill=True, starts_at=7)], id="in a drill"),
        pytest.param([notice(), Finished(0)], id="after training"),
        pytest.param([notice(starts_at=7), Failed(0, 0, "too late")], id="after a failure"),
    ],
)
def test_who_breaks_off_decides_nothing_where_nothing_is_saved(before: list[Entry]) -> None:
    ledger, kinds = heard(*before)
    assert heard(*before, stop(1, 8)) == (ledger, kinds)


def test_the_first_who_leaves_is_known() -> None:
    assert heard(notice())[0].left is None
    assert heard(Finished(1, 20, 200), Gone(2, "ValueError", 20, 200))[0].left == Finished(1, 20, 200)
    assert heard(Gone(2, "ValueError", 20, 200), Finished(1, 20, 200))[0].left == Gone(2, "ValueError", 20, 200)
