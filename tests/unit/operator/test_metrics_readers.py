"""Who may read the metrics, while strangers try and while the API server is away."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint_operator.health import Readers
from gracepoint_operator.kube import client
from gracepoint_operator.kube.client import JsonObject
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock

GOOD, OTHER = "Bearer good", "Bearer other"
MONITORING = "system:serviceaccount:monitoring:prometheus"


class ReviewingApi(MemoryApi):
    """Knows two users, of whom one may read the metrics.

    Attributes:
        at_once: The largest number of reviews at a time.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        for token, user in (("good", MONITORING), ("other", "somebody")):
            self.tokens[token] = {"authenticated": True, "user": {"username": user, "groups": ["g"]}}
        self.allowed = {MONITORING}
        self.at_once = 0
        self._now = 0

    async def review_token(self, token: str, audience: str | None = None) -> JsonObject:
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        await asyncio.sleep(0)
        try:
            return await super().review_token(token, audience)
        finally:
            self._now -= 1

    async def review_access(self, user: JsonObject, path: str) -> bool:
        assert path == "/metrics"
        return user["username"] in self.allowed


@pytest.fixture
def api(clock: Clock) -> ReviewingApi:
    return ReviewingApi(clock)


@pytest.fixture
def readers(api: ReviewingApi, clock: Clock) -> Readers:
    return Readers(api, clock)


async def status(readers: Readers, authorization: str) -> int:
    refused = await readers.why_not(authorization)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (GOOD, 200),
        (OTHER, 403),
        ("Bearer unknown", 401),
        ("", 401),
        ("Basic Z29vZA==", 401),
        ("Bearer ", 401),
        ("Bearer " + "x" * 100_000, 401),
    ],
)
async def test_only_a_token_whose_user_may_get_the_path_is_let_in(
    readers: Readers, authorization: str, expected: int
) -> None:
    assert await status(readers, authorization) == expected
    refused = await readers.why_not(authorization)
    if expected == 401:
        assert refused is not None
        assert refused.headers["WWW-Authenticate"] == "Bearer"


async def test_scrapes_cost_the_api_server_one_review_a_minute(
    readers: Readers, api: ReviewingApi, clock: Clock
) -> None:
    for _ in range(60):
        assert await status(readers, GOOD) == 200
        clock.move(1)
    assert len(api.calls) == 1
    clock.move(1)
    assert await status(readers, GOOD) == 200
    assert len(api.calls) == 2


async def test_a_right_that_is_taken_back_ends_within_a_minute(
    readers: Readers, api: ReviewingApi, clock: Clock
) -> None:
    assert await status(readers, GOOD) == 200
    api.allowed.clear()
    clock.move(61)
    assert await status(readers, GOOD) == 403
    assert await status(readers, GOOD) == 403
    api.allowed.add(MONITORING)
    clock.move(11)
    assert await status(readers, GOOD) == 200


async def test_a_flood_of_made_up_tokens_takes_two_reviews_at_a_time_and_no_readers_place(
    readers: Readers, api: ReviewingApi
) -> None:
    assert await status(readers, GOOD) == 200
    flood = [status(readers, f"Bearer {number}") for number in range(3000)]
    assert set(await asyncio.gather(*flood)) == {401}
    assert api.at_once == 2
    asked = len(api.calls)
    assert await status(readers, GOOD) == 200
    assert len(api.calls) == asked, "it is still known"
    for number in (0, 1999):
        assert await status(readers, f"Bearer {number}") == 401
    assert len(api.calls) == asked + 2, "no more than a thousand that are refused are kept"
    assert await status(readers, "Bearer 2999") == 401
    assert len(api.calls) == asked + 2


async def test_a_refused_token_takes_no_place_of_those_that_may_read(readers: Readers, api: ReviewingApi) -> None:
    several = [f"{GOOD}{number}" for number in range(1000)]
    for authorization in several:
        api.tokens[authorization.removeprefix("Bearer ")] = api.tokens["good"]
        assert await status(readers, authorization) == 200
    for number in range(10):
        assert await status(readers, f"Bearer {number}") == 401
    asked = len(api.calls)
    for authorization in several:
        assert await status(readers, authorization) == 200
    assert len(api.calls) == asked


async def test_metrics_can_be_read_while_the_api_server_is_away(
    readers: Readers, api: ReviewingApi, clock: Clock
) -> None:
    assert await status(readers, GOOD) == 200
    api.failing = [client.Unavailable("down") for _ in range(100)]
    for _ in range(50):
        clock.move(61)
        assert await status(readers, GOOD) == 200
    assert await status(readers, "Bearer new") == 503
    clock.move(3600)
    assert await status(readers, GOOD) == 503
