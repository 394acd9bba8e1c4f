"""Clusters by kind: who is picked, and what kind and the engine are told.

Programs that note their calls take the places of kind and of the engine, as neither is on every machine.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.testcluster import cache, cli, parts, providers
from tests.testcluster.api import ClusterError
from tests.testcluster.kind import JOBSET_VARIABLE, NODE_IMAGE_VARIABLE, KindCluster

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
#: Answers with what the file of its name and first words says, makes the file after --output, and fails if told to.
PROGRAM = """#!/bin/sh
printf '%s|%s|%s\\n' {name} "$KIND_EXPERIMENTAL_PROVIDER" "$*" >> {folder}/calls
while read -r failing; do
  case "{name} $*" in $failing*) echo "found $failing, which fails here" >&2; exit 1;; esac
done < {folder}/fails
case "{name} $*" in
*"--all"*) while read -r line; do echo "$line"; done < {folder}/all;;
{name}" ps "*) while read -r line; do echo "$line"; done < {folder}/running;;
*"image inspect"*) while read -r line; do echo "$line"; done < {folder}/image;;
*"conditions"*) printf True;;
esac
output=
for word in "$@"; do if [ "$output" = next ]; then : > "$word"; fi; output=; [ "$word" = --output ] && output=next; done
exit 0
"""


class Tools:
    """Programs that note how they are called, in place of this machine's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("calls", "fails", "running", "all"):
            self.say(name)
        self.say("image", "sha256:one")

    def have(self, *names: str) -> None:
        for name in names:
            path = self.folder / "bin" / name
            path.write_text(PROGRAM.format(name=name, folder=self.folder))
            path.chmod(0o755)

    def say(self, name: str, *lines: str) -> None:
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def calls(self, start: str = "") -> list[str]:
        """What was called since the last time, as ``program words``; only those that start so."""
        noted = [line.split("|", 2) for line in (self.folder / "calls").read_text().splitlines()]
        self.say("calls")
        return [call for name, _, words in noted if (call := f"{name} {words}").startswith(start)]

    def engines_named_to_kind(self) -> set[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return {line.split("|", 2)[1] for line in lines if line.startswith("kind|")}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    monkeypatch.setenv("TESTCLUSTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Tools(tmp_path)


@pytest.fixture
def cluster(tools: Tools) -> KindCluster:
    tools.have("docker", "kind", "kubectl", "helm")
    tools.say("running", "one-worker", "one-worker2")
    tools.say("all", "one-worker", "one-worker2")
    made = KindCluster.create("one")
    tools.calls()
    return made


TOOLS = ("kind", "kubectl", "helm")


@pytest.mark.parametrize(
    ("have", "fails", "provider", "words"),
    [
        pytest.param(["docker", "podman", *TOOLS], [], "kind", ["docker", "minutes"], id="docker"),
        pytest.param(["docker", "podman", *TOOLS], ["docker info"], "kind", ["podman"], id="only podman answers"),
        pytest.param(["docker", *TOOLS], ["docker info"], "local", ["`docker info` fails", "podman"], id="no daemon"),
        pytest.param(["docker", "kind", "kubectl"], [], "local", ["helm: not found", "20 minutes"], id="no helm"),
        pytest.param([], [], "local", ["docker is not installed", "podman is not installed"], id="nothing"),
    ],
)
def test_what_works_here_is_picked_and_said(
    tools: Tools, have: list[str], fails: list[str], provider: str, words: list[str]
) -> None:
    tools.have(*have)
    tools.say("fails", *fails)
    choice = providers.pick()
    assert choice.provider == provider
    assert [word for word in words if word not in choice.text] == []


def test_kind_that_is_wanted_and_missing_is_an_error(tools: Tools) -> None:
    with pytest.raises(ClusterError, match="kind cannot run here: kind, kubectl, helm: not found"):
        providers.pick("kind")
    with pytest.raises(ClusterError, match="CLUSTER=minikube: expected kind or local"):
        providers.pick("minikube")


def test_the_local_cluster_is_picked_without_a_look_at_engines(tools: Tools) -> None:
    tools.have("docker", "kind", "kubectl", "helm")
    assert providers.pick("local").provider == "local"
    assert tools.calls() == []


def test_the_command_line_prints_the_provider_alone(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.have("podman", "kind", "kubectl", "helm")
    handler = signal.getsignal(signal.SIGTERM)
    assert cli.main(["pick"]) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    said = capsys.readouterr()
    assert said.out == "kind\n"
    assert "podman" in said.err


def test_a_cluster_has_a_shared_folder_and_jobset(tools: Tools) -> None:
    tools.have("podman", "kind", "kubectl", "helm")
    tools.say("running", "one-worker")
    cluster = KindCluster.create("one", nodes=3)
    assert tools.engines_named_to_kind() == {"podman"}
    calls = tools.calls()
    (created,) = [call for call in calls if call.startswith("kind create cluster")]
    words = dict(word.split("=", 1) for word in created.split() if "=" in word)
    assert words["--name"] == "gracepoint-one"
    assert words["--kubeconfig"] == str(cluster.kubeconfig)
    asked = json.loads(Path(words["--config"]).read_text())
    assert [node["role"] for node in asked["nodes"]] == ["control-plane", "worker", "worker", "worker"]
    shared = str(cluster.shared_dir)
    assert all(node["extraMounts"] == [{"hostPath": shared, "containerPath": shared}] for node in asked["nodes"])
    assert "restrict_oom_score_adj = true" in asked["containerdConfigPatches"][0]
    version = parts.part("jobset").version
    (applied,) = [call for call in calls if "kubectl" in call and "--kustomize=" in call]
    kustomization = kustomization_of(applied)
    assert kustomization["resources"][0].endswith(f"/{version}/manifests.yaml")
    assert "control-plane" in kustomization["patches"][0]["patch"]


def kustomization_of(applied: str) -> Any:
    folder = Path(applied.partition("--kustomize=")[2].split()[0])
    return json.loads((folder / "kustomization.yaml").read_text())


def test_a_mirrors_node_image_and_manifests_are_used(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools.have("docker", "kind", "kubectl", "helm")
    monkeypatch.setenv("TESTCLUSTER_NODE_IMAGE", "mirror.test/node:1")
    mirror = tmp_path / "mirror.yaml"
    mirror.write_text("kind: List")
    monkeypatch.setenv("TESTCLUSTER_JOBSET_MANIFEST", str(mirror))
    cluster = KindCluster.create("one", nodes=1)
    assert {node["image"] for node in cluster.configuration(1)["nodes"]} == {"mirror.test/node:1"}
    (applied,) = [call for call in tools.calls("kubectl") if "--kustomize=" in call]
    assert kustomization_of(applied)["resources"] == ["mirror.yaml"]


def test_variables_of_kind_choose_no_version_of_a_part() -> None:
    chosen = {f"TESTCLUSTER_{name.upper()}" for name in parts.NAMES}
    assert not {NODE_IMAGE_VARIABLE, JOBSET_VARIABLE} & chosen


def test_what_did_not_come_up_is_removed(tools: Tools) -> None:
    tools.have("docker", "kind", "kubectl", "helm")
    tools.say("fails", "kind create")
    with pytest.raises(ClusterError, match="which fails here"):
        KindCluster.create("one")
    assert tools.calls("kind delete cluster --name=gracepoint-one")
    assert not (cache.folder("kind") / "one").exists()


def test_an_image_is_loaded_into_the_nodes_that_lack_it(cluster: KindCluster, tools: Tools) -> None:
    def build() -> list[str]:
        cluster.build_image("gracepoint.test/a:1", Path("/x/Dockerfile"), Path("/x"), {"A": "b"})
        return tools.calls()

    calls = build()
    assert "docker build --tag gracepoint.test/a:1 --file /x/Dockerfile --build-arg A=b /x" in calls
    loads = [call for call in calls if call.startswith("kind load image-archive")]
    assert loads[0].endswith("--name=gracepoint-one --nodes=one-worker,one-worker2")
    assert not [call for call in build() if call.startswith("kind load")], "nothing has changed"
    tools.say("running", "one-worker", "one-worker2", "one-worker3")
    assert [call.rpartition("=")[2] for call in build() if call.startswith("kind load")] == ["one-worker3"]
    tools.say("image", "sha256:two")
    assert [call.rpartition("=")[2] for call in build() if call.startswith("kind load")] == [
        "one-worker,one-worker2,one-worker3"
    ]
    assert [path.name for path in cache.folder("kind", "one").glob("*.tar*")] == []


def test_podman_saves_in_the_form_that_kind_reads(tools: Tools) -> None:
    tools.have("podman", "kind", "kubectl", "helm")
    tools.say("running", "one-worker")
    KindCluster.create("one").build_image("a.test/a:1", Path("/x/Dockerfile"), Path("/x"))
    (saved,) = tools.calls("podman save")
    assert saved.startswith("podman save --format docker-archive --output ")


def test_a_lost_node_is_cut_off_before_it_is_killed(cluster: KindCluster, tools: Tools) -> None:
    cluster.lose_node("one-worker2", delete_object=True)
    changes = [call.split("--kubeconfig")[0] for call in tools.calls() if not call.startswith("docker ps")]
    assert changes[:2] == ["docker network disconnect --force kind one-worker2", "docker kill one-worker2"]
    assert changes[2].startswith("kubectl")
    with pytest.raises(ClusterError, match="one-worker9 is not running; running are one-worker, one-worker2"):
        cluster.lose_node("one-worker9")


def test_a_lost_node_comes_back_under_its_name(cluster: KindCluster, tools: Tools) -> None:
    tools.say("running", "one-worker")
    assert (cluster.nodes, cluster.lost) == (("one-worker",), ("one-worker2",))
    tools.calls()
    cluster.restore_node("one-worker2")
    assert [call for call in tools.calls("docker") if " ps " not in call] == [
        "docker network connect kind one-worker2",
        "docker start one-worker2",
    ]
    with pytest.raises(ClusterError, match="one-worker is not a worker that was lost"):
        cluster.restore_node("one-worker")


def test_only_who_made_a_cluster_removes_it(cluster: KindCluster, tools: Tools) -> None:
    cluster.kubeconfig.touch()
    KindCluster.attach("one").close()
    assert tools.calls("kind delete") == []
    cluster.close()
    assert len(tools.calls("kind delete cluster --name=gracepoint-one")) == 1


def test_down_removes_a_cluster_that_its_maker_has_left(cluster: KindCluster, tools: Tools) -> None:
    assert cli.main(["down", "--name", "one"]) == 0
    assert tools.calls("kind delete cluster --name=gracepoint-one")
    assert not (cache.folder("kind") / "one").exists()


BY_KIND = "TESTCLUSTER_PROVIDER=kind"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        pytest.param(["demo", "CLUSTER=kind"], ["--provider=kind"], [], id="demo by kind"),
        pytest.param(["demo"], ["--provider=auto"], [], id="demo"),
        pytest.param(["demo", "STORAGE=s3"], ["--provider=local", "--storage=s3"], [], id="demo with a store"),
        pytest.param(["test-cluster", "CLUSTER=kind"], [BY_KIND], ["testcluster build"], id="tests by kind"),
        pytest.param(["test-cluster"], ["testcluster build"], [BY_KIND], id="tests"),
    ],
)
def test_make_hands_the_choice_on(
    words: list[str], has: list[str], lacks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    argv = ["make", "--dry-run", *words]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert [word for word in has if word not in said] == []
    assert [word for word in lacks if word in said] == []


def test_the_tests_of_clusters_ask_the_provider_that_make_names(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTCLUSTER_PROVIDER", "kind")
    assert "no container engine" in str(providers.why_not())
    with pytest.raises(ClusterError, match="kind cannot run here"):
        providers.open()
