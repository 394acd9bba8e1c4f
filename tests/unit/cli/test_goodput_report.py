"""What ``goodput`` computes from the statuses of policies."""

from __future__ import annotations

import pytest

from gracepoint_cli.goodput import accounts
from gracepoint_operator.goodput import accounts as status_codec
from gracepoint_operator.goodput.accounts import GoodputLedger
from gracepoint_operator.goodput.life import Category, Life
from gracepoint_operator.workloads import WorkloadIdentity
from tests.unit.operator.fakes.samples import Json, policy_spec

LIFE = Life(
    began_ms=10_000,
    attempt=0,
    created_ms=10_000,
    bound_ms=11_000,
    started_ms=12_000,
    joined_ms=14_000,
    trained_ms=20_000,
)
LEDGER = GoodputLedger(
    since_ms=0,
    settled={Category.TRAINING: 7000, Category.RECOMPUTATION: 2000, Category.LEAVING: 1000},
    lives=(LIFE,),
    disruptions=1,
    losses=1,
    saves=2,
    saves_ms=500,
)


def policy(ledger: GoodputLedger = LEDGER) -> Json:
    entry = status_codec.written(ledger, WorkloadIdentity("JobSet", "team", "llm", "u"), 30_000)
    return {
        "apiVersion": "gracepoint.dev/v1beta1",
        "kind": "CheckpointPolicy",
        "metadata": {"name": "default", "namespace": "team", "uid": "p"},
        "spec": policy_spec().to_json(),
        "status": {"goodput": [entry.to_json()]},
    }


def test_the_account_continues_until_now() -> None:
    (found,) = accounts([policy()], 40.0)
    assert (found.total_s, found.seconds(Category.TRAINING), found.state) == (40.0, 27.0, "training")
    assert found.goodput == pytest.approx(27 / 40)
    assert found.restart_s == 1 + 1 + 1 + 2 + 6


def test_the_json_has_every_category_and_the_suggestion() -> None:
    (found,) = accounts([policy()], 40.0)
    shown = found.to_json()
    assert set(shown["seconds"]) == {category.value for category in Category}
    assert sum(shown["seconds"].values()) == shown["totalSeconds"]
    assert shown["suggestion"]["saveSeconds"] == 0.25


def test_a_policy_that_cannot_be_read_has_no_accounts() -> None:
    assert accounts([{**policy(), "spec": {}}], 40.0) == []
