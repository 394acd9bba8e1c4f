"""Checkpointers save and restore leaves of types of the user's own by the handlers that they are given."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint import (
    AsyncCheckpointer,
    CheckpointManager,
    HandlerRegistry,
    NumpyHandler,
    ParamInfo,
    RestoreArgs,
    RestoreOptions,
    SaveArgs,
    restore,
    save,
    verify,
)
from gracepoint.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointRefused,
    SaveFailed,
    SettingsError,
)
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import in_gang, outcomes_in_gang

pytestmark = pytest.mark.integration


@dataclasses.dataclass
class Vocabulary:
    """A class that neither JAX nor the engine knows."""

    words: list[str]


class VocabularyHandler:
    """Every process writes each ``count``-th word into a file of its own."""

    typestr = "test.Vocabulary"

    def __init__(self, process: int = 0, count: int = 1, *, gate: threading.Event | None = None) -> None:
        self.process = process
        self.count = count
        self.gate = gate
        self.finalized = 0
        self.args: list[Any] = []
        self.broken = False
        self.elsewhere = False

    def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Future[None]]:
        self.args = list(args or ())
        copies = [value.words[self.process :: self.count] for value in values]
        future: Future[None] = Future()

        def write() -> None:
            if self.gate is not None:
                assert self.gate.wait(60)
            if self.broken:
                future.set_exception(ValueError("the words are too long"))
                return
            for words, info in zip(copies, infos, strict=True):
                folder = info.parent_dir if self.elsewhere else info.path
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"words.{self.process}").write_text(json.dumps(words))
            future.set_result(None)

        threading.Thread(target=write, daemon=True).start()
        return [future]

    def finalize(self, directory: Path) -> None:
        self.finalized += 1

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> Sequence[Any]:
        found = []
        for info in infos:
            parts = [json.loads(path.read_text()) for path in sorted(info.path.glob("words.*"))]
            words: list[str] = [""] * sum(map(len, parts))
            for number, part in enumerate(parts):
                words[number :: len(parts)] = part
            found.append(Vocabulary(words))
        return found

    def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        return [f"{len(list(info.path.glob('words.*')))} files" for info in infos]

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        return [(len(str(value)), len(str(value))) for value in values]


WORDS = ["save", "the", "state", "in", "time"]


def registry(handler: VocabularyHandler | None = None) -> HandlerRegistry:
    found = HandlerRegistry()
    found.add(Vocabulary, handler or VocabularyHandler())
    return found


def state(words: Sequence[str] = WORDS) -> dict[str, Any]:
    return {"w": jnp.arange(6.0), "text": {"vocabulary": Vocabulary(list(words)), "name": "a run"}, "none": None}


def assert_restored(found: Any, words: Sequence[str] = WORDS) -> None:
    assert found["text"] == {"vocabulary": Vocabulary(list(words)), "name": "a run"}
    np.testing.assert_array_equal(found["w"], np.arange(6.0))


@pytest.mark.parametrize("like", [None, state(["other"])], ids=["as saved", "like a state"])
def test_a_leaf_is_saved_and_restored_by_its_handler(tmp_path: Path, like: Any) -> None:
    save(tmp_path / "a", state(), handlers=registry())
    assert_restored(restore(tmp_path / "a", like, handlers=registry()))
    assert verify(tmp_path / "a").ok


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds a handler up, at most until the test ends."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_the_value_may_change_once_the_save_has_returned(tmp_path: Path, gate: threading.Event) -> None:
    with AsyncCheckpointer(handlers=registry(VocabularyHandler(gate=gate))) as checkpointer:
        saved = state()
        checkpointer.save(tmp_path / "a", saved)
        saved["text"]["vocabulary"].words.clear()
        assert not (tmp_path / "a").exists()  # the commit waits for the handler
        gate.set()
        assert_restored(checkpointer.restore(tmp_path / "a"))


def test_a_manager_saves_and_restores_steps_with_such_leaves(tmp_path: Path) -> None:
    handler = VocabularyHandler()
    with CheckpointManager(tmp_path, handlers=registry(handler)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state([str(step)]))
        manager.wait_until_finished()
        assert_restored(manager.restore(2, like=state()).state, ["2"])
        assert_restored(manager.restore().state, ["3"])
        assert manager.metadata(3).tree["text"]["vocabulary"] == "1 files"
    assert handler.finalized == 3


def test_all_processes_write_their_part_and_one_finalizes(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> int:
        handler = VocabularyHandler(gang.process_index, gang.process_count)
        local = {"w": np.arange(6.0), "text": {"vocabulary": Vocabulary(WORDS), "name": "a run"}}
        with AsyncCheckpointer(handlers=registry(handler), gang=gang) as checkpointer:
            checkpointer.save(tmp_path / "a", local)
            assert_restored(checkpointer.restore(tmp_path / "a"))
        return handler.finalized

    assert in_gang(3, run) == [1, 0, 0]
    assert verify(tmp_path / "a").ok


def test_a_handler_that_fails_in_one_process_fails_the_save_in_all(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        handler = VocabularyHandler(gang.process_index, gang.process_count)
        handler.broken = gang.process_index == 1
        with AsyncCheckpointer(handlers=registry(handler), gang=gang) as checkpointer:
            checkpointer.save(tmp_path / "a", {"vocabulary": Vocabulary(WORDS)})

    outcomes = outcomes_in_gang(3, run)
    assert [type(outcome) for outcome in outcomes] == [SaveFailed] * 3
    assert all("the words are too long" in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "a").exists()


def test_a_process_that_cannot_save_is_named_to_those_with_handlers(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        tree = state() if gang.process_index == 0 else state() | {"unknown": object()}
        with AsyncCheckpointer(handlers=registry(), gang=gang, timeout_s=20) as checkpointer:
            checkpointer.save(tmp_path / "a", tree)

    waiting, failed = outcomes_in_gang(2, run)
    assert isinstance(failed, CheckpointRefused)
    assert "process 1 reported CheckpointRefused: state['unknown']: cannot save a value of type object" in str(waiting)


@pytest.mark.integration
def test_a_handler_that_does_not_end_fails_the_save_at_its_timeout(tmp_path: Path, gate: threading.Event) -> None:
    with AsyncCheckpointer(handlers=registry(VocabularyHandler(gate=gate)), timeout_s=3.0) as checkpointer:
        checkpointer.save(tmp_path / "a", state())
        with pytest.raises(SaveFailed, match=r"the handler of 'test.Vocabulary' was not done within 3.0 s"):
            checkpointer.wait_until_finished()
    assert not (tmp_path / "a").exists()


def test_what_a_handler_writes_next_to_its_leaf_is_refused(tmp_path: Path) -> None:
    handler = VocabularyHandler()
    handler.elsewhere = True
    with pytest.raises(SaveFailed, match=r"wrote nothing to ParamInfo.path, .*vocabulary; what it writes elsewhere"):
        save(tmp_path / "a", state(), handlers=registry(handler))


def damage(path: Path) -> None:
    path.write_text(path.read_text().replace("save", "sage"))


@pytest.mark.parametrize("harm", [damage, Path.unlink], ids=["changed", "missing"])
def test_a_damaged_file_is_found_before_the_handler_reads_it(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    save(tmp_path / "a", state(), handlers=registry())
    harm(tmp_path / "a" / "text.vocabulary" / "words.0")
    with pytest.raises(CheckpointCorrupt, match=r"words\.0"):
        restore(tmp_path / "a", handlers=registry())
    assert not verify(tmp_path / "a").ok


def test_each_leaf_gets_its_arguments(tmp_path: Path) -> None:
    handler = VocabularyHandler()
    args = {"text": {"vocabulary": SaveArgs(chunk_byte_size=7)}}
    save(tmp_path / "a", state(), save_args=args, handlers=registry(handler))
    assert handler.args == [SaveArgs(chunk_byte_size=7)]


def test_handlers_may_stand_in_the_options_of_one_restore(tmp_path: Path) -> None:
    save(tmp_path / "a", state(), handlers=registry())
    assert_restored(restore(tmp_path / "a", options=RestoreOptions(handlers=registry())))


def test_without_a_handler_such_a_leaf_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointRefused, match=r"state\['text'\]\['vocabulary'\]: cannot save a value of type Vocabulary"
    ):
        save(tmp_path / "a", state())
    save(tmp_path / "a", state(), handlers=registry())
    with pytest.raises(CheckpointError, match=r"'text.vocabulary' was saved as 'test.Vocabulary'"):
        restore(tmp_path / "a")


def test_a_leaf_that_was_saved_as_another_type_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path / "a", {"vocabulary": "a string"})
    with pytest.raises(CheckpointMismatch, match=r"'vocabulary': expected a test.Vocabulary, found a string"):
        restore(tmp_path / "a", {"vocabulary": Vocabulary([])}, handlers=registry())


@pytest.mark.parametrize(
    ("leaf_type", "handler"),
    [
        pytest.param(np.ndarray, VocabularyHandler(), id="type"),
        pytest.param(Vocabulary, NumpyHandler(), id="name"),
    ],
)
def test_handlers_of_types_that_checkpointers_save_themselves_are_refused(leaf_type: type, handler: Any) -> None:
    handlers = HandlerRegistry()
    handlers.add(leaf_type, handler)
    with pytest.raises(SettingsError, match="expected only types that checkpointers do not save themselves"):
        AsyncCheckpointer(handlers=handlers)
