"""The operator's Secret, ConfigMap and webhooks, kept by two replicas over an API server in memory."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from pathlib import Path

import pytest

from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import RetryPauses
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust import bundle, certificates
from gracepoint_operator.trust.bundle import PEM_KEY
from gracepoint_operator.trust.certificates import LOOK_S, Certificates, TrustKeeper, TrustPlaces
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock

DAY_S = 86400.0
NOW = 1_800_000_000.0
PLACES = TrustPlaces("gp-system", "gp-certificates", "gp-trust", "00-gp", "gp", "gp.gp-system.svc")


@pytest.fixture
def api() -> MemoryApi:
    """What the chart installs."""
    made = MemoryApi(Clock(NOW))
    made.add(objects.SECRETS, {"metadata": {"namespace": "gp-system", "name": "gp-certificates"}})
    made.add(objects.CONFIG_MAPS, {"metadata": {"namespace": "gp-system", "name": "gp-trust"}})
    for kind, name in ((objects.MUTATING_WEBHOOKS, "00-gp"), (objects.VALIDATING_WEBHOOKS, "gp")):
        webhooks = [{"name": f"{part}.gracepoint.dev", "clientConfig": {"service": {"name": "gp"}}} for part in "ab"]
        made.add(kind, {"metadata": {"name": name}, "webhooks": webhooks})
    return made


class Replica:
    def __init__(
        self, api: MemoryApi, folder: Path, clock: Clock, places: TrustPlaces = PLACES, look_s: float = LOOK_S
    ) -> None:
        self.certificates = Certificates(folder, required=not places.secret, overlap_s=DAY_S, clock=clock)
        self.metrics = Metrics()
        self.keeper = TrustKeeper(api, self.certificates, places, self.metrics, clock, look_s)


def told(api: MemoryApi) -> set[str]:
    """The authorities that the API server trusts."""
    bodies = [*api.of(objects.MUTATING_WEBHOOKS), *api.of(objects.VALIDATING_WEBHOOKS)]
    found = {webhook["clientConfig"].get("caBundle", "") for body in bodies for webhook in body["webhooks"]}
    return {base64.b64decode(text).decode() for text in found}


async def test_two_replicas_make_one_certificate_and_give_it_to_the_api_server(api: MemoryApi, tmp_path: Path) -> None:
    clock = Clock(NOW)
    first, second = (Replica(api, tmp_path, clock) for _ in range(2))
    assert await first.keeper.once()
    assert await second.keeper.once()
    assert first.certificates.served == second.certificates.served is not None
    assert told(api) == {first.certificates.ca}
    assert api.of(objects.CONFIG_MAPS)[0]["data"][PEM_KEY] == first.certificates.ca
    writes = [call for call in api.calls if call.startswith("PATCH")]
    assert await first.keeper.once()
    assert await second.keeper.once()
    assert [call for call in api.calls if call.startswith("PATCH")] == writes, "nothing is due"


async def test_the_replica_that_comes_second_takes_what_the_first_made(
    api: MemoryApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(NOW)
    first, second = (Replica(api, tmp_path, clock) for _ in range(2))
    is_first_write = True

    async def arrives(method: str, path: str, query: Mapping[str, str]) -> None:
        nonlocal is_first_write
        if method == "PATCH" and "secrets" in path and is_first_write:
            is_first_write = False
            assert await first.keeper.once()  # between the read and the write of the second

    monkeypatch.setattr(api, "arrives", arrives)
    assert not await second.keeper.once()
    assert await second.keeper.once()
    assert first.certificates.served == second.certificates.served


async def test_a_rotation_of_three_years_never_leaves_the_api_server_behind(api: MemoryApi, tmp_path: Path) -> None:
    clock = Clock(NOW)
    replica = Replica(api, tmp_path, clock)
    authorities = set()
    for _ in range(3 * 366 // 10):
        assert await replica.keeper.once()
        (trusted,) = told(api)
        served = replica.certificates.served
        assert served is not None
        assert bundle.issuers(served.chain, bundle.read_certificates(trusted))
        authorities |= {item.fingerprint for item in bundle.read_certificates(trusted)}
        clock.move(10 * DAY_S)
        replica.certificates.advance()
    assert len(authorities) == 2


async def test_a_certificate_of_the_charts_own_making_stays_for_a_month(api: MemoryApi, tmp_path: Path) -> None:
    clock = Clock(NOW)
    made = bundle.make_authority("helm", NOW - DAY_S, 3650 * DAY_S)
    leaf = bundle.issue(made, ["gp.gp-system.svc"], NOW - DAY_S, 3650 * DAY_S)
    for name, text in (("tls.crt", leaf.chain), ("tls.key", leaf.key), ("ca.crt", made.chain)):
        (tmp_path / name).write_text(text)
    replica = Replica(api, tmp_path, clock)
    assert await replica.keeper.once()
    assert replica.certificates.served == leaf
    (trusted,) = told(api)
    assert len(bundle.read_certificates(trusted)) == 2
    clock.move(31 * DAY_S)
    assert await replica.keeper.once()
    assert replica.certificates.served not in (None, leaf)


@pytest.mark.parametrize("what", ["secret", "config_map", "mutating_webhooks"])
async def test_a_failure_is_counted_and_the_rest_is_kept(api: MemoryApi, tmp_path: Path, what: str) -> None:
    gone = {
        "secret": (objects.SECRETS, "gp-system", "gp-certificates"),
        "config_map": (objects.CONFIG_MAPS, "gp-system", "gp-trust"),
        "mutating_webhooks": (objects.MUTATING_WEBHOOKS, None, "00-gp"),
    }[what]
    replica = Replica(api, tmp_path, Clock(NOW))
    assert await replica.keeper.once()
    del api.objects[gone[0].path(gone[1], gone[2])]
    assert not await replica.keeper.once()
    assert replica.metrics.registry.get_sample_value("gracepoint_trust_failures_total", {"what": what}) == 1
    assert replica.certificates.served is not None
    assert len(told(api)) == 1


def encoded(**text: str) -> dict[str, str]:
    return {name.replace("_", "."): base64.b64encode(value.encode()).decode() for name, value in text.items()}


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(None, id="without data"),
        pytest.param(encoded(ca_crt="", ca_key="", tls_crt="", tls_key=""), id="emptied"),
        pytest.param(encoded(ca_crt="x"), id="unreadable"),
    ],
)
async def test_a_secret_that_was_lost_gets_the_same_certificate_again(
    api: MemoryApi, tmp_path: Path, found: dict[str, str] | None
) -> None:
    """So that pods which are created before any replica answers again can trust what their JobSet began with."""
    replica, fresh = (Replica(api, tmp_path, Clock(NOW)) for _ in range(2))
    assert await replica.keeper.once()
    kept, trusted = api.of(objects.SECRETS)[0]["data"], told(api)
    change_secret(api, found)
    assert await replica.keeper.once()
    assert api.of(objects.SECRETS)[0]["data"] == kept
    assert await fresh.keeper.once()
    assert fresh.certificates.served == replica.certificates.served
    assert told(api) == trusted


async def test_a_secret_that_another_replica_filled_anew_gets_the_known_authority_back(
    api: MemoryApi, tmp_path: Path
) -> None:
    clock = Clock(NOW)
    replica, fresh = (Replica(api, tmp_path, clock) for _ in range(2))
    assert await replica.keeper.once()
    served, (trusted,) = replica.certificates.served, told(api)
    change_secret(api, None)
    assert await fresh.keeper.once()  # it knows of nothing, and makes another one
    for keeper in (replica.keeper, fresh.keeper, replica.keeper):
        assert await keeper.once()
    assert replica.certificates.served == served
    (both,) = told(api)
    assert set(bundle.read_certificates(trusted)) < set(bundle.read_certificates(both))
    clock.move(DAY_S)  # until then, pods that know the new one alone can reach the replica that made it
    assert await fresh.keeper.once()
    assert fresh.certificates.served == served


async def test_a_replica_that_knows_nothing_leaves_a_secret_that_it_cannot_read(api: MemoryApi, tmp_path: Path) -> None:
    replica = Replica(api, tmp_path, Clock(NOW))
    change_secret(api, encoded(ca_crt="x"))
    assert not await replica.keeper.once()
    assert api.of(objects.SECRETS)[0]["data"] == encoded(ca_crt="x")


def change_secret(api: MemoryApi, data: dict[str, str] | None) -> None:
    body = api.objects.pop(objects.SECRETS.path("gp-system", "gp-certificates"))
    api.add(objects.SECRETS, {"metadata": body["metadata"], **({} if data is None else {"data": data})})


async def test_a_foreign_certificate_changes_no_secret(api: MemoryApi, tmp_path: Path) -> None:
    made = bundle.make_authority("mine", NOW - DAY_S, 3650 * DAY_S)
    leaf = bundle.issue(made, ["gp.gp-system.svc"], NOW - DAY_S, 3650 * DAY_S)
    for name, text in (("tls.crt", leaf.chain), ("tls.key", leaf.key), ("ca.crt", made.chain)):
        (tmp_path / name).write_text(text)
    replica = Replica(api, tmp_path, Clock(NOW), TrustPlaces("gp-system", "", "gp-trust", "00-gp", "gp"))
    assert await replica.keeper.once()
    assert told(api) == {made.certificate.pem}
    assert not [call for call in api.calls if "secrets" in call]


async def test_failures_are_tried_again_after_pauses_that_grow_until_it_works(
    api: MemoryApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(api, tmp_path, Clock(NOW))
    pauses: list[str] = []
    answers = [False, False, False, True, False]

    class Counted(RetryPauses):
        def next_s(self, *, first_s: float | None = None) -> float:
            super().next_s(first_s=first_s)
            pauses.append(f"pause {len(pauses)}")
            return 0.0

        def reset(self) -> None:
            super().reset()
            pauses.append("reset")

    async def once() -> bool:
        if not answers:
            await asyncio.Event().wait()
        if answer := answers.pop(0):
            replica.keeper.touch()
        return answer

    monkeypatch.setattr(certificates, "RetryPauses", Counted)
    monkeypatch.setattr(replica.keeper, "once", once)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await replica.keeper.run()
    assert pauses == ["pause 0", "pause 1", "pause 2", "reset", "pause 4"]


def test_failures_are_counted_from_zero_on(api: MemoryApi, tmp_path: Path) -> None:
    """Prometheus sees no increase in a series that begins with its first failure."""
    registry = Replica(api, tmp_path, Clock(NOW)).metrics.registry
    for what in ("secret", "config_map", "mutating_webhooks", "validating_webhooks"):
        assert registry.get_sample_value("gracepoint_trust_failures_total", {"what": what}) == 0


async def test_what_others_take_away_from_the_webhooks_is_put_back_before_the_next_round(
    api: MemoryApi, tmp_path: Path
) -> None:
    """A rollback to a revision whose chart had no caBundle, while a later one had it."""
    replica = Replica(api, tmp_path, Clock(NOW), look_s=0.01)
    running = asyncio.create_task(replica.keeper.run())
    try:
        async with asyncio.timeout(5):
            while told(api) != {replica.certificates.ca} or "" in told(api):  # noqa: ASYNC110  an API server
                await asyncio.sleep(0)
            secrets = sum("secrets" in call for call in api.calls)
            for kind, name in ((objects.MUTATING_WEBHOOKS, "00-gp"), (objects.VALIDATING_WEBHOOKS, "gp")):
                bare = [{**webhook, "clientConfig": {}} for webhook in (await api.get(kind, None, name))["webhooks"]]
                await api.merge(kind, None, name, {"webhooks": bare})
            while told(api) != {replica.certificates.ca}:  # noqa: ASYNC110  an API server
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
    assert sum("secrets" in call for call in api.calls) == secrets, "only the webhooks were looked at"
