"""What is wrong with a bucket is an error of ``attach``, which says what to do: not one of the emergency save."""

from __future__ import annotations

import datetime

import botocore.auth
import pytest

import gracepoint
from gracepoint.errors import GracepointError
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Fault, How, Rule
from tests.object_stores.servers import Bucket

ERRORS = (GracepointError, OSError)


def attach(uri: str) -> None:
    gracepoint.attach(uri).close()


def test_attach_accepts_a_bucket(far: Bucket) -> None:
    attach(f"{far.uri}/run")


def test_a_missing_bucket_is_an_error_of_attach(far: Bucket) -> None:
    with pytest.raises(ERRORS, match="The bucket does not exist: create it"):
        attach(f"{far.scheme}://no-such-{far.name}/run")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        pytest.param(401, "Check this process's credentials", id="wrong credentials"),
        pytest.param(403, "that they may read, create, list and delete", id="no rights"),
        pytest.param(507, "The quota is used up: raise it", id="full quota"),
    ],
)
def test_a_refused_write_is_an_error_of_attach(far: Bucket, store_proxy: FaultProxy, status: int, says: str) -> None:
    with pytest.raises(ERRORS, match=says), store_proxy.rules(Rule(Fault(How.ANSWER, status=status), kinds=("write",))):
        attach(f"{far.uri}/run")


@pytest.mark.parametrize("kind", ["read", "delete", "list"])
def test_a_missing_right_is_an_error_of_attach(far: Bucket, store_proxy: FaultProxy, kind: str) -> None:
    with (
        pytest.raises(ERRORS, match="that they may read, create, list and delete"),
        store_proxy.rules(Rule(Fault(How.ANSWER, status=403), kinds=(kind,))),
    ):
        attach(f"{far.uri}/run")


def test_wrong_keys_are_an_error_of_attach(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ERRORS, match="Check this process's credentials"):
        attach(f"{s3_bucket.uri}/run")


def test_a_wrong_clock_is_an_error_of_attach(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    right = botocore.auth.get_current_datetime
    late = datetime.timedelta(hours=1)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *arguments: right(*arguments) - late)
    with pytest.raises(ERRORS, match="This machine's clock is wrong: set it"):
        attach(f"{s3_bucket.uri}/run")
