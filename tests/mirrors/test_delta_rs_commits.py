"""What a table's log says of a mirror's batches, while somebody else commits to the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pg_cdc_source.errors import ForeignWriterError
from pg_cdc_source.lake.bring import Mark, Step
from pg_cdc_source.lake.shape import REPLACED
from pg_cdc_source.lake.shape_of_table import OF_TABLE
from pg_cdc_source.mirrors.delta_rs_commits import DeltaRsCommits, commit_of

ROWS = pa.table({"id": [1]})


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A table whose version 1 is of batch 0, and version 2 of batch 1."""
    path = str(tmp_path / "t")
    DeltaTable.create(path, ROWS.schema, configuration={OF_TABLE: "public.t"}, raise_if_key_not_exists=False)
    for batch in range(2):
        commit = commit_of(Mark("q", batch), Step("changes", is_last=True))
        write_deltalake(path, ROWS, mode="append", commit_properties=commit)
    return path


def committing_first(monkeypatch: pytest.MonkeyPatch, path: str, **options: Any) -> None:
    """Have somebody else commit to the table right before its history is read."""
    read = DeltaTable.history

    def history(self: DeltaTable, limit: int | None = None) -> list[dict[str, Any]]:
        monkeypatch.setattr(DeltaTable, "history", read)
        write_deltalake(path, ROWS, mode="append", **options)
        return read(self, limit)

    monkeypatch.setattr(DeltaTable, "history", history)


def committed(path: str) -> DeltaRsCommits:
    return DeltaRsCommits(path, "public.t", Mark("q", 1), REPLACED)


def test_the_version_of_a_batch_is_its_own_while_others_commit(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    committing_first(monkeypatch, path)
    assert committed(path).version == 2


def test_a_commit_that_comes_while_the_log_is_read_hides_none_before_it(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    write_deltalake(path, ROWS, mode="append")
    table = DeltaRsCommits(path, "public.t", Mark("q", 2), REPLACED)
    committing_first(monkeypatch, path, commit_properties=commit_of(Mark("q", 2)))
    with pytest.raises(ForeignWriterError, match="was changed by somebody else: version 3"):
        table.require_ours(2, again=False)
