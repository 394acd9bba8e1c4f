"""Only the packages that deal with the API of a workload name it: others come beside JobSet."""

from __future__ import annotations

import re
from pathlib import Path

import gracepoint_operator

#: The packages that may name JobSet: what it is, what refers to it in the API, what it is given, what is seen on it.
PACKAGES = {"workloads", "resources", "webhooks", "signals"}
_NAME = re.compile(r"job[ _-]?set", re.IGNORECASE)


def test_only_these_packages_name_jobset() -> None:
    root = Path(gracepoint_operator.__file__).parent
    modules = [
        path for path in sorted(root.rglob("*.py")) if path.relative_to(root).with_suffix("").parts[0] not in PACKAGES
    ]
    assert len(modules) > 30, "the modules of the other packages were found"
    named = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in modules
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if _NAME.search(line)
    ]
    assert not named, "expected 'workload', or a text that is made of its kind"
