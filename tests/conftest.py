"""What holds for all tests: JAX in the test process, and a test that hangs prints stacks (``tests.hangs``).

JAX in the test process has four CPU devices, whichever tests run in it: meshes of 2 x 2 need them. Where nothing may be
left out (CI=true), a skip is a failure. Hypothesis does not time its examples. What is there before the first test is
no garbage, so Python does not search it for garbage again and again.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import hypothesis
import pytest

from tests import accelerators
from tests.hangs import pytest_timeout_set_timer
from tests.jax_environment import set_environment
from tests.object_stores.fixtures import (
    bucket,
    far,
    gcs,
    gs_bucket,
    moto,
    moto_bucket,
    object_server,
    s3,
    s3_bucket,
    store_proxy,
)

__all__ = [
    "bucket",
    "far",
    "gcs",
    "gs_bucket",
    "moto",
    "moto_bucket",
    "object_server",
    "pytest_timeout_set_timer",
    "s3",
    "s3_bucket",
    "store_proxy",
]

set_environment()

# How long an example takes says nothing on a busy machine. A test that hangs ends by its own limit.
hypothesis.settings.register_profile("without a clock", deadline=None)
hypothesis.settings.load_profile("without a clock")

CI = os.environ.get("CI", "").lower() in {"1", "true"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage while tests are collected, and leaves modules and tests out of later searches."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure in CI, with the reason that it gave, unless it is that there is no GPU."""
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail") and accelerators.NO_GPU not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure where CI=true: {report.longrepr}"
    return report
