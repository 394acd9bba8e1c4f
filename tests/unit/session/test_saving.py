"""The agreed sync point with a peer that does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from gracepoint.emergency import Emergency
from gracepoint.errors import BarrierCancelled
from gracepoint.multihost import Agreement, InMemoryStore
from gracepoint.notices import Notices
from gracepoint.outlook import Outlook
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.reporting import Reporter
from gracepoint.saving import Saving
from gracepoint.settings import Settings
from tests.unit.multihost.gangs import gangs


class Process:
    """What a session wires together, without receivers and without an end of the process."""

    def __init__(self, store: InMemoryStore, index: int, count: int) -> None:
        gang, settings, clock = gangs(count, store)[index], Settings(), time.monotonic
        self.mailbox = Mailbox(clock)
        reporter = Reporter(None, settings, "session", gang, self.mailbox)
        notices = Notices(self.mailbox, index, clock)
        outlook = Outlook(self.mailbox, settings, lambda: None, clock)
        self.emergency = Emergency(gang, settings, self.mailbox, notices, outlook, reporter, clock)
        self.agreement = Agreement(store, gang, self.emergency)
        notices.connect(self.agreement)
        self.saving = Saving(gang, settings, self.mailbox, reporter, self.emergency, self.agreement)

    def train_to_the_agreed_point(self) -> None:
        while not self.agreement.arrive():
            time.sleep(0.001)


@pytest.fixture
def pair() -> Iterator[list[Process]]:
    store = InMemoryStore()
    processes = [Process(store, index, 2) for index in range(2)]
    yield processes
    for process in processes:
        process.agreement.close()


def notice(remaining_s: float) -> Disruption:
    return Disruption(preemption="gpt-1", cause="Spot", signal="taint", remaining_s=remaining_s)


def test_a_deadline_that_moves_to_an_earlier_time_ends_a_wait_that_has_begun(pair: list[Process]) -> None:
    here, peer = pair
    here.mailbox.post(notice(3600))
    training = threading.Thread(target=peer.train_to_the_agreed_point)
    training.start()
    here.train_to_the_agreed_point()
    training.join()  # it is there, and says nothing
    timer = threading.Timer(0.1, here.mailbox.post, (notice(0.0),))
    timer.start()
    with pytest.raises(BarrierCancelled, match="the time was over"):
        here.saving.meet(1)
    timer.join()


def test_the_word_of_a_peer_that_breaks_off_after_the_commit_is_no_failure(pair: list[Process]) -> None:
    here, peer = pair
    here.mailbox.post(notice(3600))
    training = threading.Thread(target=peer.train_to_the_agreed_point)
    training.start()
    here.train_to_the_agreed_point()
    training.join()
    here.emergency.epoch.succeeded()
    peer.agreement.tell_gone("an error in its clean-up")
    deadline_s = time.monotonic() + 20
    while here.agreement._member.ledger.failed is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    here.agreement.close()  # the reading thread has told everything by then
    assert here.emergency.epoch.progress.message == ""
