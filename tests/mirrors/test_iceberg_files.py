"""Files that become an Iceberg table's own: what is done where some of them cannot be moved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pg_cdc_source.mirrors import iceberg_files
from pg_cdc_source.mirrors.iceberg_files import take_over

NAMES = ("a.parquet", "b.parquet", "c.parquet")


@pytest.fixture
def staged(tmp_path: Path) -> list[Mapping[str, Any]]:
    (tmp_path / "staged").mkdir()
    for name in NAMES:
        (tmp_path / "staged" / name).write_text(name)
    return [{"name": name, "place": f"{tmp_path}/staged/{name}"} for name in NAMES]


def table(directory: Path, added: list[str]) -> Any:
    """What is asked of Iceberg's own object of a table."""
    append = SimpleNamespace(appendFile=added.append, set=lambda *_: None, commit=lambda: None)
    place = SimpleNamespace(newDataLocation=lambda name: f"{directory}/{name}")
    return SimpleNamespace(name=lambda: "t", locationProvider=lambda: place, newAppend=lambda: append)


def test_files_stay_where_they_are_if_the_table_is_elsewhere(
    staged: list[Mapping[str, Any]], tmp_path: Path, spark_stub: SparkSession
) -> None:
    (tmp_path / "data").touch()
    assert not take_over(spark_stub, table(tmp_path / "data", []), staged, {})
    assert all(Path(file["place"]).exists() for file in staged)


@pytest.fixture
def spark_stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(iceberg_files, "_data_file", lambda _, __, file: file["name"])


def test_an_attempt_goes_on_where_the_one_before_has_moved_some(
    staged: list[Mapping[str, Any]], tmp_path: Path, spark_stub: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []
    found = table(tmp_path / "data", added)
    whole = iceberg_files._move
    for fails in ("b.parquet", "a.parquet"):

        def failing(table: Any, file: Mapping[str, Any], fails: str = fails) -> None:
            if file["name"] == fails:
                raise OSError("the store has a bad moment")
            whole(table, file)

        monkeypatch.setattr(iceberg_files, "_move", failing)
        # To write the rows anew would take files that are gone.
        with pytest.raises(OSError, match="bad moment"):
            take_over(spark_stub, found, staged, {})
    monkeypatch.setattr(iceberg_files, "_move", whole)
    assert take_over(spark_stub, found, staged, {})
    assert added == [*NAMES]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [*NAMES]
