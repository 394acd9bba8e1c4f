"""The example's modules lie beside its script and are imported by their bare names, as the script does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "transformer"))
