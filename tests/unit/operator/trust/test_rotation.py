"""Renewal of the operator's own authority and certificate, on a clock of the test."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

import pytest

from gracepoint_operator.trust import bundle
from gracepoint_operator.trust.bundle import NotPem, OwnCertificates, Pair, renewed
from gracepoint_operator.trust.certificates import load_pair, new_context

DAY_S = 86400.0
HOST = "gp.gp-system.svc"
NOW = 1_800_000_000.0


def step(state: OwnCertificates, now: float) -> OwnCertificates:
    return renewed(state, "gp-certificates", [HOST, f"{HOST}.cluster.local"], now)


def signers(state: OwnCertificates) -> list[int]:
    """Which of the authorities the certificate can be checked against."""
    assert state.leaf is not None
    found = bundle.issuers(state.leaf.chain, (item.certificate for item in state.authorities))
    return [place for place, item in enumerate(state.authorities) if item.certificate in found]


def test_the_first_certificate_is_one_that_tls_clients_accept() -> None:
    made = step(OwnCertificates(), time.time())
    assert made.leaf is not None
    server = new_context()
    load_pair(server, made.leaf)
    client = ssl.create_default_context(cadata=made.bundle)
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's own default from 3.13 on
    for host in (HOST, f"{HOST}.cluster.local"):
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            client.wrap_bio(to_client, to_server, server_hostname=host),
            server.wrap_bio(to_server, to_client, server_side=True),
        ]
        shake_hands(ends)


def shake_hands(ends: list[ssl.SSLObject]) -> None:
    for _ in range(5):
        for end in tuple(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
    assert ends == []


def test_nothing_changes_while_nothing_is_due() -> None:
    made = step(OwnCertificates(), NOW)
    for days in (0, 1, 10, 59):
        assert step(made, NOW + days * DAY_S) == made


def test_the_certificate_is_renewed_under_the_same_authority() -> None:
    made = step(OwnCertificates(), NOW)
    later = step(made, NOW + 61 * DAY_S)
    assert later.authorities == made.authorities
    assert later.leaf != made.leaf
    assert later.leaf is not None
    assert later.leaf.certificate.ends_at == pytest.approx(NOW + 151 * DAY_S)


def test_a_new_authority_is_trusted_before_its_certificate_is_served() -> None:
    """Three years, looked at twice a day: whoever trusted what was said half a day before can check what is served."""
    state, now = step(OwnCertificates(), NOW), NOW
    bundles = {item.certificate.fingerprint for item in state.authorities}
    authorities = set(bundles)
    for _ in range(2 * 3 * 365):
        now += DAY_S / 2
        state = step(state, now)
        assert state.leaf is not None
        assert state.leaf.certificate.ends_at > now
        signer = bundle.issuers(state.leaf.chain, (item.certificate for item in state.authorities))
        assert {item.fingerprint for item in signer} <= bundles, "half a day ago nobody trusted it"
        bundles = {item.certificate.fingerprint for item in state.authorities}
        authorities |= bundles
    assert len(authorities) == 2
    assert len(state.authorities) == 1, "the old authority is dropped"


def until(state: OwnCertificates, at: float, done: Callable[[OwnCertificates], bool]) -> tuple[OwnCertificates, float]:
    """Looks twice a day until the state is as asked. Returns it, and when that was."""
    while not done(state):
        at += DAY_S / 2
        assert at < NOW + 4 * 365 * DAY_S
        state = step(state, at)
    return state, at


def test_the_old_authority_signs_until_its_last_ninety_days_and_goes_an_overlap_later() -> None:
    made = step(OwnCertificates(), NOW)
    state, added_at = until(made, NOW, lambda state: len(state.authorities) == 2)
    assert added_at - NOW == pytest.approx(2 * 365 * DAY_S, abs=DAY_S)
    assert signers(state) == [0]
    state, changed_at = until(state, added_at, lambda state: signers(state) == [1])
    assert changed_at - NOW == pytest.approx((3 * 365 - 90) * DAY_S, abs=DAY_S)
    assert len(state.authorities) == 2
    assert len(step(state, changed_at + DAY_S / 2).authorities) == 2
    assert len(step(state, changed_at + DAY_S).authorities) == 1


def test_a_pod_that_knows_what_its_jobset_began_with_can_check_what_is_served_for_nine_months() -> None:
    """Pods that are created while no replica answers know no more than that."""
    state, at = step(OwnCertificates(), NOW), NOW
    began = {at: frozenset(item.certificate.fingerprint for item in state.authorities)}
    for _ in range(3 * 365):
        at += DAY_S
        state = step(state, at)
        began[at] = frozenset(item.certificate.fingerprint for item in state.authorities)
        assert state.leaf is not None
        signer = bundle.issuers(state.leaf.chain, (item.certificate for item in state.authorities))
        served = {item.fingerprint for item in signer}
        assert all(known & served for when, known in began.items() if at - when < 270 * DAY_S)


def test_an_authority_that_was_added_late_signs_an_overlap_later() -> None:
    """The operator was off while the old one came to its last 90 days."""
    made = step(OwnCertificates(), NOW)
    back_at = NOW + (3 * 365 - 60) * DAY_S
    live = OwnCertificates(made.authorities, bundle.issue(pair(made), [HOST], back_at - DAY_S, 60 * DAY_S))
    state = step(live, back_at)
    assert (len(state.authorities), signers(state)) == (2, [0])
    assert signers(step(state, back_at + DAY_S / 2)) == [0]
    assert signers(step(state, back_at + DAY_S)) == [1]


def pair(state: OwnCertificates) -> Pair:
    (authority,) = state.authorities
    assert authority.key is not None
    return Pair(authority.certificate.pem, authority.key)


def test_a_secret_that_lost_everything_gets_back_what_was_known_and_keeps_what_it_has_besides() -> None:
    known, other = step(OwnCertificates(), NOW), step(OwnCertificates(), NOW + 1)
    assert bundle.continued(known, OwnCertificates()) == known
    both = bundle.continued(known, other)
    assert both == OwnCertificates((*known.authorities, *other.authorities), known.leaf)
    assert step(both, NOW + DAY_S) == both
    assert OwnCertificates.of(both.data()) == both


def test_a_secret_that_went_on_is_taken_as_it_is() -> None:
    made = step(OwnCertificates(), NOW)
    two, at = until(made, NOW, lambda state: len(state.authorities) == 2)
    last, _ = until(two, at, lambda state: len(state.authorities) == 1)
    assert bundle.continued(made, two) == two
    assert bundle.continued(two, last) == last
    assert bundle.continued(OwnCertificates(), made) == made


def test_an_operator_that_was_off_for_years_makes_everything_again() -> None:
    state = step(OwnCertificates(), NOW)
    later = step(state, NOW + 4 * 365 * DAY_S)
    assert signers(later) == [0]
    assert not set(later.authorities) & set(state.authorities)


def test_a_certificate_of_others_is_followed_after_a_month() -> None:
    authority = bundle.make_authority("helm", NOW - DAY_S, 3650 * DAY_S)
    leaf = bundle.issue(authority, [HOST], NOW - DAY_S, 3650 * DAY_S)
    state = step(bundle.adopted(leaf, authority.chain), NOW)
    assert (len(state.authorities), signers(state), state.leaf) == (2, [0], leaf)
    assert state.authorities[1].key is not None
    assert signers(step(state, NOW + 29 * DAY_S)) == [0]
    assert signers(step(state, NOW + 31 * DAY_S)) == [1]


def test_the_secret_holds_the_state() -> None:
    authority = bundle.make_authority("helm", NOW - DAY_S, 3650 * DAY_S)
    leaf = bundle.issue(authority, [HOST], NOW - DAY_S, 3650 * DAY_S)
    for state in (step(OwnCertificates(), NOW), step(bundle.adopted(leaf, authority.chain), NOW)):
        assert OwnCertificates.of(state.data()) == state
        assert "PRIVATE" not in repr(state)
    assert OwnCertificates.of({}) == OwnCertificates()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param({"tls.crt": ""}, "ca.crt", id="a key is missing"),
        pytest.param(dict.fromkeys(("ca.crt", "ca.key", "tls.crt", "tls.key"), "!"), "base64", id="no base64"),
        pytest.param(dict.fromkeys(("ca.crt", "ca.key", "tls.crt", "tls.key"), ""), "PEM", id="empty"),
    ],
)
def test_a_secret_that_cannot_be_read_says_why(data: dict[str, str], says: str) -> None:
    with pytest.raises(NotPem, match=says):
        OwnCertificates.of(data)


def test_a_key_is_never_shown() -> None:
    pair = bundle.make_authority("x", NOW, DAY_S)
    assert "PRIVATE" in pair.key
    assert "PRIVATE" not in repr(Pair(pair.chain, pair.key))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("-----BEGIN PRIVATE KEY-----\nsecret\n", "found PRIVATE KEY", id="a key"),
        pytest.param("secret", "found 6 characters without PEM", id="no PEM"),
    ],
)
def test_an_error_about_a_certificate_does_not_quote_it(text: str, says: str) -> None:
    with pytest.raises(NotPem, match=says) as raised:
        bundle.read_certificates(text)
    assert "secret" not in str(raised.value)
