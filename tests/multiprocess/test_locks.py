"""Which file locks saves and restores take, as the kernel sees it. Some file systems have none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess import locks_process, strace
from tests.multiprocess.launcher import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

SCRIPT = Path(locks_process.__file__)
LOCKS = "fcntl,flock,access,faccessat,faccessat2"


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.variant), 2])
def test_no_way_to_save_or_restore_locks_a_file_but_the_renewal_of_the_lease(count: int, tmp_path: Path) -> None:
    if why := strace.missing():
        pytest.skip(why)
    with strace.recording(tmp_path / "log", LOCKS) as nursery:
        root = tmp_path / "root"
        root.mkdir()
        with Processes.start(SCRIPT, count, arguments=[str(root)], devices=2, off=nursery) as processes:
            codes = [result.code for result in processes.wait(180)]
            assert codes == [0] * count, processes.output()
    leased = {str(root / "session"), str(root / "manager")}
    way, ways, locks = "the start", set(), []
    for call in strace.read(tmp_path / "log"):
        if call.mark:
            way = call.mark
            ways.add(way)
        elif call.name == "flock" and all(path in leased for path in call.paths):
            continue  # docs/guarantees.md names it
        elif call.name == "flock" or re.search(r"F_(OFD_)?SETLKW?\b|F_SETLEASE", call.arguments):
            locks.append((way, call.name, call.arguments, call.paths))
    assert {f"steps: {name}" for name in locks_process.FORMATS} <= ways, "the recording is not complete"
    assert locks == []
