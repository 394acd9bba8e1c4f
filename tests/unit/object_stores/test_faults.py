"""Rules choose requests; kinds name what requests do."""

from __future__ import annotations

import pytest

from tests.object_stores.faults import Asked, Fault, How, Rule, is_conditional, kind_of

REFUSED = Fault(How.REFUSE)


def asked(number: int = 1, kind: str = "write", target: str = "/x") -> Asked:
    return Asked(number, "PUT", target, kind, conditional=False)


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=a%2Fb&ifGenerationMatch=0", "write"),
        ("POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a", "begin"),
        ("PUT", "/upload/storage/v1/b/bucket/o?uploadType=resumable&upload_id=1", "part"),
        ("GET", "/storage/v1/b/bucket/o/a%2Fb?alt=media", "read"),
        ("GET", "/download/storage/v1/b/bucket/o/a?alt=media", "read"),
        ("GET", "/storage/v1/b/bucket/o/a", "stat"),
        ("GET", "/storage/v1/b/bucket/o?prefix=a", "list"),
        ("GET", "/storage/v1/b/bucket/o/?prefix=a", "list"),
        ("DELETE", "/storage/v1/b/bucket/o/a", "delete"),
        ("GET", "/storage/v1/b/bucket", "bucket"),
        ("POST", "/storage/v1/b/bucket/o/a/rewriteTo/b/bucket/o/b", "other"),
        ("POST", "/batch/storage/v1", "other"),
        ("PUT", "/bucket/a/b", "write"),
        ("PUT", "/bucket/a?partNumber=1&uploadId=2", "part"),
        ("POST", "/bucket/a?uploads", "begin"),
        ("POST", "/bucket/a?uploadId=2", "end"),
        ("DELETE", "/bucket/a?uploadId=2", "delete"),
        ("GET", "/bucket/a", "read"),
        ("HEAD", "/bucket/a", "stat"),
        ("GET", "/bucket?list-type=2&prefix=a", "list"),
        ("GET", "/bucket/?list-type=2", "list"),
        ("GET", "/bucket?uploads", "list"),
        ("POST", "/bucket?delete", "delete"),
        ("DELETE", "/bucket/a", "delete"),
        ("HEAD", "/bucket", "bucket"),
    ],
)
def test_a_request_has_a_kind(method: str, target: str, kind: str) -> None:
    assert kind_of(method, target) == kind


@pytest.mark.parametrize(
    ("target", "headers", "conditional"),
    [
        ("/upload/storage/v1/b/bucket/o?ifGenerationMatch=0", [], True),
        ("/bucket/a", ["Host", "If-None-Match"], True),
        ("/bucket/a", ["Host", "Content-Length"], False),
    ],
)
def test_conditions_are_seen(target: str, headers: list[str], conditional: bool) -> None:
    assert is_conditional(target, headers) is conditional


def test_a_rule_is_for_requests_that_fit_all_that_it_says() -> None:
    rule = Rule(REFUSED, kinds=("write", "part"), path=r"/x\d$", first=3)
    assert rule.fits(asked(3, "part", "/x1"))
    assert not rule.fits(asked(2, "part", "/x1"))
    assert not rule.fits(asked(3, "read", "/x1"))
    assert not rule.fits(asked(3, "part", "/x"))


def test_a_share_is_drawn_the_same_way_again() -> None:
    def drawn(seed: int) -> list[int]:
        rule = Rule(REFUSED, share=0.02, seed=seed)
        return [number for number in range(10_000) if rule.fits(asked(number))]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 150 < len(drawn(1)) < 250
