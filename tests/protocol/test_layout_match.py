"""Layouts are found and compared by column numbers, and where the catalog is ahead nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pg_cdc_source.protocol.layout_match import find_layout
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.protocol.table_layout import (
    CatalogColumn,
    CatalogLayout,
    LayoutChange,
    TableLayout,
    TypeFacts,
)
from pg_cdc_source.values.registry import CatalogType

INT, TEXT, BIGINT, VARCHAR = 23, 25, 20, 1043
NAMES = {INT: "integer", TEXT: "text", BIGINT: "bigint", VARCHAR: "character varying"}
# (number, name, type), of the catalog also what old rows have.
Given = tuple[Any, ...]
T: list[Given] = [(1, "id", INT), (2, "a", TEXT)]
Changes = list[LayoutChange]


def type_of(oid: int, typmod: int) -> TypeFacts:
    return TypeFacts(NAMES[oid], CatalogType(oid), "string")


def sent(*columns: tuple[str, int], key: Sequence[str] = ("id",), identity: str = "d") -> RelationMessage:
    return RelationMessage(
        7, "public", "t", identity, tuple(RelationColumn(identity == "f" or n in key, n, o, -1) for n, o in columns)
    )


def catalog(columns: list[Given], **facts: Any) -> CatalogLayout:
    described = tuple(
        CatalogColumn(number, name, oid, -1, name != "id", fill[0] if fill else None, published=True)
        for number, name, oid, *fill in columns
    )
    last = max(number for number, *_ in columns)
    return replace(CatalogLayout(described, "d", ("id",), last, "file", "altered"), **facts)


def known(columns: list[Given] = T, **facts: Any) -> TableLayout:
    message = sent(*((name, oid) for _, name, oid in columns))
    return replace(find_layout(message, None, catalog(columns), type_of)[0], **facts)


def shown(found: tuple[TableLayout, Sequence[LayoutChange]]) -> tuple[list[int | None], list[tuple[Any, ...]]]:
    layout, changes = found
    told = [tuple(v for v in (c.change, c.attnum, c.name, c.was, c.fill) if v is not None) for c in changes]
    return [column.attnum for column in layout.columns], told


def test_the_first_layout_has_the_catalogs_facts_and_no_changes() -> None:
    layout, changes = find_layout(sent(("id", INT), ("a", TEXT)), None, catalog(T), type_of)
    assert changes == ()
    assert [(c.attnum, c.name, c.type_name, c.nullable, c.key) for c in layout.columns] == [
        (1, "id", "integer", False, True),
        (2, "a", "text", True, False),
    ]
    assert (layout.name, layout.key, layout.last, layout.files) == ("public.t", ("id",), 2, "file")


ID, A, B = ("id", INT), ("a", TEXT), ("b", TEXT)
ALTERED = {"altered": "again"}
REWRITTEN = {"altered": "again", "files": "other"}
NOW: dict[str, tuple[RelationMessage, CatalogLayout, list[int | None], list[tuple[Any, ...]]]] = {
    "nothing": (sent(ID, A), catalog(T), [1, 2], []),
    "VACUUM FULL": (sent(ID, A), catalog(T, files="other"), [1, 2], []),
    "SET DEFAULT": (sent(ID, A), catalog(T, **ALTERED), [1, 2], []),
    "SET DATA TYPE to itself, USING another value": (sent(ID, A), catalog(T, **REWRITTEN), [1, 2], [("rewritten",)]),
    "added": (sent(ID, A, B), catalog([*T, (3, "b", TEXT)], **ALTERED), [1, 2, 3], [("added", 3, "b")]),
    "added with a default": (
        sent(ID, A, B),
        catalog([*T, (3, "b", TEXT, "x")], **ALTERED),
        [1, 2, 3],
        [("added", 3, "b", "x")],
    ),
    "added with a volatile default": (
        sent(ID, A, B),
        catalog([*T, (3, "b", TEXT)], **REWRITTEN),
        [1, 2, 3],
        [("added", 3, "b"), ("rewritten",)],
    ),
    "dropped": (sent(ID), catalog(T[:1], last=2, **ALTERED), [1], [("dropped", 2, "a")]),
    "renamed": (sent(ID, B), catalog([*T[:1], (2, "b", TEXT)], **ALTERED), [1, 2], [("renamed", 2, "b", "a")]),
    "retyped": (
        sent(ID, ("a", BIGINT)),
        catalog([*T[:1], (2, "a", BIGINT)], **REWRITTEN),
        [1, 2],
        [("retyped", 2, "a", "text"), ("rewritten",)],
    ),
    "retyped in place": (
        sent(ID, ("a", VARCHAR)),
        catalog([*T[:1], (2, "a", VARCHAR)], **ALTERED),
        [1, 2],
        [("retyped", 2, "a", "text")],
    ),
    "retyped in place, and rows have another text": (
        sent(ID, ("a", BIGINT)),
        catalog([*T[:1], (2, "a", BIGINT)], **ALTERED),
        [1, 2],
        [("retyped", 2, "a", "text"), ("rewritten",)],
    ),
    "dropped, and another of its type added": (
        sent(ID, B),
        catalog([*T[:1], (3, "b", TEXT)], **ALTERED),
        [1, 3],
        [("dropped", 2, "a"), ("added", 3, "b"), ("rewritten",)],
    ),
    "dropped and added under another type": (
        sent(ID, ("a", INT)),
        catalog([*T[:1], (3, "a", INT)], **ALTERED),
        [1, 3],
        [("dropped", 2, "a"), ("added", 3, "a")],
    ),
    # From which row on cannot be told, so all rows come again.
    "dropped and added under the same name and type": (
        sent(ID, A),
        catalog([*T[:1], (3, "a", TEXT, "x")], **ALTERED),
        [1, 3],
        [("dropped", 2, "a"), ("added", 3, "a", "x"), ("rewritten",)],
    ),
    "added behind one that came and went": (
        sent(ID, A, B),
        catalog([*T, (4, "b", TEXT)], **ALTERED),
        [1, 2, 4],
        [("added", 4, "b"), ("rewritten",)],
    ),
    "dropped, and another added that it could have become": (
        sent(ID, ("b", VARCHAR)),
        catalog([*T[:1], (3, "b", VARCHAR)], **ALTERED),
        [1, 3],
        [("dropped", 2, "a"), ("added", 3, "b"), ("rewritten",)],
    ),
    "another key": (
        sent(ID, A, key=["id", "a"]),
        catalog(T, key=("id", "a"), **ALTERED),
        [1, 2],
        [("rekeyed", "id, a", "id")],
    ),
    "FULL": (
        sent(ID, A, identity="f"),
        catalog(T, identity="f", **ALTERED),
        [1, 2],
        [("rekeyed", "id", "id")],
    ),
    "the table's name": (
        replace(sent(ID, A), name="u"),
        catalog(T),
        [1, 2],
        [("renamed", "public.u", "public.t")],
    ),
}


@pytest.mark.parametrize("what", NOW)
def test_a_change_that_the_catalog_has_just_had(what: str) -> None:
    relation, now, numbers, changes = NOW[what]
    assert shown(find_layout(relation, known(), now, type_of)) == (numbers, changes)


C = ("c", TEXT)
AHEAD: dict[str, tuple[list[Given], RelationMessage, CatalogLayout | None, list[int | None], list[tuple[Any, ...]]]] = {
    "nothing yet": (T, sent(ID, A), catalog([*T, (3, "b", TEXT)]), [1, 2], []),
    "nothing, the table is gone": (T, sent(ID, A), None, [1, 2], []),
    "nothing, and it is rewritten later": (T, sent(ID, A), catalog(T[:1], last=2, **REWRITTEN), [1, 2], []),
    "the first of two is added": (
        T,
        sent(ID, A, B),
        catalog([*T, (3, "b", TEXT, "x"), (4, "c", TEXT)], **ALTERED),
        [1, 2, 3],
        [("added", 3, "b", "x")],
    ),
    "added, and dropped since": (
        T,
        sent(ID, A, B),
        catalog(T, last=3, **ALTERED),
        [1, 2, None],
        [("added", "b"), ("rewritten",)],
    ),
    "renamed, and another added since": (
        T,
        sent(ID, B),
        catalog([T[0], (2, "b", TEXT), (3, "c", TEXT)], **ALTERED),
        [1, 2],
        [("renamed", 2, "b", "a")],
    ),
    "renamed, and renamed again since": (
        T,
        sent(ID, B),
        catalog([T[0], (2, "c", TEXT)], **ALTERED),
        [1, 2],
        [("renamed", 2, "b", "a")],
    ),
    "renamed or replaced, and dropped since": (
        T,
        sent(ID, B),
        catalog(T[:1], last=3, **ALTERED),
        [1, None],
        [("dropped", 2, "a"), ("added", "b"), ("rewritten",)],
    ),
    "dropped, and another one since": (
        [*T, (3, "b", TEXT)],
        sent(ID, B),
        catalog(T[:1], last=3, **ALTERED),
        [1, 3],
        [("dropped", 2, "a")],
    ),
    "dropped, and the table is gone": (T, sent(ID), None, [1], [("dropped", 2, "a")]),
    "added, and the table is gone": (T, sent(ID, A, B), None, [1, 2, None], [("added", "b"), ("rewritten",)]),
    "nothing yet, and another one in its place since": (
        T,
        sent(ID, A),
        catalog([T[0], (3, "b", INT)], **ALTERED),
        [1, 2],
        [],
    ),
    "nothing, or replaced by its like": (
        T,
        sent(ID, A),
        catalog([T[0], (3, "a", TEXT), (4, "c", TEXT)], **ALTERED),
        [1, None],
        [("dropped", 2, "a"), ("added", "a"), ("rewritten",)],
    ),
    # A new column may have had any name.
    "retyped in place, and replaced since": (
        T,
        sent(ID, ("a", VARCHAR)),
        catalog([T[0], (3, "b", VARCHAR)], **ALTERED),
        [1, None],
        [("dropped", 2, "a"), ("added", "a"), ("rewritten",)],
    ),
    "nothing yet, or replaced by its like, which is renamed since": (
        T,
        sent(ID, A),
        catalog([T[0], (3, "b", TEXT)], **ALTERED),
        [1, None],
        [("dropped", 2, "a"), ("added", "a"), ("rewritten",)],
    ),
    "renamed, and dropped since, and another one has its name": (
        [T[0], (2, "a", INT), (3, "b", TEXT)],
        sent(ID, ("x", INT), B),
        catalog([T[0], (3, "b", TEXT), (4, "a", INT)], **ALTERED),
        [1, 2, 3],
        [("renamed", 2, "x", "a")],
    ),
    "dropped, and another one has its name; one is added since": (
        [*T, (3, "b", TEXT)],
        sent(ID, B),
        catalog([T[0], (2, "b", TEXT), (4, "c", TEXT)], **ALTERED),
        [1, 2],
        [("dropped", 3, "b"), ("renamed", 2, "b", "a")],
    ),
    "two have exchanged their names, or one is new; one is dropped and one added since": (
        [*T, (3, "b", TEXT)],
        sent(ID, B, A),
        catalog([T[0], (2, "b", TEXT), (4, "c", TEXT)], **ALTERED),
        [1, None, None],
        [("dropped", 2, "a"), ("dropped", 3, "b"), ("added", "b"), ("added", "a"), ("rewritten",)],
    ),
    "added behind one that is dropped since": (
        [*T, (3, "b", TEXT)],
        sent(ID, A, B, C),
        catalog([*T, (4, "c", TEXT)], **ALTERED),
        [1, 2, 3, 4],
        [("added", 4, "c")],
    ),
    "added behind one that is generated, which is shown since": (
        T,
        sent(ID, A, C),
        catalog([*T, (3, "b", TEXT), (4, "c", TEXT)], **ALTERED),
        [1, 2, None],
        [("added", "c"), ("rewritten",)],
    ),
    "more columns are gone than anybody can choose of": (
        [*T, *((number, f"c{number}", TEXT) for number in range(3, 25))],
        sent(ID, *((f"c{number}", TEXT) for number in range(3, 14))),
        catalog([T[0]], last=24, **ALTERED),
        [1, *[None] * 11],
        [
            *(("dropped", number, name) for number, name in ((2, "a"), *((n, f"c{n}") for n in range(3, 25)))),
            *(("added", f"c{number}") for number in range(3, 14)),
            ("rewritten",),
        ],
    ),
    "two exchange their names, later": (
        [*T, (3, "b", TEXT)],
        sent(ID, A, B),
        catalog([T[0], (2, "b", TEXT), (3, "a", TEXT)], **ALTERED),
        [1, 2, 3],
        [],
    ),
}


@pytest.mark.parametrize("what", AHEAD)
def test_a_change_that_the_catalog_is_ahead_of(what: str) -> None:
    before, relation, now, numbers, changes = AHEAD[what]
    assert shown(find_layout(relation, known(before), now, type_of)) == (numbers, changes)


def test_a_column_that_was_there_all_the_time_has_values_that_were_not_sent() -> None:
    now = catalog([*T, (3, "b", TEXT)], **ALTERED)
    found = find_layout(sent(ID, A, B), known(last=3), now, type_of)
    assert shown(found) == ([1, 2, 3], [("added", 3, "b"), ("rewritten",)])
    # And which one it is cannot be told where others have come since.
    now = catalog([*T, (3, "b", TEXT), (4, "c", TEXT)], **ALTERED)
    found = find_layout(sent(ID, A, B), known(last=3), now, type_of)
    assert shown(found) == ([1, 2, None], [("added", "b"), ("rewritten",)])


def test_a_column_that_is_not_published_is_not_one_that_was_added() -> None:
    now = catalog([*T, (3, "hidden", TEXT), (4, "b", TEXT), (5, "c", TEXT)], **ALTERED)
    now = replace(now, columns=tuple(replace(c, published=c.name != "hidden") for c in now.columns))
    assert shown(find_layout(sent(ID, A, B), known(), now, type_of)) == ([1, 2, 4], [("added", 4, "b")])


def test_a_table_that_is_gone_keeps_what_the_stream_does_not_say() -> None:
    known, _ = find_layout(sent(ID, A), None, catalog(T), type_of)
    assert find_layout(sent(ID, A), known, None, type_of) == (known, ())


def test_numbers_that_the_catalog_did_not_know_are_learned_without_a_change() -> None:
    first, _ = find_layout(sent(ID, A), None, None, type_of)
    assert [column.attnum for column in first.columns] == [None, None]
    assert shown(find_layout(sent(ID, A), first, catalog(T), type_of)) == ([1, 2], [])


@pytest.mark.parametrize(("primary_key", "key"), [(("id",), ("id",)), (("id", "unpublished"), ()), ((), ())])
def test_under_full_the_key_is_the_primary_key_if_all_of_it_is_sent(primary_key: Any, key: Any) -> None:
    now = catalog(T, identity="f", key=primary_key)
    layout, _ = find_layout(sent(ID, A, identity="f"), None, now, type_of)
    assert layout.key == key


@pytest.mark.parametrize(
    ("relation", "now", "key"),
    [
        (
            sent(("k", INT), A, identity="f"),
            catalog([(1, "later", INT), T[1]], identity="f", key=("later",), **ALTERED),
            ("k",),
        ),
        (sent(ID, A, identity="f"), None, ("id",)),
        (sent(("k", INT), A, identity="f"), None, ()),
        (sent(A, ("k", INT), identity="f"), None, ()),
        (sent(A, identity="f"), catalog([T[1], (3, "b", TEXT)], identity="f", key=(), **ALTERED), ()),
        (sent(ID, A, identity="f"), catalog([*T, (3, "b", TEXT)], identity="f", key=("a",), **ALTERED), ()),
        (sent(ID, A, identity="f"), catalog([*T, (3, "b", TEXT)], identity="d", key=("a",), **ALTERED), ()),
    ],
    ids=[
        "renamed",
        "the table is gone",
        "renamed, and the table is gone",
        "replaced, and the table is gone",
        "dropped",
        "another one by now",
        "another one, and another identity by now",
    ],
)
def test_under_full_the_key_is_the_known_one_where_the_catalog_is_ahead(
    relation: RelationMessage, now: CatalogLayout | None, key: tuple[str, ...]
) -> None:
    layout, _ = find_layout(relation, known(identity="f"), now, type_of)
    assert layout.key == key


@pytest.mark.parametrize(("before", "now", "key"), [(None, 5, ("id",)), (5, 5, ("id",)), (5, 6, ()), (5, None, ())])
def test_under_full_a_primary_key_that_was_away_is_none(
    before: int | None, now: int | None, key: tuple[str, ...]
) -> None:
    relation, at = sent(ID, A, identity="f"), catalog(T, identity="f", primary=now)
    layout, changes = find_layout(relation, known(identity="f", primary=before), at, type_of)
    assert (layout.key, layout.primary) == (key, now)
    assert ("rekeyed" in [change.change for change in changes]) == (key == ())


def test_from_an_index_to_full_the_key_is_that_of_the_catalog_or_none() -> None:
    at = catalog([(1, "a", INT), (2, "id", TEXT)], identity="f", key=("a",), **ALTERED)
    layout, _ = find_layout(sent(ID, A, identity="f"), known(identity="i"), replace(at, last=3), type_of)
    assert layout.key == ("id",)
    layout, _ = find_layout(sent(ID, A, identity="f"), known(identity="i"), replace(at, key=("id",)), type_of)
    assert layout.key == ()


def test_columns_that_are_not_published_do_not_count() -> None:
    now = catalog([T[0], (2, "hidden", TEXT), (3, "a", TEXT)])
    now = replace(now, columns=tuple(replace(c, published=c.name != "hidden") for c in now.columns))
    assert shown(find_layout(sent(ID, A), None, now, type_of)) == ([1, 3], [])
