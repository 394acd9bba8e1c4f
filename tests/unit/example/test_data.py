from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import data
import numpy as np
import numpy.typing as npt
import pytest

ROWS = np.arange(23, dtype=np.uint8)[:, None]  # a batch of 4 leaves a rest of 3 in every epoch


@pytest.fixture
def loader() -> Iterator[data.Loader]:
    made = data.Loader(ROWS, 4, seed=7)
    yield made
    made.close()


def drawn(loader: data.Loader, count: int) -> list[tuple[list[int], str]]:
    return [(next(loader).ravel().tolist(), loader.digest) for _ in range(count)]


@pytest.mark.parametrize("consumed", [0, 1, 4, 5, 6, 13], ids=lambda n: f"after {n} batches")
def test_a_restored_loader_continues_as_if_it_had_never_stopped(loader: data.Loader, consumed: int) -> None:
    undisturbed = drawn(loader, 20)
    first = data.Loader(ROWS, 4, seed=7)
    before = drawn(first, consumed)
    saved = json.dumps(first.state())
    first.close()

    second = data.Loader(ROWS, 4, seed=99)  # another seed: all comes from the state
    second.restore(json.loads(saved))
    after = drawn(second, 20 - consumed)
    second.close()

    assert before + after == undisturbed


def test_restoring_a_running_loader_drops_what_was_read_ahead(loader: data.Loader) -> None:
    start = loader.state()
    first = drawn(loader, 3)
    loader.restore(start)
    assert drawn(loader, 3) == first


def test_the_state_counts_what_was_consumed_and_not_what_was_read_ahead() -> None:
    read_ahead = threading.Event()
    made: list[int] = []

    def place(batch: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        made.append(len(batch))
        if len(made) == 4:
            read_ahead.set()
        return batch

    loader = data.Loader(ROWS, 4, seed=7, place=place)
    next(loader)
    assert read_ahead.wait(60)
    assert loader.state()["position"] == 4
    loader.close()


def test_every_epoch_has_each_row_at_most_once_and_its_own_order(loader: data.Loader) -> None:
    epochs = [[row for batch, _ in drawn(loader, 5) for row in batch] for _ in range(2)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_digest_distinguishes_batches(loader: data.Loader) -> None:
    assert len({digest for _, digest in drawn(loader, 15)}) == 15


def test_prefetch_error_is_raised_to_the_caller() -> None:
    def fail(batch: npt.NDArray[np.uint8]) -> None:
        raise RuntimeError("no room on the devices")

    loader = data.Loader(ROWS, 4, seed=7, place=fail)
    with pytest.raises(RuntimeError, match="no room on the devices"):
        next(loader)
    loader.close()


def test_closing_ends_the_prefetch_thread(loader: data.Loader) -> None:
    next(loader)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_too_little_text_for_one_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="batch of 24 needs as many rows, found 23"):
        data.Loader(ROWS, 24, seed=0)


def test_the_processes_share_the_windows_without_overlap() -> None:
    text = bytes(range(200))
    shares = [data.windows(text, 8, process_index=i, process_count=3) for i in range(3)]
    starts = sorted(int(row[0]) for share in shares for row in share)
    assert starts == list(range(0, 192, 8))
    assert all(share.shape[1] == 9 for share in shares)


def test_the_text_is_python_and_the_same_each_time() -> None:
    text = data.standard_library(100_000)
    assert len(text) == 100_000
    assert b"import " in text
    assert text == data.standard_library(100_000)
