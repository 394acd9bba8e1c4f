"""The Secret of the snapshot servers: keys of capabilities that rotate unnoticed, and a certificate that pods trust."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from gracepoint.wire.snapshot_requests import Capability, NotGenuine, Right, read_capability
from gracepoint_operator.kube import objects
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust import bundle
from gracepoint_operator.trust.bundle import (
    CAPABILITY_S,
    KEY_KNOWN_S,
    KEY_LIFE_S,
    CapabilityKey,
    NotPem,
    capability_keys_text,
    read_capability_keys,
    renewed_capability_keys,
    signing_key,
)
from gracepoint_operator.trust.certificates import CapabilityKeys, Certificates, TrustKeeper, TrustPlaces
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock

DAY_S = 86400.0
NOW = 1_800_000_000.0
HOST = "gp-snapshots.gp-system.svc"
CAPABILITY = Capability(
    namespace="team-a", workload="uid", attempt=1, rights=frozenset({Right.READ}), until=int(NOW) + 60, max_bytes=1
)


@pytest.fixture
def api() -> MemoryApi:
    """What the chart installs."""
    made = MemoryApi(Clock(NOW))
    for name in ("gp-certificates", "gp-snapshots"):
        made.add(objects.SECRETS, {"metadata": {"namespace": "gp-system", "name": name}})
    return made


class Replica:
    def __init__(self, api: MemoryApi, folder: Path, clock: Clock, *, certificate: bool = True) -> None:
        places = TrustPlaces(
            "gp-system",
            "gp-certificates" if certificate else "",
            host="gp.gp-system.svc",
            snapshots="gp-snapshots",
            snapshots_host=HOST,
            snapshots_certificate=certificate,
        )
        self.certificates = Certificates(folder, required=False, overlap_s=DAY_S, clock=clock)
        self.keys = CapabilityKeys()
        self.metrics = Metrics()
        self.keeper = TrustKeeper(api, self.certificates, places, self.metrics, clock, capability_keys=self.keys)


def secret(api: MemoryApi) -> dict[str, str]:
    body = next(body for body in api.of(objects.SECRETS) if body["metadata"]["name"] == "gp-snapshots")
    return {name: base64.b64decode(value).decode() for name, value in body.get("data", {}).items()}


async def test_two_replicas_make_one_key_and_one_certificate_that_the_trusted_authority_signed(
    api: MemoryApi, tmp_path: Path
) -> None:
    clock = Clock(NOW)
    first, second = (Replica(api, tmp_path, clock) for _ in range(2))
    assert await first.keeper.once()
    assert await second.keeper.once()
    found = secret(api)
    assert first.keys.keys == second.keys.keys == read_capability_keys(found["keys"])
    assert bundle.issuers(found["tls.crt"], bundle.read_certificates(first.certificates.ca))
    writes = [call for call in api.calls if call.startswith("PATCH")]
    assert await first.keeper.once()
    assert [call for call in api.calls if call.startswith("PATCH")] == writes, "nothing is due"


async def test_servers_know_each_capability_of_a_year_while_keys_and_authorities_rotate(
    api: MemoryApi, tmp_path: Path
) -> None:
    clock = Clock(NOW)
    replica = Replica(api, tmp_path, clock)
    known: dict[str, bytes] = {}  # what servers have read: it is ten minutes old
    ids, leaves = set[str](), set[str]()
    for _ in range(4 * 400):
        assert await replica.keeper.once()
        replica.certificates.advance()
        if not known:
            known = {key.id: key.key for key in replica.keys.keys}
        for later_s in (KEY_KNOWN_S - 1, 1):
            clock.move(later_s)
            text = replica.keys.write(CAPABILITY, clock())
            assert text is not None
            read_capability(text, known)
            known = {key.id: key.key for key in replica.keys.keys}
            read_capability(text, known)
        assert 1 <= len(known) <= 2
        ids |= known.keys()
        found = secret(api)
        leaves.add(found["tls.crt"])
        assert bundle.issuers(found["tls.crt"], bundle.read_certificates(replica.certificates.ca))
        assert bundle.read_certificates(found["tls.crt"])[0].ends_at > clock()
        clock.move(DAY_S / 4 - KEY_KNOWN_S)
    assert len(ids) == 1 + 400 * DAY_S // KEY_LIFE_S
    assert len(leaves) >= 5


def test_a_key_goes_only_when_no_capability_is_valid_any_more_that_was_made_with_it() -> None:
    keys = renewed_capability_keys((), NOW)
    keys = renewed_capability_keys(keys, NOW + KEY_LIFE_S)
    old = keys[1]
    made_last = NOW + KEY_LIFE_S + KEY_KNOWN_S - 1
    assert signing_key(keys, made_last) == old
    assert old in renewed_capability_keys(keys, made_last + CAPABILITY_S)
    assert renewed_capability_keys(keys, made_last + CAPABILITY_S + 2) == keys[:1]


async def test_others_certificate_is_left_alone(api: MemoryApi, tmp_path: Path) -> None:
    replica = Replica(api, tmp_path, Clock(NOW), certificate=False)
    assert await replica.keeper.once()
    assert secret(api).keys() == {"keys"}


async def test_a_certificate_that_others_damaged_is_made_again_and_keys_that_cannot_be_read_are_named(
    api: MemoryApi, tmp_path: Path
) -> None:
    replica = Replica(api, tmp_path, Clock(NOW))
    assert await replica.keeper.once()
    path = objects.SECRETS.path("gp-system", "gp-snapshots")
    keys = replica.keys.keys
    api.objects[path]["data"]["tls.key"] = base64.b64encode(b"nonsense").decode()
    assert await replica.keeper.once()
    assert "PRIVATE KEY" in secret(api)["tls.key"]
    api.objects[path]["data"]["keys"] = base64.b64encode(b"short c2hvcnQ=").decode()
    assert not await replica.keeper.once()
    assert replica.keys.keys == keys, "what was known stays in force"
    labels = {"what": "snapshots"}
    assert replica.metrics.registry.get_sample_value("gracepoint_trust_failures_total", labels) == 1
    del api.objects[path]["data"]["keys"]
    assert await replica.keeper.once()
    assert replica.keys.keys != keys


def test_an_error_quotes_no_key() -> None:
    key = base64.b64encode(bytes(range(31))).decode()
    with pytest.raises(NotPem) as error:
        read_capability_keys(f"id {key}")
    assert key not in str(error.value)
    assert key not in repr(CapabilityKey("id", bytes(range(31))))


def test_another_key_with_the_same_name_makes_no_capability() -> None:
    mine = CapabilityKeys()
    assert mine.write(CAPABILITY, NOW) is None, "no key is known yet"
    mine.keys = renewed_capability_keys((), NOW)
    text = mine.write(CAPABILITY, NOW)
    assert text is not None
    with pytest.raises(NotGenuine):
        read_capability(text, {mine.keys[0].id: bytes(32)})
    assert read_capability_keys(capability_keys_text(mine.keys)) == mine.keys
