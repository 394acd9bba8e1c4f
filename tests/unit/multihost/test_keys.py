"""Barrier keys: unique by construction, the same in all processes."""

from __future__ import annotations

import concurrent.futures

import pytest

from gracepoint.multihost import BarrierKeys


def test_a_key_says_job_attempt_epoch_phase_and_counter() -> None:
    keys = BarrierKeys("uid-7", 2)
    assert [keys.next("commit", epoch=3) for _ in range(2)] == ["uid-7/2/3/commit/0", "uid-7/2/3/commit/1"]


def test_phases_and_epochs_count_separately_per_thread() -> None:
    one, other = BarrierKeys("uid", "a"), BarrierKeys("uid", "a")
    found = [one.next("commit"), one.next("cleanup"), one.next("commit"), one.next("commit", epoch=1)]
    # The same calls of each phase, in another order between the phases, as threads have it.
    assert [other.next("commit"), other.next("commit"), other.next("cleanup"), other.next("commit", epoch=1)] == [
        found[0],
        found[2],
        found[1],
        found[3],
    ]
    assert len(set(found)) == 4


def test_no_two_threads_get_the_same_key() -> None:
    keys = BarrierKeys("uid", 0)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: keys.next("commit"), range(2000)))
    assert len(set(found)) == 2000


@pytest.mark.parametrize(
    ("arguments", "phase", "epoch"),
    [
        pytest.param(("a/b", 0), "commit", 0, id="job"),
        pytest.param(("a", ""), "commit", 0, id="attempt"),
        pytest.param(("a", 0), "save/commit", 0, id="phase"),
        pytest.param(("a", 0), "commit", "1/2", id="epoch"),
    ],
)
def test_a_part_that_would_make_two_keys_read_alike_is_refused(
    arguments: tuple[str, str | int], phase: str, epoch: str | int
) -> None:
    with pytest.raises(ValueError, match="without a slash"):
        BarrierKeys(*arguments).next(phase, epoch=epoch)
