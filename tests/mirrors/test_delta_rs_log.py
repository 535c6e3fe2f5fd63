"""The log of a table that delta-rs writes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from pg_cdc_source.mirrors import delta_rs_log
from pg_cdc_source.mirrors.delta_rs_log import LOG_PROPERTIES, clean_where_due

RETENTION = "delta.deletedFileRetentionDuration"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A table with 25 commits, whose log need not be kept for any time."""
    rows = pa.table({"id": [1]})
    configuration = {**LOG_PROPERTIES, "delta.logRetentionDuration": "interval 0 seconds"}
    DeltaTable.create(tmp_path, rows.schema, configuration=configuration)
    for _ in range(24):
        write_deltalake(tmp_path, rows, mode="append")
    return str(tmp_path)


def commits(path: str) -> list[int]:
    return sorted(int(file.stem) for file in Path(path, "_delta_log").glob("*.json"))


def test_a_commit_does_not_look_for_old_entries(path: str) -> None:
    assert commits(path) == list(range(25))


def test_old_entries_are_removed_once_in_a_thousand_commits(path: str) -> None:
    for before, now in ((0, 999), (1_000, 1_999), (1_000, 1_000)):
        clean_where_due(path, before, now)
        assert commits(path) == list(range(25))
    clean_where_due(path, 999, 1_000)
    assert commits(path)[-1] == 24
    assert len(commits(path)) < 25
    assert DeltaTable(path).to_pyarrow_table().num_rows == 24


@pytest.mark.parametrize("kept", ["interval 1 day", "interval 0 seconds"])
def test_a_checkpoint_has_the_removed_files_of_a_while(tmp_path: Path, kept: str) -> None:
    rows = pa.table({"id": [1]})
    DeltaTable.create(tmp_path, rows.schema, configuration={**LOG_PROPERTIES, RETENTION: kept})
    for _ in range(30):
        write_deltalake(tmp_path, rows, mode="overwrite")
    last = max(Path(tmp_path, "_delta_log").glob("*.checkpoint.parquet"))
    removed = pq.read_table(last, columns=["remove"])["remove"].drop_null()
    assert (len(removed) > 20) == (kept == "interval 1 day")
    assert LOG_PROPERTIES[RETENTION] == "interval 1 day"


def checkpoints(path: str) -> list[int]:
    return sorted(int(file.name[:20]) for file in Path(path, "_delta_log").glob("*.checkpoint.parquet"))


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table with 100 commits, where 40 count as a thousand."""
    monkeypatch.setattr(delta_rs_log, "_COMMITS_PER_CLEANUP", 40)
    rows = pa.table({"id": [1]})
    DeltaTable.create(tmp_path, rows.schema, configuration=LOG_PROPERTIES)
    for _ in range(99):
        write_deltalake(tmp_path, rows, mode="append")
    return tmp_path


def grow_old(path: Path) -> None:
    for file in (path / "_delta_log").iterdir():
        os.utime(file, (file.stat().st_mtime - 7200,) * 2)


def rows_at(path: Path, versions: Iterable[int]) -> list[int]:
    return [DeltaTable(path, version=version).to_pyarrow_table().num_rows for version in versions]


def test_one_checkpoint_in_a_thousand_commits_stays(long: Path) -> None:
    clean_where_due(str(long), 79, 80)
    # Somebody may have opened the table by one of them a moment ago.
    assert checkpoints(str(long)) == [*range(9, 100, 10)]
    grow_old(long)
    clean_where_due(str(long), 79, 80)
    assert checkpoints(str(long)) == [9, 49, 89, 99]
    assert rows_at(long, (0, 39, 41, 79, 99)) == [0, 39, 41, 79, 99]


def test_a_checkpoint_stays_that_a_version_needs(long: Path) -> None:
    for version in range(70):
        (long / "_delta_log" / f"{version:020}.json").unlink()
    grow_old(long)
    clean_where_due(str(long), 79, 80)
    assert 69 in checkpoints(str(long))
    assert rows_at(long, range(70, 100, 5)) == [*range(70, 100, 5)]


def test_a_log_that_cannot_be_cleaned_up_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clean_where_due(str(tmp_path), 999, 1_000)
    assert f"old entries of the log of {tmp_path} stay for now" in caplog.text
