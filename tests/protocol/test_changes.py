"""Messages of rows become the stream's rows: each kind by hand, and random ones against a decoder of single rows."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import (
    BY_KEY,
    ENVELOPE,
    FULL,
    HEADER,
    KEYLESS,
    MOMENT,
    NOTHING,
    OTHER,
    TYPED,
    UNCHANGED,
    Image,
    Value,
    delete,
    described,
    insert,
    run,
    streamed,
    truncate,
    update,
)
from trials import examples

from pg_cdc_source.errors import DefiniteError, SchemaChangedError, UnrepresentableError, WireError
from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.changes import ChangeDecoder, Described, Run
from pg_cdc_source.protocol.layout import BEFORE, CHANGE_FIELDS, ENVELOPE_SCHEMA, Layout, StreamedTable
from pg_cdc_source.protocol.stream_rows import rows_through, snapshot_rows
from pg_cdc_source.values.wire import Messages

pytestmark = pytest.mark.usefixtures("accelerated")


def decoded(
    messages: Sequence[bytes],
    *tables: StreamedTable | Described,
    layout: Layout = TYPED,
    runs: Sequence[Run] | None = None,
    skip: Position = NOTHING,
) -> tuple[pa.RecordBatch, int]:
    found = [described(table) if isinstance(table, StreamedTable) else table for table in tables]
    schema = layout.schema([one.table for one in found])
    decoder = ChangeDecoder(layout, schema)
    by_oid = {one.table.oid: one for one in found}
    batch, last = decoder.decode(
        Messages.joined(messages), runs or [run(len(messages))], lambda oid, _: by_oid.get(oid), skip
    )
    batch.validate(full=True)
    assert batch.schema == schema
    return batch, last


META = [field.name for field in CHANGE_FIELDS]


def rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """(what kind, number, values of the table, what did not travel, old values), row by row."""
    return [
        (
            row["_change_type"],
            row["_seq"],
            tuple(value for name, value in row.items() if name not in (*META, BEFORE)),
            row["_unchanged"],
            None if row.get(BEFORE) is None else tuple(row[BEFORE].values()),
        )
        for row in batch.to_pylist()
    ]


def one_commit(*messages: bytes, table: StreamedTable | Described, layout: Layout = TYPED) -> list[tuple[Any, ...]]:
    return rows(decoded(messages, table, layout=layout)[0])


HALF = Decimal("0.50")

# --- each kind ------------------------------------------------------------------------------------------------------


def test_under_a_key_rows_are_what_was_sent() -> None:
    batch, last = decoded(
        [
            insert(1, ["1", "x", "0.50"]),
            insert(1, ["2", None, None]),
            update(1, ["1", "", "0.50"]),
            delete(1, "K", ["2", None, None]),
        ],
        BY_KEY,
    )
    assert rows(batch) == [
        ("insert", 1, (1, "x", HALF), [], None),
        ("insert", 2, (2, None, None), [], None),
        ("update", 4, (1, "", HALF), [], None),
        ("delete", 5, (2, None, None), [], (2, None, None)),
    ]
    assert last == 5
    change = batch.to_pylist()[0]
    assert (change["_commit_lsn"], change["_commit_ts"], change["_xid"]) == (100, MOMENT, 4_294_967_295)


def test_decoding_does_not_import_pandas() -> None:
    """It would take longer than all else that a stream does before its first row."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "helpers")])
    code = (
        "import sys, test_changes as t;"
        " t.decoded([t.insert(1, ['1', 'x', '0.50']), t.delete(1, 'K', ['2', None, None])], t.BY_KEY);"
        " print('pandas' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


def test_under_full_rows_have_their_old_values() -> None:
    assert one_commit(
        update(2, ["1", "y", None], "O", ["1", "x", "0.50"]),
        delete(2, "O", ["1", None, "0.50"]),
        table=FULL,
    ) == [
        ("update", 2, (1, "y", None), [], (1, "x", HALF)),
        ("delete", 3, (1, None, HALF), [], (1, None, HALF)),
    ]


@pytest.mark.parametrize(
    ("table", "tag", "old"), [(BY_KEY, "K", ["1", None, None]), (FULL, "O", ["1", "x", "0.50"])], ids=["key", "full"]
)
def test_a_changed_key_is_a_delete_and_an_insert(table: StreamedTable, tag: str, old: Image) -> None:
    before = (1, None, None) if tag == "K" else (1, "x", HALF)
    later_old: Image = ["2", "x", "0.50"] if tag == "O" else []
    assert one_commit(
        insert(table.oid, ["1", "x", "0.50"]),
        update(table.oid, ["2", "x", "0.50"], tag, old),
        update(table.oid, ["2", "z", None], "O" if tag == "O" else "", later_old),
        table=table,
    ) == [
        ("insert", 1, (1, "x", HALF), [], None),
        ("delete", 2, before, [], before),
        ("insert", 3, (2, "x", HALF), [], None),
        ("update", 5, (2, "z", None), [], (2, "x", HALF) if tag == "O" else None),
    ]


def test_without_a_primary_key_every_update_under_full_is_one() -> None:
    message = update(3, ["2", "x", None], "O", ["1", "x", None])
    assert one_commit(message, table=KEYLESS) == [("update", 2, (2, "x", None), [], (1, "x", None))]


def test_key_changes_among_other_rows_keep_their_places() -> None:
    messages = [
        *(insert(1, [str(i), "x", None]) for i in range(3)),
        update(1, ["10", "x", None], "K", ["0", None, None]),
        update(1, ["1", "y", None]),
        update(1, ["12", "x", None], "K", ["2", None, None]),
        delete(1, "K", ["1", None, None]),
    ]
    found = one_commit(*messages, table=BY_KEY)
    assert [(kind, seq, values[0]) for kind, seq, values, _, _ in found] == [
        *(("insert", 1, 0), ("insert", 2, 1), ("insert", 3, 2)),
        *(("delete", 4, 0), ("insert", 5, 10), ("update", 7, 1), ("delete", 8, 2), ("insert", 9, 12)),
        ("delete", 10, 1),
    ]


# --- values that did not travel -------------------------------------------------------------------------------------


def test_a_value_that_did_not_travel_is_listed() -> None:
    assert one_commit(
        update(1, ["1", UNCHANGED, "0.50"]),
        update(1, ["1", UNCHANGED, UNCHANGED]),
        update(1, ["2", UNCHANGED, "0.50"], "K", ["1", None, None]),
        insert(1, ["3", None, None]),
        table=BY_KEY,
    ) == [
        ("update", 2, (1, None, HALF), ["a"], None),
        ("update", 4, (1, None, None), ["a", "b"], None),
        ("delete", 5, (1, None, None), [], (1, None, None)),
        ("insert", 6, (2, None, HALF), ["a"], None),
        ("insert", 7, (3, None, None), [], None),
    ]


def test_under_full_the_old_row_has_it() -> None:
    assert one_commit(
        update(2, ["1", UNCHANGED, None], "O", ["1", "long", "0.50"]),
        update(2, ["2", UNCHANGED, "0.50"], "O", ["1", "long", None]),
        update(2, ["2", None, "0.50"], "O", ["2", "long", "0.50"]),
        table=FULL,
    ) == [
        ("update", 2, (1, "long", None), [], (1, "long", HALF)),
        ("delete", 3, (1, "long", None), [], (1, "long", None)),
        ("insert", 4, (2, "long", HALF), [], None),
        ("update", 6, (2, None, HALF), [], (2, "long", HALF)),
    ]


def test_a_toasted_key_comes_with_updates_that_leave_it_alone() -> None:
    """heapam.c logs the old key where a value of it is stored out of line, since the new row does not have it."""
    table = streamed(1, "t", {"id": "int4", "k": "text", "a": "text"}, ["id", "k"])
    assert one_commit(
        update(1, ["1", UNCHANGED, "x"], "K", ["1", "long", None]),
        update(1, ["1", "long", UNCHANGED], "K", ["1", "long", None]),
        update(1, ["2", UNCHANGED, "x"], "K", ["1", "long", None]),
        update(1, ["2", "other", UNCHANGED], "K", ["2", "long", None]),
        table=table,
    ) == [
        ("update", 2, (1, "long", "x"), [], (1, "long", None)),
        ("update", 4, (1, "long", None), ["a"], (1, "long", None)),
        ("delete", 5, (1, "long", None), [], (1, "long", None)),
        ("insert", 6, (2, "long", "x"), [], None),
        ("delete", 7, (2, "long", None), [], (2, "long", None)),
        ("insert", 8, (2, "other", None), ["a"], None),
    ]


def test_a_partition_with_more_identity_than_its_root_sends_all_old_values() -> None:
    """pgoutput labels old values by the root's identity; those of a partition that is FULL come with every update."""
    assert one_commit(
        update(1, ["1", UNCHANGED, "0.50"], "K", ["1", "long", None]),
        update(1, ["2", "y", "0.50"], "K", ["1", "x", "0.50"]),
        table=BY_KEY,
    ) == [
        ("update", 2, (1, "long", HALF), [], (1, "long", None)),
        ("delete", 3, (1, "x", HALF), [], (1, "x", HALF)),
        ("insert", 4, (2, "y", HALF), [], None),
    ]
    batch, _ = decoded([update(1, ["1", "y", None], "K", ["1", "x", None])], BY_KEY, layout=ENVELOPE)
    assert [json.loads(row["before"]) for row in batch.to_pylist()] == [{"id": 1, "a": "x"}]


# --- several relations, commits, chunks -----------------------------------------------------------------------------


def test_rows_of_several_tables_stay_in_order_and_others_only_count() -> None:
    messages = [
        insert(1, ["1", "x", None]),
        update(OTHER, ["anything"]),
        insert(2, ["2", "x", None]),
        update(1, ["3", "x", None], "K", ["1", None, None]),
        insert(OTHER, []),
        delete(2, "O", ["2", "x", None]),
        insert(1, ["4", "x", None]),
    ]
    batch, last = decoded(messages, BY_KEY, FULL, layout=ENVELOPE)
    found = [(r["_table"], r["_change_type"], r["_seq"], json.loads(r["key"])["id"]) for r in batch.to_pylist()]
    assert found == [
        ("public.by_key", "insert", 1, 1),
        ("public.full", "insert", 4, 2),
        ("public.by_key", "delete", 5, 1),
        ("public.by_key", "insert", 6, 3),
        ("public.full", "delete", 8, 2),
        ("public.by_key", "insert", 9, 4),
    ]
    assert last == 9


def test_numbers_begin_anew_with_each_commit_and_go_on_within_one() -> None:
    messages = [insert(1, [str(i), None, None]) for i in range(5)]
    batch, last = decoded(messages, BY_KEY, runs=[run(2, 100, after_seq=40), run(1, 200), run(2, 300)])
    assert [(row["_commit_lsn"], row["_seq"]) for row in batch.to_pylist()] == [
        *((100, 41), (100, 42), (200, 1), (300, 1), (300, 2)),
    ]
    assert last == 2


def test_a_chunk_without_wanted_rows_is_empty() -> None:
    for skip, messages in ((NOTHING, [insert(OTHER, ["1"]), truncate(OTHER)]), (Position(Lsn(100)), [insert(1, [])])):
        batch, last = decoded(messages, BY_KEY, skip=skip)
        assert (batch.num_rows, last) == (0, len(messages))


def test_relations_without_rows_behind_the_skip_are_not_asked_for() -> None:
    """What the stream said of them is not known again after a new start in the middle."""

    def describe(oid: int, position: Position) -> Described:
        assert (oid, position) == (2, (100, 3))
        return described(FULL)

    decoder = ChangeDecoder(TYPED, TYPED.schema([FULL]))
    messages = [insert(1, ["1", None, None]), truncate(1), insert(2, ["2", None, None])]
    batch, _ = decoder.decode(Messages.joined(messages), [run(3)], describe, Position(Lsn(100), 2))
    assert batch.column("id").to_pylist() == [2]


# --- layouts ----------------------------------------------------------------------------------------------------------


def announced(table: StreamedTable) -> Described:
    return replace(described(table), announced=f"columns of {table.name}")


def test_a_layout_stands_right_before_the_first_row_that_has_it() -> None:
    moved = update(1, ["2", None, None], "K", ["1", None, None])
    messages = [insert(OTHER, []), moved, insert(2, ["5", None, None]), truncate(OTHER, 2, 3), update(1, ["3"] * 3)]
    batch, last = decoded(messages, announced(BY_KEY), announced(FULL), announced(KEYLESS), layout=ENVELOPE)
    assert [(row["_change_type"], row["_seq"], row["_table"]) for row in batch.to_pylist()] == [
        ("schema", 2, "public.by_key"),
        ("delete", 2, "public.by_key"),
        ("insert", 3, "public.by_key"),
        ("schema", 4, "public.full"),
        ("insert", 4, "public.full"),
        ("truncate", 6, "public.full"),
        ("schema", 7, "public.keyless"),
        ("truncate", 7, "public.keyless"),
        ("update", 9, "public.by_key"),
    ]
    assert last == 9
    said = batch.to_pylist()[0]
    assert (said["after"], said["key"], said["before"], said["_unchanged"], said["_commit_lsn"], said["_xid"]) == (
        *("columns of public.by_key", None, None, []),
        *(100, 4_294_967_295),
    )


def test_a_plain_update_is_announced_with_its_own_number() -> None:
    batch, _ = decoded([update(1, ["1", "x", None])], announced(BY_KEY), layout=ENVELOPE)
    assert batch.column("_seq").to_pylist() == [2, 2]


def test_a_layout_and_its_row_are_never_cut_apart() -> None:
    messages = [insert(1, ["1", "x", None]), insert(2, ["1", "x", None])]
    tables = (announced(BY_KEY), announced(FULL))
    batch, _ = decoded(messages, *tables, layout=ENVELOPE)
    ends = [rows_through(batch, Position(Lsn(100), seq), batch.schema) for seq in range(3)]
    assert ends == [0, 2, 4]
    # The first rows were handed out, and the row that is left has been announced before.
    later, _ = decoded(messages, announced(BY_KEY), described(FULL), layout=ENVELOPE, skip=Position(Lsn(100), 1))
    assert later.column("_change_type").to_pylist() == ["insert"]


def test_what_cannot_be_read_is_refused_for_the_first_row_that_is_not_left_out() -> None:
    refused = replace(described(BY_KEY), since=200, refused=SchemaChangedError("column b was renamed"))
    messages = [insert(1, ["1", "x", None]), insert(1, ["2", "x", None])]
    assert rows(decoded(messages, refused, runs=[run(2, 100)])[0]) == []
    with pytest.raises(SchemaChangedError, match="column b was renamed"):
        decoded(messages, refused, runs=[run(1, 100), run(1, 200)])


def test_nothing_is_announced_where_a_truncate_is_not_read() -> None:
    quiet = replace(ENVELOPE, on_truncate="ignore")
    batch, _ = decoded([truncate(2), insert(2, ["1", None, None])], announced(FULL), layout=quiet)
    assert [(row["_change_type"], row["_seq"]) for row in batch.to_pylist()] == [("schema", 2), ("insert", 2)]


def test_a_skip_may_end_between_a_delete_and_its_insert() -> None:
    messages = [update(1, ["2", None, None], "K", ["1", None, None]), insert(1, ["3", None, None])]
    kinds = {
        seq: [(kind, number) for kind, number, *_ in rows(decoded(messages, BY_KEY, skip=Position(Lsn(100), seq))[0])]
        for seq in range(4)
    }
    assert kinds == {
        0: [("delete", 1), ("insert", 2), ("insert", 3)],
        1: [("insert", 2), ("insert", 3)],
        2: [("insert", 3)],
        3: [],
    }


# --- truncate -------------------------------------------------------------------------------------------------------


def test_a_truncate_is_a_row_for_each_table_that_is_read() -> None:
    messages = [insert(1, ["1", None, None]), truncate(2, OTHER, 1), insert(2, ["2", None, None])]
    batch, last = decoded(messages, BY_KEY, FULL, layout=ENVELOPE)
    assert [(r["_table"], r["_change_type"], r["_seq"]) for r in batch.to_pylist()] == [
        ("public.by_key", "insert", 1),
        ("public.full", "truncate", 2),
        ("public.by_key", "truncate", 4),
        ("public.full", "insert", 5),
    ]
    assert [r["after"] for r in batch.to_pylist()][1:3] == [r["key"] for r in batch.to_pylist()][1:3] == [None] * 2
    assert last == 5
    for skip, left in ((2, [4, 5]), (3, [4, 5]), (4, [5])):
        batch, _ = decoded(messages, BY_KEY, FULL, layout=ENVELOPE, skip=Position(Lsn(100), skip))
        assert batch.column("_seq").to_pylist() == left


@pytest.mark.parametrize("before_image", [True, False])
def test_a_typed_truncate_has_no_values(before_image: bool) -> None:
    layout = replace(TYPED, before_image=before_image)
    found = one_commit(truncate(1), insert(1, ["1", "x", None]), table=BY_KEY, layout=layout)
    assert found[0] == ("truncate", 1, (None, None, None), [], None)
    assert found[1][:2] == ("insert", 2)


def test_truncate_ignored_takes_its_numbers_all_the_same() -> None:
    layout = replace(TYPED, on_truncate="ignore")
    found = one_commit(truncate(1, 2, OTHER), insert(1, ["1", None, None]), table=BY_KEY, layout=layout)
    assert [row[:2] for row in found] == [("insert", 4)]


def test_truncate_refused_names_the_table_and_the_commit() -> None:
    layout = replace(TYPED, on_truncate="fail")
    with pytest.raises(SchemaChangedError, match=r"public\.by_key was truncated by the commit at 0/64") as caught:
        decoded([truncate(OTHER, 1)], BY_KEY, layout=layout)
    assert "onTruncate=emit" in str(caught.value)
    # Neither another table's, nor one that was handed out already.
    decoded([truncate(OTHER)], BY_KEY, layout=layout)
    decoded([truncate(1)], BY_KEY, layout=layout, skip=Position(Lsn(100), 1))


# --- columns that moved ---------------------------------------------------------------------------------------------


def test_columns_are_found_by_name_wherever_they_are() -> None:
    moved = described(FULL, ["new", "b", "id"])
    assert one_commit(
        insert(2, ["ignored", "0.50", "1"]),
        update(2, [None, UNCHANGED, "2"], "O", [None, "0.50", "1"]),
        update(2, ["y", None, "2"], "O", ["x", "0.50", "2"]),
        delete(2, "O", ["z", None, "2"]),
        table=moved,
    ) == [
        # The column a is not there, so its value did not travel.
        ("insert", 1, (1, None, HALF), ["a"], None),
        ("delete", 2, (1, None, HALF), [], (1, None, HALF)),
        ("insert", 3, (2, None, HALF), ["a"], None),
        ("update", 5, (2, None, None), ["a"], (2, None, HALF)),
        ("delete", 6, (2, None, None), [], (2, None, None)),
    ]


def test_in_the_envelope_a_column_that_is_not_there_is_left_out() -> None:
    batch, _ = decoded(
        [insert(2, ["ignored", "0.50", "1"]), delete(2, "O", ["z", None, "2"])],
        described(FULL, ["new", "b", "id"]),
        layout=ENVELOPE,
    )
    assert [(r["key"], r["after"], r["before"]) for r in batch.to_pylist()] == [
        ('{"id":1}', '{"id":1,"b":"0.50"}', None),
        ('{"id":2}', None, '{"id":2,"b":null}'),
    ]


def test_a_relation_of_other_width_than_its_rows_is_refused() -> None:
    with pytest.raises(WireError, match="Insert: expected 2 columns, as its Relation message says"):
        decoded([insert(1, ["1", None, None])], described(BY_KEY, ["id", "a"]))


@pytest.mark.parametrize("layout", [TYPED, ENVELOPE], ids=["typed", "envelope"])
def test_a_table_without_columns_has_rows(layout: Layout) -> None:
    table = streamed(1, "t", {}, (), "f")
    batch, last = decoded([insert(1, []), insert(1, [])], table, layout=layout)
    assert (batch.column("_seq").to_pylist(), last) == ([1, 2], 2)


def test_a_table_of_the_most_columns_is_decoded() -> None:
    table = streamed(1, "t", {f"c{i}": "text" for i in range(1600)}, ["c0"])
    new: Image = [[f"{i}", None, "", UNCHANGED][i % 4] for i in range(1600)]
    ((_, _, values, unchanged, _),) = one_commit(update(1, new), table=table)
    assert list(values) == [None if value == UNCHANGED else value for value in new]
    assert unchanged == [f"c{i}" for i in range(3, 1600, 4)]


# --- values that are refused ----------------------------------------------------------------------------------------

WITH_DATE = streamed(1, "public.t", {"id": "int4", "A day": "date"}, ["id"])


def test_a_refused_value_names_its_place() -> None:
    messages = [insert(1, ["1", "2024-01-01"]), update(1, ["2", "infinity"], "K", ["1", None])]
    with pytest.raises(UnrepresentableError) as caught:
        decoded(messages, WITH_DATE)
    text = str(caught.value)
    assert 'public.t, column "A day" (date), the change at 0/3 in the commit at 0/64: infinity' in text
    assert 'asString="A day"' in text


def test_a_refused_value_is_null_where_that_was_asked_for() -> None:
    layout = replace(TYPED, unrepresentable="null")
    found = one_commit(
        insert(1, ["1", "infinity"]),
        update(1, ["1", "2024-01-01"], "O", ["1", "0001-01-01 BC"]),
        table=replace(WITH_DATE, identity="f"),
        layout=layout,
    )
    assert found == [
        ("insert", 1, (1, None), [], None),
        ("update", 3, (1, dt.date(2024, 1, 1)), [], (1, None)),
    ]


def test_what_was_handed_out_is_not_refused_any_more() -> None:
    messages = [insert(1, ["1", "infinity"]), insert(1, ["2", "2024-01-01"])]
    batch, _ = decoded(messages, WITH_DATE, skip=Position(Lsn(100), 1))
    assert batch.column("id").to_pylist() == [2]


@pytest.mark.parametrize(
    ("messages", "layout", "what"),
    [
        ([insert(1, ["1", "2024-13-01"])], TYPED, 'pgoutput: public.t, column "A day" (date): expected the text of'),
        ([delete(1, "K", ["x", None])], TYPED, "pgoutput: public.t, column id (int4): expected the text of an integer"),
        ([update(1, ["1", None], "O", ["", None])], TYPED, "column id (int4)"),
        ([insert(1, ["x", None])], ENVELOPE, "envelope: column id: expected a JSON integer"),
    ],
)  # fmt: skip
def test_malformed_values_name_their_column_and_hold_no_value(messages: list[bytes], layout: Layout, what: str) -> None:
    with pytest.raises(WireError) as caught:
        decoded(messages, WITH_DATE, layout=layout)
    assert what in str(caught.value)
    assert "2024-13-01" not in str(caught.value)


@pytest.mark.parametrize("layout", [TYPED, ENVELOPE], ids=["typed", "envelope"])
def test_other_encodings_than_utf_8_are_refused(layout: Layout) -> None:
    table = streamed(2, "public.t", {"k": "text", "a": "text"}, ["k"], "f")
    for old, new in ((["k", "a"], ["k", "?"]), (["?", "a"], ["k", "a"]), (["k", "?"], ["l", "?"])):
        message = update(2, new, "O", old).replace(b"?", b"\xff")
        with pytest.raises(UnrepresentableError, match=r"public\.t, column [ka] \(text\).* the change at .*UTF-8"):
            decoded([message], table, layout=layout)


def test_null_and_empty_differ() -> None:
    table = streamed(1, "t", {"id": "int4", "a": "text", "o": "bytea", "l": "int4[]"}, ["id"])
    assert [row[2] for row in one_commit(
        insert(1, ["1", "", "\\x", "{}"]), insert(1, ["2", None, None, None]), insert(1, ["3", "n", "\\x00", "{NULL}"]),
        table=table,
    )] == [(1, "", b"", []), (2, None, None, None), (3, "n", b"\0", [None])]  # fmt: skip


# --- the snapshot's rows --------------------------------------------------------------------------------------------


def test_rows_of_the_snapshot_have_the_schema_of_changes() -> None:
    columns = [pa.array([1, 2], pa.int32()), pa.array(["x", None]), pa.array([HALF, None], pa.decimal128(10, 2))]
    batch = snapshot_rows(columns, 2, Lsn(99), TYPED, BY_KEY, TYPED.schema([BY_KEY]))
    batch.validate(full=True)
    assert rows(batch) == [
        ("snapshot", 0, (1, "x", HALF), [], None),
        ("snapshot", 0, (2, None, None), [], None),
    ]
    assert [(r["_commit_lsn"], r["_commit_ts"], r["_xid"]) for r in batch.to_pylist()] == [(99, None, None)] * 2
    texts = [pa.array(["1", "2"]), pa.array(["x", None]), pa.array(["0.50", None])]
    batch = snapshot_rows(texts, 2, Lsn(99), ENVELOPE, BY_KEY, ENVELOPE_SCHEMA)
    batch.validate(full=True)
    assert [(r["_table"], r["key"], r["after"], r["before"]) for r in batch.to_pylist()] == [
        ("public.by_key", '{"id":1}', '{"id":1,"a":"x","b":"0.50"}', None),
        ("public.by_key", '{"id":2}', '{"id":2,"a":null,"b":null}', None),
    ]


# --- random workloads, against a decoder of single rows -------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """One message: of rows, an old image by its tag; ``oids`` are those of a truncate."""

    kind: str
    oid: int = 0
    tag: str = ""
    old: tuple[Value, ...] = ()
    new: tuple[Value, ...] = ()
    oids: tuple[int, ...] = ()

    def octets(self) -> bytes:
        if self.kind == "T":
            return truncate(*self.oids)
        if self.kind == "I":
            return insert(self.oid, self.new)
        return update(self.oid, self.new, self.tag, self.old) if self.new else delete(self.oid, self.tag, self.old)


WORKLOAD_COLUMNS = {"id": "int4", "k": "text", "a": "text", "b": "numeric"}
TABLES = {
    1: streamed(1, "public.one", WORKLOAD_COLUMNS, ["id", "k"]),
    2: streamed(2, "public.two", WORKLOAD_COLUMNS, ["id", "k"], "f"),
    3: streamed(3, "public.three", WORKLOAD_COLUMNS, (), "f"),
}
ENVELOPE_TABLES = {oid: streamed(oid, t.name, WORKLOAD_COLUMNS, t.key, t.identity) for oid, t in TABLES.items()}


@st.composite
def sent_rows(draw: st.DrawFn) -> Sent:
    oid = draw(st.sampled_from([1, 2, 3, OTHER]))
    kind = draw(st.sampled_from("IUUUDT"))
    if kind == "T":
        return Sent("T", oids=tuple(draw(st.lists(st.sampled_from([1, 2, 3, OTHER]), min_size=1, unique=True))))
    key = st.tuples(st.sampled_from("12"), st.sampled_from(["", "k", "ä"]))
    rest = st.tuples(st.none() | st.text('x"\\\n🦆', max_size=3), st.none() | st.sampled_from(["0.50", "-1.00"]))
    whole: tuple[Value, ...] = draw(key) + draw(rest)
    if kind == "I":
        return Sent("I", oid, new=whole)
    tag = "K" if oid == 1 else "O"
    old = (*whole[:2], None, None) if tag == "K" else whole
    if kind == "D":
        return Sent("D", oid, tag, old)
    new: list[Value] = [*draw(key), *draw(rest)] if draw(st.booleans()) else [*whole[:2], *draw(rest)]
    changed_key = tuple(new[:2]) != whole[:2]
    # A key that stays the same comes with an update where it is TOASTed.
    sends_old = tag == "O" or changed_key or draw(st.booleans())
    for i in range(4):
        same = new[i] == whole[i] or i >= 2
        if same and whole[i] is not None and (i >= 2 or sends_old) and draw(st.booleans()):
            new[i] = UNCHANGED
    return Sent("U", oid, tag if sends_old else "", old if sends_old else (), tuple(new))


WORKLOADS = st.lists(st.lists(sent_rows(), max_size=6), min_size=1, max_size=6).filter(any)


def python_value(name: str, text: Value) -> Any:
    if not isinstance(text, str):
        return None
    return {"int4": int, "numeric": Decimal}.get(WORKLOAD_COLUMNS[name], str)(text)


def expected(commits: Sequence[Sequence[Sent]], oid: int) -> Iterator[tuple[Any, ...]]:
    """(commit, *row) of one table, decoded one by one."""
    table = TABLES[oid]

    def row(lsn: int, kind: str, seq: int, image: Image, unchanged: list[str], old: Image | None) -> tuple[Any, ...]:
        def values(some: Image) -> tuple[Any, ...]:
            return tuple(map(python_value, WORKLOAD_COLUMNS, some))

        return lsn, kind, seq, values(image), unchanged, None if old is None else values(old)

    for c, commit in enumerate(commits):
        lsn, seq = 100 * (c + 1), 1
        for m in commit:
            mine = m.oid == oid
            if m.kind == "T":
                if oid in m.oids:
                    yield row(lsn, "truncate", seq + m.oids.index(oid), [None] * 4, [], None)
                seq += len(m.oids)
            elif m.kind == "I":
                if mine:
                    yield row(lsn, "insert", seq, m.new, [], None)
                seq += 1
            elif m.kind == "D":
                if mine:
                    yield row(lsn, "delete", seq, m.old, [], m.old)
                seq += 1
            else:
                if mine:
                    new: list[Value] = list(m.new)
                    if m.tag:
                        new = [
                            old if new == UNCHANGED and old is not None else new
                            for old, new in zip(m.old, new, strict=True)
                        ]
                    names = [name for name, value in zip(WORKLOAD_COLUMNS, new, strict=True) if value == UNCHANGED]
                    keyed = oid != 3 and m.tag and tuple(new[:2]) != m.old[:2]
                    if keyed:
                        yield row(lsn, "delete", seq, m.old, [], m.old)
                    yield row(
                        lsn,
                        "insert" if keyed else "update",
                        seq + 1,
                        new,
                        names,
                        m.old if m.tag and not keyed else None,
                    )
                seq += 2
    assert table.oid == oid


def chunks(
    commits: Sequence[Sequence[Sent]],
    cuts: Sequence[int],
    table: Sequence[StreamedTable],
    layout: Layout,
    skip: Position = NOTHING,
) -> Iterator[pa.RecordBatch]:
    """Decode a workload in chunks that end where ``cuts`` say, as the reader of a slot does."""
    flat = [(c, m.octets()) for c, commit in enumerate(commits) for m in commit]
    bounds = sorted({0, len(flat), *(cut % (len(flat) + 1) for cut in cuts)})
    previous, last = -1, 0
    for start, end in pairwise(bounds):
        part = flat[start:end]
        numbers = [c for c, _ in part]
        runs = [run(numbers.count(c), 100 * (c + 1), last if c == previous else 0) for c in dict.fromkeys(numbers)]
        batch, last = decoded([m for _, m in part], *table, layout=layout, runs=runs, skip=skip)
        previous = numbers[-1]
        yield batch


def together(batches: Iterator[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches)


@examples(100)
@given(WORKLOADS, st.sampled_from(sorted(TABLES)), st.lists(st.integers(0, 40), max_size=6))
def test_rows_are_those_that_decoding_one_by_one_gives(commits: list[list[Sent]], oid: int, cuts: list[int]) -> None:
    table = together(chunks(commits, cuts, [TABLES[oid]], TYPED))
    found = [(lsn, *row) for lsn, row in zip(table.column("_commit_lsn").to_pylist(), rows(table), strict=True)]
    assert found == list(expected(commits, oid))


@examples(100)
@given(WORKLOADS, st.lists(st.integers(0, 40), max_size=6), st.integers(0, 60), st.booleans())
def test_chunks_and_skips_anywhere_give_the_same_rows(
    commits: list[list[Sent]], cuts: list[int], place: int, envelope: bool
) -> None:
    tables = list(ENVELOPE_TABLES.values()) if envelope else [TABLES[1]]
    layout = ENVELOPE if envelope else TYPED
    whole = together(chunks(commits, [], tables, layout))
    positions = [
        Position(Lsn(row["_commit_lsn"]), row["_seq"]) for row in whole.select(["_commit_lsn", "_seq"]).to_pylist()
    ]
    # Unique, and in the stream's order.
    assert positions == sorted(set(positions))
    assert together(chunks(commits, cuts, tables, layout)).equals(whole)
    skips = [NOTHING, *positions, *(Position(Lsn(lsn)) for lsn in range(99, 800, 50))]
    skip = skips[place % len(skips)]
    rest = together(chunks(commits, cuts, tables, layout, skip))
    assert rest.equals(whole.slice(sum(position <= skip for position in positions)))
    if len(positions):
        batch = pa.RecordBatch.from_struct_array(whole.to_struct_array().combine_chunks())
        assert rows_through(batch, skip, whole.schema) == sum(position <= skip for position in positions)


@examples(100)
@given(WORKLOADS, st.lists(st.integers(0, 40), max_size=3))
def test_the_envelope_says_what_the_typed_rows_say(commits: list[list[Sent]], cuts: list[int]) -> None:
    envelope = together(chunks(commits, cuts, list(ENVELOPE_TABLES.values()), ENVELOPE)).to_pylist()
    for oid, table in TABLES.items():
        typed = together(chunks(commits, cuts, [table], TYPED)).to_pylist()
        mine = [row for row in envelope if row["_table"] == table.name]
        assert [[row[name] for name in META] for row in mine] == [[row[name] for name in META] for row in typed]
        for row, wanted in zip(mine, typed, strict=True):
            kind = row["_change_type"]
            key, after, before = (None if row[n] is None else json.loads(row[n]) for n in ("key", "after", "before"))
            assert (after is not None) == (kind in ("insert", "update"))
            assert (before is not None) == (wanted[BEFORE] is not None)
            if after is not None:
                assert {name: python_value(name, to_text(after.get(name))) for name in WORKLOAD_COLUMNS} == {
                    name: wanted[name] for name in WORKLOAD_COLUMNS
                }
                assert sorted(WORKLOAD_COLUMNS.keys() - after.keys()) == sorted(row["_unchanged"])
            if before is not None:
                assert list(before) == (["id", "k"] if oid == 1 else list(WORKLOAD_COLUMNS))
                assert all(python_value(n, to_text(v)) == wanted[BEFORE][n] for n, v in before.items())
            if kind == "truncate" or oid == 3:
                assert key is None
            else:
                assert key == {"id": wanted["id"], "k": wanted["k"]}


def to_text(value: Any) -> Value:
    return None if value is None else str(value)


@examples(200)
@given(st.data())
def test_mutated_messages_raise_nothing_but_our_errors(data: st.DataObject) -> None:
    commits = data.draw(st.lists(st.lists(sent_rows(), min_size=1, max_size=4), min_size=1, max_size=1))
    messages = [m.octets() for m in commits[0]]
    which = data.draw(st.integers(0, len(messages) - 1))
    octets = bytearray(messages[which])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(len(HEADER) + 5, max(len(octets), len(HEADER) + 5)))
        octets[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    messages[which] = bytes(octets)
    for tables, layout in (([TABLES[1]], TYPED), (list(ENVELOPE_TABLES.values()), ENVELOPE)):
        with contextlib.suppress(DefiniteError):
            decoded(messages, *tables, layout=layout)


def test_a_field_reads_the_same_wherever_its_values_lie() -> None:
    """Values of rows without an old image lie nowhere: their positions are behind those of rows before."""
    table = streamed(2, "t", {"id": "int4", "f": "float8", "l": "int4[]", "o": "bytea", "ok": "bool"}, ["id"], "f")
    old = ["1", "0.5", "{1,2}", "\\x01ff", "t"]
    messages = [
        delete(2, "O", old),
        insert(2, ["2", "1.5", "{}", "\\x", "f"]),
        update(2, ["1", None, None, None, None], "O", old),
        insert(2, ["3", None, None, None, None]),
    ]
    found = one_commit(*messages, table=table)
    wanted = (1, 0.5, [1, 2], b"\x01\xff", True)
    assert [row[4] for row in found] == [wanted, None, wanted, None]
    assert [row[2] for row in found] == [
        wanted,
        (2, 1.5, [], b"", False),
        (1, None, None, None, None),
        (3, None, None, None, None),
    ]
