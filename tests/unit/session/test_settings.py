"""The environment is read strictly: what is wrong is named, with what was found and what to do."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint.errors import SettingsError
from gracepoint.settings import Settings
from gracepoint.wire.names import Env

POD = {
    Env.JOBSET_NAME: "gpt",
    Env.PROCESS_COUNT: "8",
    Env.PROCESS_OFFSET: "2",
    Env.PODS_PER_JOB: "3",
    Env.JOB_INDEX: "1",
    "JOB_COMPLETION_INDEX": "2",
    Env.COORDINATOR_JOB: "workers",
    Env.COORDINATOR_PORT: "8476",
    Env.SUBDOMAIN: "gpt",
}


def test_an_empty_environment_is_a_laptop() -> None:
    assert Settings.from_environment({"PATH": "/bin"}) == Settings()


def test_every_name_of_the_wire_is_read_into_a_field() -> None:
    names = {v for k, v in vars(Env).items() if k.isupper()}
    fields = {f.name for f in dataclasses.fields(Settings)}
    assert {name.removeprefix("GRACEPOINT_").lower() for name in names} == fields - {"completion_index"}
    for name in names:
        with pytest.raises(SettingsError) if _is_typed(name) else _nothing():
            Settings.from_environment({name: "\x00"})


def test_process_id_counts_earlier_jobs_and_the_job_index() -> None:
    assert Settings.from_environment(POD).process_id == 2 + 1 * 3 + 2


def test_the_coordinator_is_the_first_pod_of_the_coordinator_job() -> None:
    assert Settings.from_environment(POD).coordinator_address == "gpt-workers-0-0.gpt:8476"


def test_the_coordinator_of_a_job_alone_is_its_first_pod() -> None:
    of_jobset = (Env.COORDINATOR_JOB, Env.REPLICATED_JOB, Env.JOB_INDEX, Env.RESTART_ATTEMPT)
    pod = {name: value for name, value in POD.items() if name not in of_jobset}
    assert Settings.from_environment(pod).coordinator_address == "gpt-0.gpt:8476"


def test_a_gang_of_one_needs_nothing_else() -> None:
    assert Settings.from_environment({Env.PROCESS_COUNT: "1"}).process_id == 0


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        pytest.param(
            {"GRACEPOINT_DIRECTROY": "/x"},
            ["GRACEPOINT_DIRECTROY", "spelling", "mean GRACEPOINT_DIRECTORY?"],
            id="unknown name",
        ),
        pytest.param({Env.KEEP_LAST: "0"}, [Env.KEEP_LAST, "at least 1", "'0'"], id="keep nothing"),
        pytest.param({Env.KEEP_LAST: "many"}, [Env.KEEP_LAST, "integer", "'many'"], id="no integer"),
        pytest.param({Env.SAVE_EVERY_S: "-1"}, [Env.SAVE_EVERY_S, "at least 0", "'-1'"], id="negative seconds"),
        pytest.param({Env.KEEP_FOR_S: "inf"}, [Env.KEEP_FOR_S, "'inf'"], id="kept for ever"),
        pytest.param({Env.KEEP_EVERY_STEPS: "2.5"}, [Env.KEEP_EVERY_STEPS, "integer"], id="half a step"),
        pytest.param({Env.HEAD_START_S: "-1"}, [Env.HEAD_START_S, "at least 0", "'-1'"], id="start after the deadline"),
        pytest.param({Env.MARGIN: "0.9"}, [Env.MARGIN, "at least 1", "'0.9'"], id="margin below 1"),
        pytest.param({Env.MARGIN: "nan"}, [Env.MARGIN, "'nan'"], id="margin not a number"),
        pytest.param({Env.GRACE_PERIOD_S: "0"}, [Env.GRACE_PERIOD_S, "above 0"], id="no grace at all"),
        pytest.param({Env.SAVED_EXIT_CODE: "1"}, [Env.SAVED_EXIT_CODE, "3 to 125"], id="exit code of Python"),
        pytest.param({Env.COORDINATOR_PORT: "99999"}, [Env.COORDINATOR_PORT, "65535"], id="no such port"),
        pytest.param({Env.OPERATOR_URL: "http://x:1"}, [Env.OPERATOR_URL, "https://"], id="not encrypted"),
        pytest.param({Env.CA_CERTIFICATE: "/ca.pem"}, [Env.CA_CERTIFICATE, "PEM"], id="path for a certificate"),
        pytest.param({Env.METADATA: "gce,oracle"}, [Env.METADATA, "gce, aws", "'gce,oracle'"], id="no such cloud"),
        pytest.param({Env.METADATA: "auto,gce"}, [Env.METADATA, "expected auto"], id="auto and more"),
        pytest.param({"JOB_COMPLETION_INDEX": "-1"}, ["JOB_COMPLETION_INDEX"], id="negative index"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment(environment)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("value", "clouds"), [("", ()), ("auto", ("auto",)), ("gce", ("gce",)), ("aws, azure,aws", ("aws", "azure"))]
)
def test_clouds_are_named_with_commas_between(value: str, clouds: tuple[str, ...]) -> None:
    assert Settings.from_environment({Env.METADATA: value}).metadata == clouds


@pytest.mark.parametrize("missing", [Env.PODS_PER_JOB, "JOB_COMPLETION_INDEX"])
def test_a_process_id_that_cannot_be_made_names_what_is_missing(missing: str) -> None:
    settings = Settings.from_environment({k: v for k, v in POD.items() if k != missing})
    with pytest.raises(SettingsError, match=missing):
        _ = settings.process_id


def test_a_process_id_beyond_the_gang_is_refused_with_its_parts() -> None:
    with pytest.raises(SettingsError, match=r"offset 2, job index 1, 3 pods a job and completion index 2 give 7"):
        _ = Settings.from_environment({**POD, Env.PROCESS_COUNT: "7"}).process_id


def test_an_override_replaces_what_is_given_and_keeps_what_is_none() -> None:
    settings = Settings.from_environment({Env.DIRECTORY: "/a", Env.KEEP_LAST: "5"})
    changed = settings.override(directory="/b", keep_last=None, save_every_steps=10)
    assert (changed.directory, changed.keep_last, changed.save_every_steps) == ("/b", 5, 10)


def test_cadence_and_retention_are_shown_by_steps_and_by_seconds() -> None:
    told = {Env.SAVE_EVERY_S: "600", Env.KEEP_EVERY_STEPS: "1000", Env.KEEP_FOR_S: "86400"}
    settings = Settings.from_environment(told)
    assert (settings.save_every_s, settings.keep_every_steps, settings.keep_for_s) == (600.0, 1000, 86400.0)
    assert (Settings().save_every_s, Settings().keep_every_steps, Settings().keep_for_s) == (0.0, 0, 0.0)


def test_an_override_is_checked_like_the_environment() -> None:
    with pytest.raises(SettingsError, match=r"attach\(saved_exit_code=...\): expected an integer from 3 to 125"):
        Settings().override(saved_exit_code=0)


def _is_typed(name: str) -> bool:
    default = Settings.__dataclass_fields__[name.removeprefix("GRACEPOINT_").lower()]
    return "str" not in str(default.type) or name in (
        Env.OPERATOR_URL,
        Env.CA_CERTIFICATE,
        Env.METADATA,
        Env.SAVE_INTERVAL,
        Env.STALL_ACTION,
        Env.WRITER,
        Env.COMPILATION_CACHE,
    )


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_snapshots_are_due_by_steps_or_by_seconds_not_by_both() -> None:
    assert not Settings().snapshots
    assert Settings.from_environment({Env.SNAPSHOT_EVERY_STEPS: "5"}).snapshots
    with pytest.raises(SettingsError, match="expected one of them above 0, found 5 and 30: leave one out"):
        Settings.from_environment({Env.SNAPSHOT_EVERY_STEPS: "5", Env.SNAPSHOT_EVERY_S: "30"})
    with pytest.raises(SettingsError, match="integer from 1 to 2"):
        Settings.from_environment({Env.SNAPSHOT_COPIES: "3"})


def test_an_argument_takes_the_place_of_the_policys_interval_in_the_other_unit() -> None:
    policy = Settings.from_environment({Env.SNAPSHOT_EVERY_S: "30"})
    by_steps = policy.override(snapshot_every_steps=5)
    assert (by_steps.snapshot_every_steps, by_steps.snapshot_every_s) == (5, 0)
    off = policy.override(snapshot_every_s=0)
    assert not off.snapshots
    with pytest.raises(SettingsError, match="leave one out"):
        policy.override(snapshot_every_steps=5, snapshot_every_s=30)
