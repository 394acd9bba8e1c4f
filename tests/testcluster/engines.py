"""Container engines of this machine, Docker and Podman: which one works, and the commands that both have.

Processes: docker or podman, to their ends. Threads: none.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster.api import ClusterError
from tests.testcluster.shell import run

_NAMES = ("docker", "podman")
_ANSWER_S = 20
_BUILD_S = 1800
#: An attestation beside the image would make an index of it, which containerd in a node cannot import from an archive.
_PLAIN_IMAGES = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}


@dataclass(frozen=True)
class Engine:
    """An engine that answered.

    Attributes:
        name: ``docker`` or ``podman``, which is also its program.
    """

    name: str

    def ask(self, *args: str | Path, timeout_s: float = 60, env: Mapping[str, str] | None = None) -> str:
        """Runs one of its commands; returns what it says. Raises ClusterError if it fails."""
        return run([self.name, *args], timeout_s=timeout_s, env=env).stdout.strip()

    def build(self, tag: str, dockerfile: Path, context: Path, build_args: Mapping[str, str]) -> str:
        """Builds an image; returns its id."""
        options = [word for name, value in build_args.items() for word in ("--build-arg", f"{name}={value}")]
        self.ask("build", "--tag", tag, "--file", dockerfile, *options, context, timeout_s=_BUILD_S, env=_PLAIN_IMAGES)
        return self.ask("image", "inspect", "--format", "{{.Id}}", tag).removeprefix("sha256:")

    def save(self, tag: str, archive: Path) -> None:
        """Writes an image into an archive in Docker's form, which kind loads."""
        form = ("--format", "docker-archive") if self.name == "podman" else ()
        partial = archive.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        self.ask("save", *form, "--output", partial, tag, timeout_s=_BUILD_S)
        partial.rename(archive)

    def containers(self, *labels: str, stopped: bool = False) -> tuple[str, ...]:
        """Names of the containers with all these labels that run; with ``stopped``, also of those that do not."""
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        every = ("--all",) if stopped else ()
        return tuple(sorted(self.ask("ps", *every, *filters, "--format", "{{.Names}}").split()))


def find() -> tuple[Engine | None, str]:
    """The first engine that works, and why the others do not, for a message."""
    reasons = []
    for name in _NAMES:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            run([name, "info"], timeout_s=_ANSWER_S)
        except ClusterError as error:
            reasons.append(f"`{name} info` fails: {str(error).strip().splitlines()[-1]}")
            continue
        return Engine(name), "; ".join(reasons)
    return None, "; ".join(reasons)
