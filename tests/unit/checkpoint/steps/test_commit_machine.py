"""No crash and no meeting of processes loses a durable save. What is wrong on purpose is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.storage_path import StoragePath
from tests.hypothesis_profiles import examples, portion
from tests.unit.checkpoint.steps.fakes.commit_machine import EVENTS, MOMENTS_OF_A_SAVE, CommitMachine
from tests.unit.checkpoint.storage.fakes.volatile import VolatilePath

# Whole saves, one for every moment at which a process can die.
pytestmark = pytest.mark.integration

SETTINGS = settings(
    max_examples=examples(150),
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# A failure is wanted here, and nobody reads its smallest example. All are found within some tens of examples.
WRONG = settings(SETTINGS, max_examples=2000, phases=[Phase.generate], print_blob=False)


def test_no_crash_loses_a_durable_save() -> None:
    run_state_machine_as_test(CommitMachine, settings=SETTINGS)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_is_saved_again_is_never_lost(event: str, processes: int) -> None:
    for moment in portion(range(MOMENTS_OF_A_SAVE)):
        machine = CommitMachine()
        machine.save(step=3, processes=1, event="nothing", moment=0)
        machine.save(step=3, processes=processes, event=event, moment=moment)


class LateManifestPath(VolatilePath):
    """The manifest is synced only after the folder has its final name."""

    def put(self, data: bytes) -> None:
        if self.name == layout.MANIFEST:
            with self.store.operation("put", self.key):
                self.store.new(self.key, data)
        else:
            super().put(data)

    def publish(self, target: StoragePath) -> None:
        super().publish(target)
        target.sync()


class LateManifest(CommitMachine):
    path_type = LateManifestPath


def test_a_rename_before_the_manifest_is_synced_is_found() -> None:
    """At every moment, as a search needs hundreds of examples, which depend on what else the process has imported."""

    def crash_at_every_moment() -> None:
        for moment in range(MOMENTS_OF_A_SAVE):
            LateManifest().save(step=3, processes=1, event="crashes", moment=moment)

    with pytest.raises(AssertionError, match="step 3 is lost"):
        crash_at_every_moment()


def test_a_retention_that_deletes_the_newest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(self: Retention, ages_s: Mapping[int, float], **_: Any) -> list[int]:
        return [max(ages_s)] if len(ages_s) > self.keep_last else []

    monkeypatch.setattr(Retention, "to_delete", newest)
    with pytest.raises(AssertionError, match="is lost"):
        run_state_machine_as_test(CommitMachine, settings=WRONG)


def test_a_salvage_under_a_live_writer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = commit.salvage

    def clearing(paths: Layout, *, holds_lease: bool) -> list[str]:
        remarks = real(paths, holds_lease=holds_lease)
        for temporary in paths.temporaries():  # whether or not somebody still writes there
            commit.of(paths).discard(temporary.path, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))
        return remarks

    monkeypatch.setattr(commit, "salvage", clearing)
    with pytest.raises(AssertionError, match="was taken away from its living writer"):
        run_state_machine_as_test(CommitMachine, settings=WRONG)
