"""What the release contract makes of single ends of pods, by the real Job and JobSet controllers."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import pytest

from gracepoint.wire.names import DEFAULT_NOT_JOINED_EXIT_CODE
from tests.restart_budget.control_plane import ControlPlane, Json, is_ended, missing, open_control_plane, path_of
from tests.restart_budget.gang import Gang

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

CRASHES_END = [{"name": "crashes_end", "action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}]
REFUSED = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "containerStatuses": None}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The real controllers."""
    if reason := missing():
        pytest.skip(reason)
    with open_control_plane(tmp_path_factory.mktemp("contract")) as made:
        yield made


def gang(plane: ControlPlane, name: str, *rules: Json) -> Gang:
    made = Gang(plane, name, 5, rules)
    made.prepare()
    made.create()
    return made


def uids(pods: list[Json]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]


def end(gang: Gang, pod: Json, status: Json) -> None:
    gang.api.set_status(path_of(pod), status)


def is_replaced(gang: Gang, status: Json) -> None:
    """Ends the second process; waits until another pod runs in its place, and the first one has stayed."""
    first, second = gang.running()
    end(gang, second, status)
    gang.until(lambda: len(set(uids(gang.running())) - {second["metadata"]["uid"]}) == 2, "another pod")
    assert uids(gang.running())[0] == first["metadata"]["uid"]


def is_said(gang: Gang, words: str) -> bool:
    return words in str(gang.said())


def counted(gang: Gang) -> tuple[int, int, str]:
    account = gang.account()
    return account.restarts, account.counted, account.end


def test_a_process_that_did_not_get_in_is_made_anew_while_the_others_wait(plane: ControlPlane) -> None:
    waiting = gang(plane, "not-joined")
    is_replaced(waiting, is_ended(waiting.running()[1], DEFAULT_NOT_JOINED_EXIT_CODE))
    assert counted(waiting) == (0, 0, "")


def test_a_gang_that_is_suspended_while_it_starts_counts_nothing(plane: ControlPlane) -> None:
    """Kueue does that. Processes that do not handle SIGTERM yet end with 143, or with 137 after the grace period."""
    starting = gang(plane, "suspended")
    pods = starting.running()
    plane.kubelets.dead.update(starting.nodes)
    starting.suspend(True)
    starting.until(lambda: not starting.running(), "the pods to be deleted")
    for pod, code in zip(pods, (143, 137), strict=True):
        end(starting, pod, is_ended(pod, code))
    time.sleep(4)  # the Job controller looks a second after each change, while kubelets clean up
    for pod in pods:
        starting.api.delete(path_of(pod), grace_s=0)
    plane.kubelets.dead.difference_update(starting.nodes)
    starting.suspend(False)
    starting.wait_to_run(0)
    assert counted(starting) == (0, 0, "")


def test_what_a_job_cannot_tell_from_an_error_of_the_program_counts_and_is_named(plane: ControlPlane) -> None:
    lost = gang(plane, "container-lost")
    for number, (code, reason) in enumerate(((137, "ContainerStatusUnknown"), (128, "StartError"), (255, "Unknown"))):
        lost.exit(code, reason)
        lost.until(functools.partial(is_said, lost, f"has exit code {code} ({reason})"), "the Event")
        lost.wait_to_run(number + 1)
    assert counted(lost) == (3, 3, "")


def test_rules_of_users_for_crashes_are_not_for_pods_that_never_ran(plane: ControlPlane) -> None:
    ending = gang(plane, "crashes-end", *CRASHES_END)
    is_replaced(ending, REFUSED)
    assert counted(ending) == (0, 0, "")
    ending.exit(1)
    ending.wait_to_end()
    assert counted(ending) == (0, 0, "Failed")


def test_nobody_has_to_be_there_for_that(plane: ControlPlane) -> None:
    """The last test: the operator does not come back."""
    alone = gang(plane, "alone")
    plane.stop_operator()
    is_replaced(alone, REFUSED)
    assert counted(alone) == (0, 0, "")
    alone.exit(1)
    alone.wait_to_run(1)
    alone.leave()
    alone.wait_to_run(2)
    assert counted(alone) == (2, 1, "")
