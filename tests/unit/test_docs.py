"""What the pages say of names, links and manifests is so."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import gracepoint
from gracepoint.settings import VARIABLES, Settings
from gracepoint.wire.names import ENV_PREFIX, LABEL_POLICY, Env
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.resources.crds import definitions
from gracepoint_operator.resources.policy import Checkpoint, CheckpointPolicySpec
from gracepoint_operator.webhooks.release_contract import ContractViolation, release_contract

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT)
    for folder in (".", "docs", "docs/decisions", "charts/gracepoint", "examples/*", "release")
    for page in ROOT.glob(f"{folder}/*.md")
)
EXAMPLES = sorted(
    path.relative_to(ROOT) for pattern in ("*", "platforms/*") for path in ROOT.glob(f"examples/{pattern}.yaml")
)


@cache
def text(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of the headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page.parent / name).resolve() if name else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT)), link


#: Hosts, API groups and files of tests that look like modules.
NOT_MODULES = ("gracepoint.dev", "gracepoint.test", "gracepoint.enabled")
FOLDERS = ("sidecar", "operator", "tests", "charts", "crds", "docs", "demo", "benchmarks", "examples", "changelog.d")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_modules_and_names_that_pages_mention_exist(page: Path) -> None:
    for name in re.findall(
        r"(?<![\w./@-])(?:gracepoint|gracepoint_operator|benchmarks|tests|demo)(?:\.\w+)+", text(page)
    ):
        if not name.startswith(NOT_MODULES) and not name.endswith(".md"):
            assert resolves(name), name


def resolves(name: str) -> bool:
    """True if the dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_paths_that_pages_mention_exist(page: Path) -> None:
    for path in re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*)`", text(page)):
        assert (ROOT / path).exists(), path


def test_the_packages_that_the_architecture_names_are_those_of_the_code() -> None:
    page = text(Path("ARCHITECTURE.md"))
    for heading, folder in (
        ("package of the library", "sidecar/gracepoint"),
        ("package of `checkpoint`", "sidecar/gracepoint/checkpoint"),
        ("package of the operator", "operator/gracepoint_operator"),
        ("module of the command line", "operator/gracepoint_cli"),
    ):
        table = page.partition(f"| {heading}")[2].partition("\n\n")[0]
        named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
        packages = {init.parent.name for init in (ROOT / folder).glob("*/__init__.py")}
        assert packages <= named, packages - named
        for name in named:
            assert (ROOT / folder / name).is_dir() or (ROOT / folder / f"{name}.py").is_file(), name


def test_the_files_and_functions_of_the_architecture_s_walks_exist() -> None:
    section = text(Path("ARCHITECTURE.md")).partition("## Five walks through the code")[2].partition("\n## ")[0]
    folders = ("sidecar/gracepoint", "operator/gracepoint_operator")
    sources = {path: path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    places = {place.as_posix() for path in sources for place in (path.with_suffix(""), path.parent)}
    named = re.findall(r"`([\w.]+)`", section)
    assert named
    for name in named:
        package, _, last = name.rpartition(".")
        is_file = any(place.endswith(f"/{name.replace('.', '/')}") for place in places)
        defined = re.compile(rf"^\s*(?:async )?(?:def|class) {last}\b", re.MULTILINE)
        owner = re.compile(rf"^class {package}\b" if package[:1].isupper() else "", re.MULTILINE)
        assert is_file or any(defined.search(code) and owner.search(code) for code in sources.values()), name


def test_variables_with_the_library_s_prefix_are_settings_of_the_library() -> None:
    """It refuses all others, also where tests or a cluster for trials have variables of their own."""
    known = {*VARIABLES.values(), *(value for value in vars(Env).values() if isinstance(value, str))}
    places = [Path("Makefile"), *PAGES, *(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))]
    unknown = {
        f"{place}: {name}"
        for place in places
        if not place.is_relative_to("tests/unit")  # these also try settings that do not exist
        for name in re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", text(place))
        if name not in known
    }
    assert not unknown - {"CHANGELOG.md: GRACEPOINT_CACHE"}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_rows_of_tables_are_short_enough_to_be_read_in_a_terminal(page: Path) -> None:
    for number, line in enumerate(text(page).splitlines(), start=1):
        if line.startswith("|"):
            assert len(line) <= 200, f"{page}:{number} has {len(line)} characters"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_row_stands_in_a_table(page: Path) -> None:
    """An empty line within a table makes text of the rows below it."""
    before: list[str] = []
    for line in prose(page).splitlines():
        if not line.startswith("|"):
            before = []
            continue
        before.append(line)
        assert len(before) != 2 or re.match(r"\| ?-", line), f"{page}: a table without a header: {before[0]}"


def lines_that_can_be_wrapped(page: Path) -> Iterator[tuple[int, str]]:
    """Not those of blocks of code and of tables, and none that is one link or one piece of code."""
    fenced = False
    for number, line in enumerate(text(page).splitlines(), start=1):
        fenced ^= line.lstrip().startswith("```")
        words = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "word", line).strip("-* ")
        if not fenced and not line.startswith(("|", "    ")) and " " in words:
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_lines_of_pages_are_short_enough_to_be_reviewed(page: Path) -> None:
    assert [f"{page}:{number}" for number, line in lines_that_can_be_wrapped(page) if len(line) > 120] == []


def test_every_page_is_in_the_index() -> None:
    index = text(Path("docs/README.md"))
    missing = [p.name for p in (ROOT / "docs").glob("*.md") if f"]({p.name})" not in index and p.name != "README.md"]
    assert missing == []


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("record", DECISIONS, ids=lambda record: record.stem)
def test_a_decision_is_a_short_record_that_the_index_lists(record: Path) -> None:
    page = record.read_text(encoding="utf-8")
    title, when, *parts = page.split("\n\n")
    number = int(record.name.partition("-")[0])
    assert [other.name for other in DECISIONS if other.name.startswith(f"{number:04}-")] == [record.name]
    assert f"- [{title.removeprefix('# ')}]({record.name})\n" in text(Path("docs/decisions/README.md"))
    assert title.startswith(f"# {number}. ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d · (accepted|superseded by \d+)", when)
    assert re.findall(r"^\*\*(\w+)\.\*\*", "\n".join(parts), re.M) == ["Context", "Decision", "Rejected"]
    assert len(page.split()) <= 300


class Loader(yaml.SafeLoader):
    """Leaves times as texts, as JSON has them."""


def _as_text(loader: Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


Loader.add_constructor("tag:yaml.org,2002:timestamp", _as_text)


def manifests() -> Iterator[Any]:
    for page in [*PAGES, *EXAMPLES]:
        blocks = [text(page)] if page.suffix == ".yaml" else re.findall(r"^```yaml\n(.*?)^```", text(page), re.S | re.M)
        for number, block in enumerate(blocks):
            for document in yaml.load_all(block, Loader):
                if str(document.get("apiVersion", "")).startswith("gracepoint.dev/"):
                    yield pytest.param(document, id=f"{page}-{number}-{document['kind']}")


@pytest.mark.parametrize("document", list(manifests()))
def test_manifests_fit_the_schemas_that_the_api_server_has(document: dict[str, Any]) -> None:
    import jsonschema  # which takes more than a second for its grammars: not in every process that collects tests

    schemas = {
        crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for crd in definitions().values()
    }
    jsonschema.validate(document, closed(schemas[document["kind"]]))


@pytest.mark.parametrize("document", list(manifests()))
def test_no_example_creates_a_record_which_the_api_server_takes_from_the_operator_alone(
    document: dict[str, Any],
) -> None:
    assert document["kind"] != "Preemption" or "epoch" in document["spec"], "requests are PreemptionRequests"


def closed(schema: Any) -> Any:
    """The schema with unknown fields of the spec refused, which the API server would drop or warn of."""
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) if key != "properties" else value for key, value in schema.items()}
    if "properties" in schema:
        made["properties"] = {key: closed(value) for key, value in schema["properties"].items()}
        if "apiVersion" not in schema["properties"]:
            made.setdefault("additionalProperties", False)
    return made


def test_example_jobset_is_admitted_and_finds_its_claim() -> None:
    jobset, policy, claim = (yaml.safe_load(text(Path(f"examples/{n}.yaml"))) for n in ("jobset", "policy", "claim"))
    assert jobset["metadata"]["labels"][LABEL_POLICY] == policy["metadata"]["name"]
    result = release_contract(jobset, CheckpointPolicy.of(policy).spec)
    assert not isinstance(result, ContractViolation), result
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mount = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    assert policy["spec"]["checkpoint"]["directory"].startswith(f"{mount}/")


def test_example_job_is_admitted_as_the_api_server_hands_it_over() -> None:
    service, job = yaml.safe_load_all(text(Path("examples/job.yaml")))
    policy = yaml.safe_load(text(Path("examples/policy.yaml")))
    job["spec"] |= {"backoffLimit": 6, "podReplacementPolicy": "TerminatingOrFailed"}  # the defaults
    assert job["metadata"]["labels"][LABEL_POLICY] == policy["metadata"]["name"]
    result = release_contract(job, CheckpointPolicy.of(policy).spec)
    assert not isinstance(result, ContractViolation), result
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


def settings_rows() -> dict[str, list[str]]:
    """The table of settings: by argument, its other cells."""
    table = text(Path("docs/training-loop.md")).partition("| `attach(...)` |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_settings_table_has_every_argument_of_attach() -> None:
    rows = settings_rows()
    assert set(rows) == set(inspect.signature(gracepoint.attach).parameters) - {"receiver", "write_options"}  # objects
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for argument, (variable, _, default) in rows.items():
        assert variable == f"`{ENV_PREFIX}{argument.upper()}`" == f"`{getattr(Env, argument.upper())}`"
        if isinstance(defaults[argument], int | float):
            assert float(default.partition(":")[0]) == defaults[argument], argument


def test_the_table_of_settings_names_fields_of_the_policy_with_their_defaults() -> None:
    spec: Any = CheckpointPolicySpec(checkpoint=Checkpoint(directory="/c")).to_json()
    for _, field, _ in settings_rows().values():
        if named := re.match(r"`(\w+(?:\.\w+)?)`(?: \(([\d.]+)\))?$", field):
            value = spec
            for part in named[1].split("."):
                value = value[part]
            assert named[2] is None or float(named[2]) == value


def test_the_values_that_the_page_about_installing_names_are_the_charts() -> None:
    table = text(Path("docs/install.md")).partition("| value | when |")[2].partition("\n\n")[0]
    values = yaml.safe_load(text(Path("charts/gracepoint/values.yaml")))
    for row in table.splitlines()[2:]:
        for name in re.findall(r"`([\w.]+)(?:: \w+)?`", row.split("|")[1]):
            found = values
            for part in name.split("."):
                assert part in found, name
                found = found[part]
