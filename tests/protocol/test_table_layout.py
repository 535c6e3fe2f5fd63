"""Layouts are kept in offsets as they were, and rows say them as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pg_cdc_source.offsets import Lsn, Position
from pg_cdc_source.protocol.table_layout import (
    LayoutChange,
    LayoutColumn,
    LayoutRecord,
    TableLayout,
    from_text,
    has_other_texts,
    to_text,
    without_writers,
)
from pg_cdc_source.values.registry import CatalogType

ARRAY = CatalogType(1009, -1, "_text", element=CatalogType(25, -1, "text"), element_oid=25)
ID = LayoutColumn("id", 1, "integer", 23, -1, CatalogType(23), "int", nullable=False, key=True)
NAME = LayoutColumn(
    'na"me ü',
    None,
    "dom",
    70000,
    -1,
    ARRAY,
    "string",
    nullable=True,
    key=False,
)
LAYOUT = TableLayout(7, "public.t", "d", (ID, NAME), 2, "file", None)
RECORD = LayoutRecord(Position(Lsn(100), 3), LAYOUT, (LayoutChange("added", 2, "x", None, "0"),))


def test_a_text_gives_the_same_records_again() -> None:
    records = (RECORD, replace(RECORD, position=Position(Lsn(200), 1), changes=()))
    assert from_text(to_text(records)) == records
    assert (to_text([]), from_text("")) == ("", ())


@pytest.mark.parametrize("primary", [None, 5])
def test_what_earlier_releases_did_not_write_is_kept(primary: int | None) -> None:
    record = replace(RECORD, layout=replace(LAYOUT, identity="f", primary=primary, insides="16400eabcdef 16410c1,2"))
    assert from_text(to_text([record])) == (record,)


@pytest.mark.parametrize(
    ("known", "now", "expected"),
    [
        ("", "16400exabcdef000001", False),
        ("16400exabcdef000001", "16400exabcdef000001", False),
        ("16400exabcdef000001", "16400exabcdef000001012345000002", False),
        ("16400exabcdef000001012345000002", "16400exabcdee000001012345000002", True),
        # It was renamed, and renamed back.
        ("16400exabcdef000001", "16400exabcdef000003", True),
        ("16400exabcdef000001", "", False),
        ("16410c1,2 16420ex", "16410c1,2 16420exabcdef000001", False),
        # Of an earlier release.
        ("16400eabcdef", "16400exabcdef000001012345000002", False),
        ("16400eabcdef", "16400exabcdee000001", True),
        ("16410c1,2", "16410c1,2,3", True),
        ("16410c1,2", "16410c1", True),
        ("16410c1,2", "16411c1,2,3", False),
    ],
)
def test_values_have_other_texts_where_what_is_known_of_their_types_is_another(
    known: str, now: str, expected: bool
) -> None:
    assert has_other_texts(known, now) == expected


def test_labels_are_the_same_whoever_has_written_them() -> None:
    assert without_writers("16400exabcdef000001012345000002 16410c1,2") == "16400eabcdef012345 16410c1,2"
    assert without_writers("16400eabcdef 16410c1,2") == "16400eabcdef 16410c1,2"


@pytest.mark.parametrize("text", ["x", "eJw=", to_text([RECORD])[:-8]])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layouts of tables"):
        from_text(text)


def test_many_tables_take_little_room() -> None:
    columns = tuple(replace(NAME, name=f"column_{i}", attnum=i) for i in range(20))
    records = [LayoutRecord(Position(Lsn(100), 0), replace(LAYOUT, oid=i, columns=columns), ()) for i in range(200)]
    assert len(to_text(records)) < 20_000


def test_a_row_says_columns_and_changes() -> None:
    assert json.loads(RECORD.to_object()) == {
        "columns": [
            {"name": "id", "attnum": 1, "type": "integer", "type_oid": 23, "spark": "int", "nullable": False,
             "key": True},
            {"name": 'na"me ü', "attnum": None, "type": "dom", "type_oid": 70000, "spark": "string",
             "nullable": True, "key": False},
        ],
        "changes": [{"change": "added", "attnum": 2, "name": "x", "was": None, "fill": "0"}],
    }  # fmt: skip


def test_rows_are_read_by_the_type_that_a_domain_is_over() -> None:
    table = LAYOUT.as_streamed()
    assert [codec.column.type_oid for codec in table.codecs] == [23, 1009]
    assert (table.name, table.key, table.type_oids) == ("public.t", ("id",), ((23, -1), (70000, -1)))
