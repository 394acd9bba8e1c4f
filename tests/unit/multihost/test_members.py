"""The names of the processes: who learns what when they meet, and what is read later."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from gracepoint.errors import AgreementError, NotJoined
from gracepoint.multihost import InMemoryStore, KeyValueStore, ProcessNames
from gracepoint.multihost.distributed import JobAttempt
from gracepoint.multihost.membership import Introduced, Members, PodNames, introduce
from gracepoint.multihost.store import StoreUnavailable
from tests.unit.multihost.fakes.gangs import gangs, together


def named(index: int, service_id: int) -> ProcessNames:
    return ProcessNames(index, service_id, f"gpt-w-0-{index}")


def met(
    indices: list[int],
    injected: list[int | None],
    store: KeyValueStore | None = None,
    starts: Sequence[float | None] | None = None,
    of: Sequence[JobAttempt] | None = None,
    lacks: Sequence[str] | None = None,
) -> list[object]:
    """What each process learns, by its id in the service."""
    shared = store or InMemoryStore()
    members = gangs(len(indices), shared)
    return together(
        *(
            functools.partial(
                introduce,
                named(index, place),
                count,
                f"nonce {place}",
                start=of[place] if of else JobAttempt("uid-1", 0, f"gpt-w-0-{place}", 79),
                lacks=lacks[place] if lacks else "",
                started_unix_s=start,
                gang=gang,
                store=shared,
                timeout_s=20,
            )
            for place, (index, count, start, gang) in enumerate(
                zip(indices, injected, starts or [None] * len(indices), members, strict=True)
            )
        )
    )


def test_processes_that_meet_learn_the_same_and_can_name_each_other() -> None:
    for found in met([2, 0, 1], [3, None, 3]):
        assert isinstance(found, Introduced)
        assert (found.nonce, found.miscounted) == ("nonce 0", None)
        assert list(found.members) == [named(0, 1), named(1, 2), named(2, 0)]
        assert found.members[-1] == found.members[1:][1] == named(2, 0)


def test_the_host_of_the_store_can_be_named_without_the_store() -> None:
    class Silent(InMemoryStore):
        def get(self, key: str, *, timeout_s: float) -> str:
            assert not key.startswith("names/"), "the store is silent by then"
            return super().get(key, timeout_s=timeout_s)

    for found in met([2, 0, 1], [None] * 3, Silent()):
        assert isinstance(found, Introduced)
        assert found.host == found.members[2] == found.members[-1] == named(2, 0)


def test_injected_count_that_is_wrong_in_one_process_is_known_to_all() -> None:
    found = met([0, 1, 2], [3, 4, None])
    assert [one.miscounted for one in found if isinstance(one, Introduced)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("starts", "last"),
    [
        pytest.param((12.5, 14.25, 13.0), 14.25, id="of all"),
        pytest.param((12.5, None, 13.0), None, id="not known to one"),
    ],
)
def test_all_learn_when_the_last_process_was_started(starts: Sequence[float | None], last: float | None) -> None:
    found = met([0, 1, 2], [None] * 3, starts=starts)
    assert [one.last_started_unix_s for one in found if isinstance(one, Introduced)] == [last] * 3


def test_process_indices_that_do_not_fit_are_an_error_of_all() -> None:
    for found in met([0, 1, 1], [None] * 3):
        assert isinstance(found, AgreementError)
        assert "expected the process indices 0 to 2 once each, found [0, 1, 1]" in str(found)


def test_an_earlier_attempt_in_the_same_cluster_is_named_to_all_at_once() -> None:
    of = [JobAttempt("uid-1", 4, "new-0", 79), JobAttempt("uid-1", 3, "old-1", 79), JobAttempt("uid-1", 4, "new-2", 80)]
    found = met([0, 1, 2], [None] * 3, of=of)
    assert [error.code for error in found if isinstance(error, NotJoined)] == [79, 79, 80]
    for error in found:
        assert "process 1 (old-1) of attempt 3 leaves, as process 0 (new-0) of attempt 4 has started" in str(error)


def test_two_jobs_in_one_cluster_are_named_to_all() -> None:
    of = [JobAttempt("uid-1", 0, "one-0", 79), JobAttempt("uid-2", 0, "two-1", 79)]
    for error in met([0, 1], [None] * 2, of=of):
        assert isinstance(error, NotJoined)
        assert "process 1 (two-1) of attempt 0 is of job uid-2, and process 0" in str(error)
        assert "of job uid-1" in str(error)


def test_what_one_process_lacks_is_reported_to_all() -> None:
    for error in met([0, 1], [None] * 2, lacks=["", "was given accelerators, and JAX finds cpu alone"]):
        assert isinstance(error, NotJoined)
        assert str(error) == "process 1 (gpt-w-0-1) of attempt 0 was given accelerators, and JAX finds cpu alone"


def test_names_of_many_processes_are_read_in_blocks_when_asked_for() -> None:
    class Counting(InMemoryStore):
        asked = 0

        def get(self, key: str, *, timeout_s: float) -> str:
            self.asked += key.startswith("names/")
            return super().get(key, timeout_s=timeout_s)

    store = Counting()
    one = met(list(range(300)), [None] * 300, store)[0]
    assert isinstance(one, Introduced)
    assert store.asked == 0
    assert [one.members[index] for index in (0, 255, 256, 299, 256)] == [
        named(index, index) for index in (0, 255, 256, 299, 256)
    ]
    assert store.asked == 2
    with pytest.raises(IndexError):
        one.members[300]


def test_message_does_without_names_that_cannot_be_read() -> None:
    class Unreachable(InMemoryStore):
        def get(self, key: str, *, timeout_s: float) -> str:
            raise StoreUnavailable("told by the test")

    assert PodNames(Members(Unreachable(), 4))[1] is None
