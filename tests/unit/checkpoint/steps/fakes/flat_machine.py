"""The state machine of ``commit_machine`` on a store that cannot rename, with writers that sleep and lose replies.

Two steps are Orbax's: one is finished, one is not. Nothing may change them, and no save of their steps is committed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import rule

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Temporary
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.errors import CheckpointCorrupt, SaveFailed
from tests.unit.checkpoint.steps.fakes.commit_machine import Allowed, CommitMachine, Dies
from tests.unit.checkpoint.steps.fakes.done_records import done_record
from tests.unit.checkpoint.steps.fakes.small_saves import write_file
from tests.unit.checkpoint.storage.fakes.digests import DigestStore
from tests.unit.checkpoint.storage.fakes.fake_store import FakePath, FakeStore
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore

#: "sleeps": the process sleeps while the next attempt starts and saves the same step, and then goes on.
EVENTS = ("nothing", "dies", "dies after its request", "another starts", "another looks", "sleeps")
_ORBAX = b'{"commit_timestamp_nsecs": 1}'
#: More than the requests of a save of two processes that replaces another one.
MOMENTS_OF_A_SAVE = 45
MOMENTS = st.integers(min_value=0, max_value=MOMENTS_OF_A_SAVE - 1)


class NotCommitted(Exception):
    """The save was refused."""


class FlatMachine(CommitMachine):
    """See the module."""

    store_type: ClassVar[type[FakeStore]] = FlatStore
    path_type: ClassVar[type[FakePath]] = FlatPath
    #: The objects of each of Orbax's steps.
    orbax: ClassVar[dict[int, tuple[str, ...]]] = {
        0: ("default/_METADATA", layout.STEP_METADATA, layout.COMMIT_SUCCESS),
        5: (layout.STEP_METADATA, "default/d/0"),
    }
    #: The step that another attempt saved while this process slept.
    overtaken: int | None = None
    _saving: tuple[int, int] | None = None
    #: Steps that are deleted, and are saved again while the process that deletes them sleeps.
    _deleting: Sequence[int] = ()

    def __init__(self) -> None:
        super().__init__()
        self._saved_again: dict[int, Allowed] = {}
        for step, names in self.orbax.items():
            for name in names:
                (self.paths.step(step) / name).put(_ORBAX)

    @rule(
        step=st.sampled_from((0, 1, 2, 3, 5)),
        processes=st.integers(1, 2),
        event=st.sampled_from(EVENTS),
        moment=MOMENTS,
    )
    def save(self, step: int, processes: int, event: str, moment: int) -> None:
        self.overtaken = None
        self._saving = (step, processes) if step not in self.orbax else None
        ordinal = next(self.ordinals)
        temporary = self.paths.temporary(step, self.attempt, ordinal)
        contents = f"{step}:{ordinal}"
        try:
            ended = self._while(event, moment, lambda: self.save_as(temporary, contents, processes, ordinal))
        except (NotCommitted, SaveFailed, CheckpointCorrupt):
            if step in self.orbax:
                self.check_after(ended=True)
                return
            assert self.overtaken == step, "a save failed that nobody overtook"
            ended = False
        self._saving = None
        if ended and self.overtaken is None:
            self.model[step] = Allowed({contents}, required=True)
        self.check_after(ended)

    @rule(keep=st.integers(1, 3), event=st.sampled_from(EVENTS), moment=MOMENTS)
    def retain(self, keep: int, event: str, moment: int) -> None:
        self._deleting = self._complete()[:-keep] if event == "sleeps" else []
        super().retain(keep, event, moment)
        self._deleting = []

    @rule(event=st.sampled_from(EVENTS[:-1]), moment=MOMENTS)
    def start(self, event: str, moment: int) -> None:
        super().start(event, moment)

    def save_as(self, temporary: Temporary, contents: str, processes: int, ordinal: int) -> None:
        step = temporary.step
        assert step is not None
        for process in range(processes):
            with commit.of(self.paths).writing(temporary, 0, process_index=process) as writing:
                files = {}
                # The second file's name depends on the number of processes, as with another sharding.
                for path in (
                    layout.host_state_file(process),
                    f"default/w/{process}.{processes}",
                    f"default/s/{process}",
                ):
                    # The last file is the same in all saves, and so is its generation in some stores.
                    data = b"same" if "/s/" in path else f"{contents}:{process}".encode()
                    files[path] = write_file(writing, path, data, self._go_on)
                record = done_record(
                    temporary,
                    self.paths.item,
                    files,
                    process=process,
                    processes=processes,
                    begun_ns=writing.begun_ns,
                    generations=writing.generations,
                )
                if process == processes - 1:
                    self._may_be_durable(step, contents, required=False)  # the request may be the last thing it does
                (temporary.path / layout.done_record(process)).put(record.to_bytes())
        self._may_be_durable(step, contents, required=True)
        if not commit.of(self.paths).finalize(temporary, replace=True):
            raise NotCommitted

    def check_after(self, ended: bool) -> None:
        self.model |= self._saved_again
        self._saved_again = {}
        super().check_after(ended)

    def _complete(self) -> list[int]:
        for step, names in self.orbax.items():
            found = {entry.key for entry in self.paths.step(step).entries()}
            assert found == set(names), f"step {step} is Orbax's, and has {found}"
            assert all((self.paths.step(step) / name).read_bytes() == _ORBAX for name in names)
        complete = listing.complete_steps(self.paths)
        assert set(complete) & set(self.orbax) == {0} & set(self.orbax)
        return [step for step in complete if step not in self.orbax]

    def _go_on(self) -> None:
        """A writer calls it again and again."""

    def _may_be_durable(self, step: int, contents: str, *, required: bool) -> None:
        if self.overtaken != step:
            before = self.model.get(step, Allowed(set(), required=False))
            self.model[step] = Allowed(before.contents | {contents}, required=before.required or required)

    def _while(self, event: str, moment: int, act: object) -> bool:
        if event != "dies after its request":
            return super()._while(event, moment, act)  # type: ignore[arg-type]
        numbers = itertools.count()
        store = cast(FlatStore, self.store)

        def after(operation: str, key: str) -> None:
            if next(numbers) == moment:
                store.after = _nothing
                raise Dies

        store.after = after
        try:
            act()  # type: ignore[operator]
        except Dies:
            return False
        finally:
            store.after = _nothing
        return True

    def _happen(self, event: str) -> None:
        if event == "sleeps" and self._deleting:
            self._save_again()
            return
        if event != "sleeps" or self._saving is None:
            super()._happen(event)
            return
        step, processes = self._saving
        sleeper = self.attempt
        self.start_again()
        ordinal = next(self.ordinals)
        contents = f"{step}:{ordinal}"
        self.overtaken = None
        self.save_as(self.paths.temporary(step, self.attempt, ordinal), contents, 3 - processes, ordinal)
        self.model[step] = Allowed({contents}, required=True)
        self.overtaken = step
        self.attempt = sleeper

    def _save_again(self) -> None:
        sleeper = self.attempt
        self.start_again()
        standing = self._complete()  # the sleeper may still choose to delete these, whoever saved them
        for step in self._deleting:
            ordinal = next(self.ordinals)
            contents = f"{step}:{ordinal}"
            self.save_as(self.paths.temporary(step, self.attempt, ordinal), contents, 1, ordinal)
            self._saved_again[step] = Allowed({contents}, required=step not in standing)
        self.attempt = sleeper


class DigestMachine(FlatMachine):
    """The machine on a store that tells versions apart by their contents."""

    store_type = DigestStore


def _nothing(operation: str, key: str) -> None:
    pass
