"""Orbax and Gracepoint read each other's checkpoints in a ``gs://`` bucket, bit for bit, in all formats."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
import pytest

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.storage.storage_path import storage_path
from tests.contract.test_orbax_written_steps_are_restored import FORMS, save_with_orbax
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, rich_state, save, small_state
from tests.unit.checkpoint.fakes.formats import each_format

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@each_format
def test_orbax_restores_ours(gs_bucket: Bucket, options: WriteOptions) -> None:
    root: Any = f"{gs_bucket.uri}/run"
    state = rich_state()
    save(engine(root, options=options), 3, state)
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [3]
        assert_same(manager.restore(3, args=ocp.args.StandardRestore(state)), state)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ours_restores_what_orbax_saved(gs_bucket: Bucket, form: dict[str, Any]) -> None:
    root: Any = f"{gs_bucket.uri}/run"
    state = rich_state()
    save_with_orbax(root, 5, state, **form)
    restored = restore(root, state)
    assert restored is not None
    assert (restored.step, restored.by_orbax) == (5, True)
    assert_same(restored.state, state)


def test_orbax_sees_no_step_that_is_not_committed(gs_bucket: Bucket) -> None:
    root: Any = f"{gs_bucket.uri}/run"
    for step in (2, 3):
        save(engine(root, attempt=f"job-{step}"), step, small_state())
    paths = Layout(storage_path(root))
    # As a save that replaces the step leaves it when it dies right after its claim.
    (paths.step(3) / layout.COMMIT_SUCCESS).delete()
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [2]
