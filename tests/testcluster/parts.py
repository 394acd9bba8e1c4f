"""The programs that a cluster and the object stores of the tests are made of, built from their Go modules.

Each part is a Go module under ``parts/`` whose go.mod says the version and whose go.sum holds it to the
very bytes; they are apart because their dependencies clash. A part is built once for each state of these
files and kept in the cache. Some parts have other versions beside the usual one, in folders of their own
(``parts/kubernetes-1.37``): ``TESTCLUSTER_KUBERNETES=1.37`` chooses that one for everything.

Processes: one ``go build`` at a time, killed when the caller is interrupted. Threads: one that says every
ten seconds how long the build has taken; it ends with the build.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster import cache
from tests.testcluster.api import ClusterError
from tests.testcluster.shell import run, say

MODULES = Path(__file__).parent / "parts"
_KUBERNETES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
_KUBERNETES_STAMPS = ("k8s.io/component-base/version.gitVersion", "k8s.io/client-go/pkg/version.gitVersion")


@dataclass(frozen=True)
class Part:
    """A Go module under ``parts/`` and the programs built from it.

    Attributes:
        name: The folder under ``parts/``, without the version that may follow it.
        programs: Name of each program and its package.
        module: The module whose version is the part's; none for our own code.
        stamps: Variables (packages' paths) that hold the version, for programs that tell it.
        tags: Build tags.
        other: Which version it is, where it is always another one than the usual: the end of its folder's name.
    """

    name: str
    programs: Mapping[str, str]
    module: str = ""
    stamps: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    other: str = ""

    @property
    def source(self) -> Path:
        """The folder with go.mod.

        Raises:
            ClusterError: The environment chooses a version that is not there.
        """
        chosen = self.other or os.environ.get(f"TESTCLUSTER_{self.name.upper()}", "")
        folder = MODULES / (f"{self.name}-{chosen}" if chosen else self.name)
        if not folder.exists():
            known = sorted(path.name for path in MODULES.glob(f"{self.name}-*"))
            raise ClusterError(f"TESTCLUSTER_{self.name.upper()}={chosen}: found {known}, expected {folder.name}")
        return folder

    @property
    def version(self) -> str:
        """The version that go.mod requires, with its v."""
        for line in (self.source / "go.mod").read_text().splitlines():
            words = line.removeprefix("require").split()
            if words[:1] == [self.module] and len(words) > 1 and words[1].startswith("v"):
                return words[1]
        return "v0"

    @property
    def flags(self) -> list[str]:
        """Flags of ``go build``: no paths of this machine and no symbols in the result."""
        stamped = " ".join(f"-X {variable}={self.version}" for variable in self.stamps)
        tags = ["-tags", ",".join(self.tags)] if self.tags else []
        return ["-trimpath", "-buildvcs=false", *tags, "-ldflags", f"-s -w {stamped}".strip()]

    @property
    def built(self) -> Path:
        """The folder of the programs, once they are built."""
        inputs = [path.name + "\n" + path.read_text() for path in sorted(self.source.iterdir()) if path.is_file()]
        key = cache.digest(*inputs, *self.flags, json.dumps(dict(self.programs)), platform.machine())
        return cache.folder("parts") / f"{self.name}-{self.version}-{key}"


PARTS = (
    Part(
        "kubernetes",
        {name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES},
        "k8s.io/kubernetes",
        _KUBERNETES_STAMPS,
    ),
    Part("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, "go.etcd.io/etcd/server/v3"),
    Part("jobset", {"jobset": "sigs.k8s.io/jobset"}, "sigs.k8s.io/jobset"),
    Part("coredns", {"coredns": "github.com/coredns/coredns"}, "github.com/coredns/coredns"),
    Part(
        "helm",
        {"helm": "helm.sh/helm/v3/cmd/helm"},
        "helm.sh/helm/v3",
        ("helm.sh/helm/v3/internal/version.version",),
    ),
    Part("pause", {"pause": "."}),
    Part(
        "fake-gcs-server",
        {"fake-gcs-server": "github.com/fsouza/fake-gcs-server"},
        "github.com/fsouza/fake-gcs-server",
    ),
    Part("versitygw", {"versitygw": "github.com/versity/versitygw/cmd/versitygw"}, "github.com/versity/versitygw"),
)
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.30", "1.37"
"""For the matrix of versions, and for what is new there."""
NEWEST_JOBSET = "0.12"
"""Of which the agent for restarts in place is a part of its own."""
OBJECT_STORES = ("fake-gcs-server", "versitygw")
"""The parts that need nothing but Go, for tests without a cluster."""
OPTIONAL_PARTS = (
    Part(
        "trainer",
        {"trainer": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"},
        "github.com/kubeflow/trainer/v2",
    ),
    *(
        Part(
            "kubernetes",
            {name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES},
            "k8s.io/kubernetes",
            _KUBERNETES_STAMPS,
            other=version,
        )
        for version in (OLDEST_KUBERNETES, NEWEST_KUBERNETES)
    ),
    Part(
        "jobset",
        {"in-place-restart-agent": "sigs.k8s.io/jobset/cmd/in-place-restart-agent"},
        "sigs.k8s.io/jobset",
        other=NEWEST_JOBSET,
    ),
    Part("kueue", {"kueue": "sigs.k8s.io/kueue/cmd/kueue"}, "sigs.k8s.io/kueue"),
    Part("karpenter", {"kwok": "sigs.k8s.io/karpenter/kwok"}, "sigs.k8s.io/karpenter"),
    Part(
        "prometheus",
        {name: f"github.com/prometheus/prometheus/cmd/{name}" for name in ("prometheus", "promtool")},
        "github.com/prometheus/prometheus",
        tags=("remove_all_sd",),
    ),
    Part(
        "gcsfuse", {"gcsfuse": "github.com/googlecloudplatform/gcsfuse/v3"}, "github.com/googlecloudplatform/gcsfuse/v3"
    ),
)
"""What few commands need: ``make test-workloads`` (controllers), ``test-alerts``, ``test-mounts``, and the replay."""
CONTROLLERS = ("trainer", "kueue", "karpenter")
_BY_NAME = {part.name + (f"-{part.other}" if part.other else ""): part for part in (*PARTS, *OPTIONAL_PARTS)}
NAMES = tuple(_BY_NAME)
"""Of all parts."""
_ALWAYS = tuple(part.name for part in PARTS)


def part(name: str) -> Part:
    """The part of that name."""
    return _BY_NAME[name]


def program(name: str, other: str = "") -> Path:
    """Path of a built program, in another version than the usual one if ``other`` names it.

    Raises:
        ClusterError: It is not built.
    """
    for key, candidate in _BY_NAME.items():
        if name in candidate.programs and candidate.other == other:
            path = candidate.built / name
            if path.exists():
                return path
            raise ClusterError(f"{name} is not built; run: python -m tests.testcluster build --parts {key}")
    raise KeyError(name)


def missing(names: tuple[str, ...] = _ALWAYS) -> list[Part]:
    """The parts that have to be built still."""
    return [_BY_NAME[name] for name in names if not _BY_NAME[name].built.exists()]


def build(names: tuple[str, ...] = _ALWAYS) -> None:
    """Build the parts that are missing, telling how it goes.

    Raises:
        ClusterError: There is no Go, or a build failed.
    """
    if not missing(names):
        return
    if shutil.which("go") is None:
        raise ClusterError(f"Go is needed to build {', '.join(names)}: https://go.dev/doc/install")
    with cache.lock("parts"):
        waiting = missing(names)
        total = sum(len(each.programs) for each in waiting)
        done = 0
        for each in waiting:
            done = _build(each, done, total)


def manifests(name: str, folder: str) -> Path:
    """A folder of a part's sources, of the version that is built; a copy beside its programs that may be changed."""

    def copy(target: Path) -> None:
        shutil.copytree(module_folder(name) / folder, target, copy_function=shutil.copyfile)
        run(["chmod", "--recursive", "u+w", target])

    return cache.once(part(name).built / folder, copy)


def module_folder(name: str) -> Path:
    """Where the sources of a part's module lie."""
    argv = ["go", "mod", "download", "-json", f"{part(name).module}@{part(name).version}"]
    found = json.loads(run(argv, cwd=part(name).source, timeout_s=600, env=_GO_ENV).stdout)
    return Path(found["Dir"])


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what is under way: at once, every ten seconds, and at the end how long it took."""
    begin = time.monotonic()
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(10):
            say(f"  ... {what}: {time.monotonic() - begin:.0f} s")

    say(what)
    thread = threading.Thread(target=tell, name="testcluster-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)
    say(f"  done: {what}: {time.monotonic() - begin:.0f} s")


# A part may need a newer Go than the one that is installed, which the module proxy also serves.
_GO_ENV = {"CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "auto"}


def _build(each: Part, done: int, total: int) -> int:
    def build_into(folder: Path) -> None:
        folder.mkdir()
        for number, (name, package) in enumerate(each.programs.items(), done + 1):
            with progress(f"building {name} {each.version} ({number} of {total}, once for each version)"):
                argv = ["go", "build", *each.flags, "-o", str(folder / name), package]
                run(argv, cwd=each.source, timeout_s=3600, env=_GO_ENV)

    cache.once(each.built, build_into)
    return done + len(each.programs)
