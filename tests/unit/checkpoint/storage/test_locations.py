"""Which location a user means, and what is known of it without asking its store."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from gracepoint.checkpoint.memory import bytes_of
from gracepoint.checkpoint.storage.locations import from_text, storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath

PLACES = ["/data/run/7", "memory://data/run/7", "gs://bucket/run/7"]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoragePath:
    for name in ("TENSORSTORE_GCS_HTTP_URL", "GOOGLE_AUTH_TOKEN_FOR_TESTING"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    return storage_path(request.param)


def test_a_location_is_the_same_when_it_was_pickled_or_written_as_text(place: StoragePath) -> None:
    assert pickle.loads(pickle.dumps(place)) == place
    assert from_text(str(place)) == place
    assert str(place) in PLACES
    assert (place.name, str(place.parent / "7")) == ("7", str(place))


def test_locations_in_different_stores_differ() -> None:
    memory, file = storage_path("memory:///data/run"), storage_path("/data/run")
    assert memory.at("/data/run") != file
    with pytest.raises(ValueError, match="is not below"):
        (memory / "7").below(file)


def test_only_a_file_system_has_local_paths_and_users_get_those(place: StoragePath) -> None:
    if str(place).startswith("/"):
        found: Any = place.for_users()
        assert (found, place.local()) == (Path(str(place)), Path(str(place)))
        return
    assert place.for_users() == str(place)
    with pytest.raises(TypeError, match="is not in a file system"):
        place.local()


@pytest.mark.parametrize("text", PLACES[:2])
def test_a_store_that_renames_keeps_no_notes(text: str) -> None:
    place = storage_path(text)
    with pytest.raises(TypeError, match="only stores that cannot rename keep notes"):
        place.write_if(bytes_of(b"data"), 0, None, "note", None)
    with pytest.raises(TypeError, match="only stores that cannot rename keep notes"):
        place.noted()
