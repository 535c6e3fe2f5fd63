"""Typed rows become those of a changelog: each kind, the order of an update's two rows, and what is not whole."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from messages import (
    BY_KEY,
    FULL,
    MOMENT,
    NOTHING,
    TYPED,
    UNCHANGED,
    delete,
    described,
    insert,
    run,
    streamed,
    truncate,
    update,
)

from pg_cdc_source.errors import OptionError, SchemaChangedError
from pg_cdc_source.offsets import Lsn
from pg_cdc_source.protocol.changelog import CHANGELOG_FIELDS, changelog_rows, changelog_schema
from pg_cdc_source.protocol.changes import ChangeDecoder, Described
from pg_cdc_source.protocol.layout import TRUNCATED, StreamedTable
from pg_cdc_source.protocol.stream_rows import change_columns, nothing_unchanged, snapshot_rows, truncate_rows
from pg_cdc_source.values.wire import Messages

pytestmark = pytest.mark.usefixtures("accelerated")

CHANGELOG = replace(TYPED, changelog=True, on_truncate="fail")


def changelog(
    messages: Sequence[bytes], table: StreamedTable = FULL, as_sent: Described | None = None
) -> pa.RecordBatch:
    schema = CHANGELOG.schema([table])
    found = as_sent or described(table)
    decoder = ChangeDecoder(CHANGELOG, schema)
    batch, _ = decoder.decode(
        Messages.joined(messages), [run(len(messages))], lambda oid, _: {table.oid: found}.get(oid), NOTHING
    )
    shaped = changelog_rows(batch, changelog_schema(table.name, schema))
    shaped.validate(full=True)
    return shaped


def rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """(what kind, values of the table), row by row."""
    names = [field.name for field in CHANGELOG_FIELDS]
    return [
        (row["_change_type"], *(value for name, value in row.items() if name not in names)) for row in batch.to_pylist()
    ]


def test_each_kind_of_change_has_its_rows_in_order() -> None:
    batch = changelog(
        [
            insert(2, ["1", "x", None]),
            update(2, ["1", "y", "0.50"], "O", ["1", "x", None]),
            update(2, ["1", None, UNCHANGED], "O", ["1", "y", "0.50"]),
            delete(2, "O", ["1", None, "0.50"]),
        ]
    )
    half = batch.column("b")[2].as_py()
    assert rows(batch) == [
        ("insert", 1, "x", None),
        ("update_preimage", 1, "x", None),
        ("update_postimage", 1, "y", half),
        ("update_preimage", 1, "y", half),
        ("update_postimage", 1, None, half),
        ("delete", 1, None, half),
    ]
    assert batch.schema.names == ["id", "a", "b", "_change_type", "_commit_version", "_commit_timestamp"]
    assert set(batch.column("_commit_version").to_pylist()) == {100}
    assert set(batch.column("_commit_timestamp").to_pylist()) == {MOMENT}


def test_a_change_of_the_key_deletes_a_row_and_inserts_another() -> None:
    batch = changelog([update(2, ["2", UNCHANGED, None], "O", ["1", "long", None])])
    assert rows(batch) == [("delete", 1, "long", None), ("insert", 2, "long", None)]


def test_rows_of_the_snapshot_are_inserts_before_every_commit() -> None:
    schema = CHANGELOG.schema([FULL])
    columns = [pa.array([1, 2], pa.int32()), pa.array(["x", None]), pa.nulls(2, schema.field("b").type)]
    batch = changelog_rows(
        snapshot_rows(columns, 2, Lsn(7), CHANGELOG, FULL, schema), changelog_schema(FULL.name, schema)
    )
    assert rows(batch) == [("insert", 1, "x", None), ("insert", 2, None, None)]
    assert batch.column("_commit_version").to_pylist() == [7, 7]
    assert set(batch.column("_commit_timestamp").to_pylist()) == {
        dt.datetime(1970, 1, 1, microsecond=1000, tzinfo=dt.timezone.utc)
    }


def test_no_rows_are_no_rows() -> None:
    schema = CHANGELOG.schema([FULL])
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
    assert changelog_rows(empty, changelog_schema(FULL.name, schema)).num_rows == 0


def test_a_table_without_columns_has_rows() -> None:
    table = streamed(2, "t", {}, (), "f")
    assert rows(changelog([insert(2, []), update(2, [], "O", []), delete(2, "O", [])], table)) == [
        ("insert",),
        ("update_preimage",),
        ("update_postimage",),
        ("delete",),
    ]


@pytest.mark.parametrize(
    "message",
    [
        update(1, ["1", "y", None]),
        update(1, ["1", UNCHANGED, None]),
        update(1, ["2", "y", None], "K", ["1", None, None]),
        delete(1, "K", ["1", None, None]),
    ],
)
def test_a_change_without_the_whole_old_row_is_refused(message: bytes) -> None:
    with pytest.raises(SchemaChangedError, match="by_key: the commit at 0/64 has") as caught:
        changelog([insert(1, ["1", "x", None]), message], BY_KEY)
    assert "ALTER TABLE public.by_key REPLICA IDENTITY FULL" in caught.value.remedy


def test_inserts_alone_need_no_identity() -> None:
    assert rows(changelog([insert(1, ["1", "x", None])], BY_KEY)) == [("insert", 1, "x", None)]


def test_a_column_that_was_added_later_is_null_in_both_rows() -> None:
    message = update(2, ["1", "y"], "O", ["1", "x"])
    found = changelog([message], FULL, described(FULL, ["id", "a"]))
    assert rows(found) == [("update_preimage", 1, "x", None), ("update_postimage", 1, "y", None)]


def test_a_truncate_has_no_row() -> None:
    with pytest.raises(SchemaChangedError, match="full was truncated by the commit at") as caught:
        changelog([truncate(2)])
    assert "onTruncate=ignore" in caught.value.remedy
    assert "onTruncate=emit" not in caught.value.remedy


def test_rows_that_come_again_are_refused() -> None:
    schema = CHANGELOG.schema([FULL])
    changes = change_columns(np.array([TRUNCATED]), np.array([7]), np.array([0]), None, None, nothing_unchanged(1))
    rows = truncate_rows([FULL], changes, CHANGELOG, schema)
    with pytest.raises(SchemaChangedError, match="come again"):
        changelog_rows(rows, changelog_schema(FULL.name, schema))


@pytest.mark.parametrize("name", ["_commit_version", "_Commit_Timestamp"])
def test_a_column_with_the_name_of_one_of_its_own_is_refused(name: str) -> None:
    table = streamed(2, "public.t", {"id": "int4", name: "text"}, ["id"], "f")
    with pytest.raises(OptionError, match="one of the changelog's columns"):
        changelog_schema(table.name, CHANGELOG.schema([table]))
