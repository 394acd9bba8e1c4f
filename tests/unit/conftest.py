"""What holds for all unit tests: the profiles of Hypothesis."""

from __future__ import annotations

from tests import hypothesis_profiles

hypothesis_profiles.register()
