"""The example of a move from Orbax: both loops are one run, whichever of them has saved."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "from_orbax"
sys.path.insert(0, str(EXAMPLE))

import with_gracepoint  # noqa: E402
import with_orbax  # noqa: E402

from gracepoint import checkpoint  # noqa: E402
from tests.unit.checkpoint.fakes.engine import assert_same, flip_bit  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

Train = Callable[..., tuple[list[float], Any]]
ORBAX: Train = with_orbax.train
GRACEPOINT: Train = with_gracepoint.train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Any]:
    return ORBAX(str(tmp_path_factory.mktemp("undisturbed")), 13)


@pytest.mark.parametrize(
    "loops",
    [
        pytest.param([ORBAX, GRACEPOINT], id="from Orbax"),
        pytest.param([GRACEPOINT, ORBAX], id="back to Orbax"),
        pytest.param([ORBAX, GRACEPOINT, ORBAX, GRACEPOINT], id="in turn"),
        pytest.param([GRACEPOINT, GRACEPOINT], id="Gracepoint alone"),
    ],
)
def test_a_run_moved_between_orbax_and_gracepoint_equals_an_undisturbed_one(
    tmp_path: Path, loops: list[Train], undisturbed: tuple[list[float], Any]
) -> None:
    losses: list[float] = []
    for number, train in enumerate(loops, start=1):
        more, state = train(str(tmp_path), 13 * number // len(loops))
        losses += more
    assert losses == undisturbed[0]
    assert_same(state, undisturbed[1])


def test_both_see_the_same_steps_and_items(tmp_path: Path) -> None:
    GRACEPOINT(str(tmp_path), 13)
    assert checkpoint.all_steps(tmp_path) == [8, 12, 13]
    assert all(checkpoint.verify(tmp_path / str(step)).damage == () for step in (8, 12, 13))
    with with_orbax.create_manager(str(tmp_path), 4) as manager:
        assert list(manager.all_steps()) == [8, 12, 13]
        assert manager.item_metadata(13)["items"]["params"]["in"].shape == (16, 16)
    assert {path.name for path in (tmp_path / "13").iterdir() if path.is_dir()} >= {"items", "iter"}


def test_a_damaged_step_is_passed_over(tmp_path: Path, undisturbed: tuple[list[float], Any]) -> None:
    GRACEPOINT(str(tmp_path), 12)
    flip_bit(tmp_path / "12" / "items" / "params.in" / "0.0")
    losses, state = GRACEPOINT(str(tmp_path), 13)
    assert losses == undisturbed[0][8:]
    assert_same(state, undisturbed[1])


def test_the_script_runs_as_the_page_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "with_gracepoint.py"), str(tmp_path), "4"],
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 4


@pytest.mark.parametrize(
    "block", re.findall(r"^```python\n(.*?)^```", (EXAMPLE / "README.md").read_text(encoding="utf-8"), re.S | re.M)
)
def test_code_on_the_page_is_in_the_script(block: str) -> None:
    assert block in (EXAMPLE / "with_gracepoint.py").read_text(encoding="utf-8")
