"""A Hypothesis state machine of commit, recovery and retention on a disk that crashes.

Saves, starts and deletions are run one after the other. At any operation of the store, one of these happens: the
process dies, the machine crashes (with or without the names that were not synced), or another process acts. The model
is a dict: for each step, which contents a restore may find.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import StoredFile, file_of
from gracepoint.checkpoint.steps import commit, listing, retention
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.checks import check_contents
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from tests.unit.checkpoint.steps.fakes.done_records import done_record
from tests.unit.checkpoint.storage.fakes.fake_store import FakePath, FakeStore
from tests.unit.checkpoint.storage.fakes.volatile import Crash, VolatilePath, VolatileStore

EVENTS = ("nothing", "dies", "crashes", "crashes without names", "another starts", "another looks")
#: More than the operations of a save of two processes that replaces another one.
MOMENTS_OF_A_SAVE = 40
MOMENTS = st.integers(min_value=0, max_value=MOMENTS_OF_A_SAVE - 1)
OLD_S = 3600.0


class Dies(BaseException):
    """The process is killed; the machine and the other processes go on."""


@dataclasses.dataclass
class Allowed:
    """What the model knows of a step.

    Attributes:
        contents: What a restore may find.
        required: Whether there must be a checkpoint.
    """

    contents: set[str]
    required: bool


class CommitMachine(RuleBasedStateMachine):
    """See the module. Subclasses with another store, or one that is wrong on purpose, replace the types."""

    store_type: ClassVar[type[FakeStore]] = VolatileStore
    path_type: ClassVar[type[FakePath]] = VolatilePath

    def __init__(self) -> None:
        super().__init__()
        self.store = self.store_type()
        self.paths = Layout(self.path_type(self.store, "/checkpoints"))
        self.paths.root.make_folder_durably()
        self.model: dict[int, Allowed] = {}
        self.attempts = itertools.count(1)
        self.attempt = f"job-{next(self.attempts)}"
        self.ordinals = itertools.count(1)

    # --- rules

    @rule(step=st.integers(0, 4), processes=st.integers(1, 2), event=st.sampled_from(EVENTS), moment=MOMENTS)
    def save(self, step: int, processes: int, event: str, moment: int) -> None:
        """A gang saves ``step``, which may be there already."""
        ordinal = next(self.ordinals)
        temporary = self.paths.temporary(step, self.attempt, ordinal)
        contents = f"{step}:{ordinal}"
        ended = self._while(event, moment, lambda: self.save_as(temporary, contents, processes, ordinal))
        if ended:
            self.model[step] = Allowed({contents}, required=True)
        self.check_after(ended)

    @rule(keep=st.integers(1, 3), event=st.sampled_from(EVENTS), moment=MOMENTS)
    def retain(self, keep: int, event: str, moment: int) -> None:
        """Old steps are deleted, as after a save."""
        complete = sorted(self._complete())
        if not complete:
            return
        gone = complete[:-keep]
        for step in gone:
            self.model[step].required = False

        def act() -> None:
            ordinal = next(self.ordinals)
            retention.apply(
                self.paths, Retention(keep), newest_good=complete[-1], attempt=self.attempt, ordinal=ordinal
            )
            commit.of(self.paths).empty_trash()

        ended = self._while(event, moment, act)
        if ended:
            for step in gone:
                del self.model[step]
        self.check_after(ended)

    @rule(event=st.sampled_from(EVENTS), moment=MOMENTS)
    def start(self, event: str, moment: int) -> None:
        """The next attempt starts: it recovers, and clears up what is old."""
        self.check_after(self._while(event, moment, self.start_again))

    @rule()
    def hours_pass(self) -> None:
        self.store.time_s += 2 * OLD_S

    # --- what processes do

    def save_as(self, temporary: Temporary, contents: str, processes: int, ordinal: int) -> None:
        """As ``SaveOperation`` and its writer do in each of the processes, and then in the last at the barrier."""
        taken = f"{temporary.path} was taken away from its living writer"
        temporary.path.make_folder_durably()
        try:
            with temporary.path.staying() as stayed:
                for process in range(processes):
                    files = self._written(temporary.path, process, contents)
                    assert stayed(), taken
                    record = done_record(
                        temporary, self.paths.item, files, process=process, processes=processes, begun_ns=ordinal
                    )
                    done = temporary.path / layout.done_record(process)
                    done.put(record.to_bytes())
        except FileNotFoundError as gone:
            raise AssertionError(taken) from gone
        # From here on the save is durable: whoever dies, it or what it was to replace is found.
        step = temporary.step
        assert step is not None
        before = self.model.get(step)
        earlier = before.contents if before is not None else set()
        self.model[step] = Allowed(earlier | {contents}, required=True)
        assert commit.of(self.paths).finalize(temporary, replace=True), f"{temporary.path} was not committed"

    def _written(self, folder: StoragePath, process: int, contents: str) -> dict[str, StoredFile]:
        path, data = layout.host_state_file(process), f"{contents}:{process}".encode()
        (folder / path).parent.make_folder()
        (folder / path).put(data)
        for each in (folder / path).folders_up_to(folder.parent):
            each.sync()
        return {path: file_of(data)}

    def start_again(self) -> None:
        self.attempt = f"job-{next(self.attempts)}"
        listing.list_steps(
            self.paths, attempt=self.attempt, deadline=Deadline.after(60.0, self._clock), sleep=self._sleep
        )
        commit.give_up_old(self.paths, attempt=self.attempt, older_than_s=OLD_S)
        commit.of(self.paths).empty_trash()

    def _clock(self) -> float:
        return self.store.time_s

    def _sleep(self, seconds: float) -> None:
        self.store.time_s += seconds

    # --- crashes and other processes

    def _while(self, event: str, moment: int, act: Callable[[], None]) -> bool:
        """Runs ``act`` with ``event`` at its operation number ``moment``; returns whether it ended."""
        numbers = itertools.count()

        def before(operation: str, key: str) -> None:
            if next(numbers) == moment:
                self.store.before = _nothing
                self._happen(event)

        self.store.before = before
        try:
            act()
        except Dies:
            return False
        except Crash:
            self.store.crash(keeps_names=event == "crashes")
            return False
        finally:
            self.store.before = _nothing
        return True

    def _happen(self, event: str) -> None:
        match event:
            case "dies":
                raise Dies
            case "crashes" | "crashes without names":
                raise Crash
            case "another starts":
                attempt = self.attempt
                self.start_again()
                self.attempt = attempt  # the earlier attempt still lives
            case "another looks":
                for step, contents in self.restorable():
                    assert step in self.model, f"step {step} is there, and nobody saved it"
                    assert contents in self.model[step].contents

    # --- the invariant

    def check_after(self, ended: bool) -> None:
        if not ended:
            self.start_again()
        found = dict(self.restorable())
        for step, allowed in self.model.items():
            assert step in found or not allowed.required, f"step {step} is lost"
        for step, contents in found.items():
            assert step in self.model, f"step {step} is back"
            assert contents in self.model[step].contents, f"step {step} holds {contents}"
            self.model[step] = Allowed({contents}, self.model[step].required)

    def _complete(self) -> list[int]:
        return listing.complete_steps(self.paths)

    def restorable(self) -> Iterator[tuple[int, str]]:
        """Yields the steps that are listed as complete, each with its contents, checked against its manifest."""
        for step in self._complete():
            folder = self.paths.step(step)
            manifest = records.read_manifest(storage_path(folder))
            assert manifest is not None
            assert manifest.step == step
            whole = set()
            for name, file in manifest.files.items():
                check_contents(folder / name, file.bytes, file.crc32)
                if "/s/" not in name:
                    whole.add((folder / name).read_bytes().decode().rpartition(":")[0])
            (contents,) = whole
            yield step, contents


def _nothing(operation: str, key: str) -> None:
    pass
