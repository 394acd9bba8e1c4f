"""Real JAX processes that meet before JAX joins them: nobody is aborted by JAX, and each end says what it is for."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from gracepoint.wire.names import DEFAULT_NOT_JOINED_EXIT_CODE as NOT_JOINED
from gracepoint.wire.names import Env
from tests.multiprocess import joining_process
from tests.multiprocess.launcher import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(joining_process.__file__)


def pod(process: int, *, attempt: int = 0, count: int = 2, job: str = "uid-1") -> dict[str, str]:
    """What the webhook and the Job controller give a pod, and what the test changes."""
    return {
        Env.JOBSET_NAME: "gpt",
        Env.JOBSET_UID: job,
        Env.POD_NAME: f"gpt-w-0-{process}-{attempt}",
        Env.RESTART_ATTEMPT: str(attempt),
        Env.PROCESS_COUNT: str(count),
        Env.PODS_PER_JOB: str(count),
        "JOB_COMPLETION_INDEX": str(process),
    }


def after(file: Path) -> dict[str, str]:
    """Has a process come once the file is there."""
    return {"TEST_COMES_AFTER": str(file)}


def start(part: str, pods: list[dict[str, str]], root: Path) -> Processes:
    return Processes.start(SCRIPT, len(pods), arguments=[part, str(root)], environments=pods, devices=1)


def test_a_process_of_the_attempt_before_leaves_uncounted_and_the_new_attempt_trains(tmp_path: Path) -> None:
    pods = [pod(0, attempt=1), pod(1, attempt=0), pod(1, attempt=1) | after(tmp_path / "now")]
    with start("attach", pods, tmp_path / "steps") as processes:
        straggler = processes[1].wait(60)
        assert straggler.code == NOT_JOINED
        assert (
            "process 1 (gpt-w-0-1-0) of attempt 0 leaves, as process 0 (gpt-w-0-0-1) of attempt 1" in straggler.output
        )
        (tmp_path / "now").touch()
        results = processes.wait(60)
    assert [result.code for result in results] == [0, NOT_JOINED, 0], results
    assert "attached 1 2" in results[2].output


def test_process_0_of_the_attempt_before_leaves_when_the_new_attempt_asks(tmp_path: Path) -> None:
    pods = [pod(0, attempt=0), pod(1, attempt=1), pod(0, attempt=1) | after(tmp_path / "now")]
    with start("attach", pods, tmp_path / "steps") as processes:
        straggler = processes[0].wait(60)
        assert straggler.code == NOT_JOINED
        assert "of attempt 0 leaves, as process 1 (gpt-w-0-1-1) of attempt 1 has started" in straggler.output
        assert processes[1].running
        (tmp_path / "now").touch()
        results = processes.wait(60)
    assert [result.code for result in results] == [NOT_JOINED, 0, 0], results


def test_process_0_that_comes_late_is_awaited_and_the_log_says_for_whom(tmp_path: Path) -> None:
    pods = [pod(0, count=3) | after(tmp_path / "now"), pod(1, count=3), pod(2, count=3)]
    with start("attach", pods, tmp_path / "steps") as processes:
        for waiting in (processes[1], processes[2]):
            waiting.wait_for_line("waits for process 0 at 127.0.0.1:")
        (tmp_path / "now").touch()
        results = processes.wait(60)
    assert [result.code for result in results] == [0, 0, 0], results


def test_a_pod_that_is_deleted_while_it_waits_ends_at_once_and_its_replacement_is_awaited(tmp_path: Path) -> None:
    now = after(tmp_path / "now")
    pods = [pod(0, count=3), pod(1, count=3), pod(1, count=3) | now, pod(0, count=3) | now, pod(2, count=3) | now]
    with start("attach", pods, tmp_path / "steps") as processes:
        processes[0].wait_for_line("waits for process 2; 2 of 3 are here")
        for deleted in (processes[0], processes[1]):
            deleted.signal(signal.SIGTERM)
            assert deleted.wait(30).code == NOT_JOINED
            assert "asked to end (SIGTERM) while it waited" in deleted.output
            if deleted is processes[0]:
                processes[1].wait_for_line("waits for process 0 at")
        (tmp_path / "now").touch()
        results = processes.wait(60)
    assert [result.code for result in results] == [NOT_JOINED, NOT_JOINED, 0, 0, 0], results


def test_a_peer_that_never_comes_is_named_and_ends_the_start_at_its_limit_without_an_abort(tmp_path: Path) -> None:
    limit = {Env.JOIN_TIMEOUT_S: "1.5"}
    pods = [pod(0, count=3) | limit, pod(1, count=3) | limit]
    with start("attach", pods, tmp_path / "steps") as processes:
        results = processes.wait(60)
    assert [result.code for result in results] == [NOT_JOINED] * 2, results
    for result in results:
        assert "process 2; 2 of 3 are here" in result.output
        assert "Traceback" not in result.output


# Not process 0 in ``attach``: JAX sees the end of its service as soon as this library does, and may be the first.
@pytest.mark.parametrize(("part", "who"), [("dies", 0), ("dies", 1), ("dies_in_attach", 1)])
def test_a_peer_that_dies_when_all_have_met_ends_the_others_at_once_and_not_by_jax(
    part: str, who: int, tmp_path: Path
) -> None:
    pods = [pod(process, count=3) for process in range(3)]
    pods[who]["TEST_DIES"] = "1"
    with start(part, pods, tmp_path / "steps") as processes:
        results = processes.wait(60)
    codes = [NOT_JOINED] * 3
    codes[who] = 3
    assert [result.code for result in results] == codes, results
    for result in results:
        assert result.code == 3 or f"process {who} (gpt-w-0-{who}-0) of attempt 0 died before" in result.output


def test_a_proxy_is_not_used_to_reach_process_0(tmp_path: Path) -> None:
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # nothing listens there
    with start("attach", [pod(process) | proxy for process in range(2)], tmp_path / "steps") as processes:
        results = processes.wait(60)
    assert [result.code for result in results] == [0, 0], results


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({Env.PROCESS_COUNT: "3", Env.PODS_PER_JOB: "3"}, "was told 3 processes", id="another number"),
    ],
)
def test_processes_that_cannot_train_together_fail_as_a_program_does(
    change: dict[str, str], words: str, tmp_path: Path
) -> None:
    with start("attach", [pod(0), pod(1) | change], tmp_path / "steps") as processes:
        results = processes.wait(60)
    assert [result.code for result in results] == [1, 1], results
    assert all(words in result.output and "AgreementError" in result.output for result in results)


def test_attempts_in_a_cluster_that_the_script_has_joined_itself_are_reported_apart_at_once(tmp_path: Path) -> None:
    with start("own_cluster", [pod(0, attempt=1), pod(1, attempt=0)], tmp_path / "steps") as processes:
        results = processes.wait(90)
    assert [result.code for result in results] == [NOT_JOINED] * 2, results
    for result in results:
        assert "of attempt 0 leaves, as process 0 (gpt-w-0-0-1) of attempt 1 has started" in result.output
        (seconds,) = re.findall(r"after (\d+\.\d) s", result.output)
        assert float(seconds) < 30  # 60, where each waited for its own


def test_initialize_alone_meets_too_and_ends_at_its_timeout(tmp_path: Path) -> None:
    with start("initialize", [{}, {}], tmp_path) as processes:
        results = processes.wait(60)
    assert [result.code for result in results] == [0, 0], results
    with start("initialize", [{"TEST_PROCESS_COUNT": "2"}], tmp_path) as processes:
        (alone,) = processes.wait(60)
    assert alone.code == NOT_JOINED
    assert "waited 2 s for process 1; 1 of 2 are here" in alone.output
