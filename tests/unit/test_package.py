"""What ``import gracepoint`` promises: the standard library is enough, JAX is not loaded, names are kept."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import gracepoint

NAMES_OF_OTHERS = ("jax", "jaxlib", "numpy", "tensorstore", "kopf", "kubernetes", "pydantic", "aiohttp")

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.integration
def test_importing_the_library_loads_nothing_but_the_standard_library() -> None:
    code = (
        f"import gracepoint, gracepoint.wire.messages, sys;print([n for n in {NAMES_OF_OTHERS!r} if n in sys.modules])"
    )
    assert run(code) == "[]"


@pytest.mark.integration
def test_the_library_is_importable_where_nothing_else_is_installed() -> None:
    # -S -I: no site-packages at all; only the library's own folder is put back.
    root = next(iter(gracepoint.__path__)).removesuffix("/gracepoint")
    code = (
        f"import sys; sys.path.insert(0, {root!r});"
        "import gracepoint, gracepoint.settings; print(gracepoint.__version__)"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert out.strip() == gracepoint.__version__


@pytest.mark.integration
def test_the_command_line_says_what_it_lacks_where_nothing_else_is_installed() -> None:
    root = next(iter(gracepoint.__path__)).removesuffix("/gracepoint")
    code = (
        f"import sys; sys.path.insert(0, {root!r});"
        "from gracepoint.__main__ import main; sys.exit(main(['verify', '.']))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "gracepoint[jax]" in done.stderr) == (2, True), done.stderr


@pytest.mark.integration
def test_the_packages_for_users_are_there_without_an_import_of_their_own() -> None:
    code = (
        "import gracepoint, sys;"
        "assert 'jax' not in sys.modules;"
        "print(gracepoint.checkpoint.save.__name__, gracepoint.multihost.__name__)"
    )
    assert run(code) == "save gracepoint.multihost"


def test_the_public_names_are_these() -> None:
    assert set(gracepoint.__all__) == {
        "AgreementError",
        "AsyncCallFailed",
        "BarrierCancelled",
        "BarrierError",
        "BarrierFailed",
        "BarrierReused",
        "BarrierTimeout",
        "CannotKnow",
        "CheckpointCorrupt",
        "CheckpointError",
        "CheckpointExists",
        "CheckpointMismatch",
        "CheckpointNotFound",
        "CheckpointRefused",
        "CheckpointTooNew",
        "ClusterError",
        "GracepointError",
        "InvalidSharding",
        "NoCluster",
        "NotJoined",
        "Preempted",
        "SaveFailed",
        "Session",
        "SettingsError",
        "WireError",
        "leave_process_group",
        "__version__",
        "attach",
    }  # fmt: skip
    for name in gracepoint.__all__:
        assert getattr(gracepoint, name) is not None
    assert {*gracepoint.__all__, "checkpoint", "multihost"} <= set(dir(gracepoint))


def test_the_public_names_of_the_checkpoint_engine_are_these() -> None:
    from gracepoint import checkpoint

    assert set(checkpoint.__all__) == {
        "ArrayHandler",
        "ArrayRestoreArgs",
        "AsyncCheckpointer",
        "CheckpointCorrupt",
        "CheckpointError",
        "CheckpointExists",
        "CheckpointManager",
        "CheckpointMismatch",
        "CheckpointNotFound",
        "CheckpointRefused",
        "CheckpointTooNew",
        "Damage",
        "Dispatcher",
        "HandlerRegistry",
        "InProcessDispatcher",
        "InvalidSharding",
        "ItemHandler",
        "LeafMetadata",
        "NumpyHandler",
        "PLACEHOLDER",
        "ParamInfo",
        "Reshard",
        "RestoreArgs",
        "RestoreOptions",
        "Restored",
        "SaveArgs",
        "SaveCallback",
        "SaveFailed",
        "SaveStats",
        "Saved",
        "ScalarHandler",
        "SingleReplica",
        "SingleReplicaArrayHandler",
        "SingleReplicaArrayRestoreArgs",
        "StringHandler",
        "TransferPriority",
        "Transform",
        "TreeMetadata",
        "TypeHandler",
        "VerificationReport",
        "WriteOptions",
        "all_steps",
        "default_handlers",
        "latest_step",
        "restore",
        "save",
        "verify",
    }  # fmt: skip
    for name in checkpoint.__all__:
        assert getattr(checkpoint, name) is not None
    assert not hasattr(checkpoint, "StepCheckpointer")


@pytest.mark.integration
def test_preempted_ends_a_script_with_the_policys_code_and_passes_except_exception() -> None:
    code = (
        "import gracepoint\n"
        "try:\n    raise gracepoint.Preempted(77, saved=True, step=3, reason='saved')\n"
        "except Exception:\n    raise SystemExit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 77


def test_no_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = {}
    for package in ("sidecar/gracepoint", "operator/gracepoint_operator", "operator/gracepoint_cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.fixture(scope="module")
def import_contracts() -> dict[str, dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["name"]: contract for contract in settings["tool"]["importlinter"]["contracts"]}


def top_modules(package: Path) -> set[str]:
    found = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    return {f"{package.name}.{name}" for name in found - {"__init__"}}


def test_contract_of_the_operator_forbids_all_of_the_library_but_the_wire(
    import_contracts: dict[str, dict[str, Any]],
) -> None:
    contract = import_contracts["The operator knows of the library only the wire, and no JAX"]
    forbidden = {name for name in contract["forbidden_modules"] if name.startswith("gracepoint.")}
    assert top_modules(ROOT / "sidecar/gracepoint") - forbidden == {"gracepoint.wire"}


def test_contract_about_kopf_holds_for_all_rooms_but_the_watches(import_contracts: dict[str, dict[str, Any]]) -> None:
    contract = import_contracts["Only the watches import kopf"]
    modules = top_modules(ROOT / "operator/gracepoint_operator")
    free = {"gracepoint_operator.__main__", "gracepoint_operator.watches"}
    assert modules - set(contract["source_modules"]) == free
