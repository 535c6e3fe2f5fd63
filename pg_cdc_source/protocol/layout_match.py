"""Find out what the layout of a relation is, and what changed in it: Relation message, known layout and catalog.

- Where it cannot be told, a column was dropped and another added: a rename is never guessed (``column_numbers``).
- Old rows have what the catalog says (``fill``), or, if it cannot say so, the table counts as rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pg_cdc_source.options.names import dotted, listed_names
from pg_cdc_source.protocol.column_numbers import find_numbers, has_gap, may_become
from pg_cdc_source.protocol.pgoutput import RelationColumn, RelationMessage
from pg_cdc_source.protocol.table_layout import (
    CatalogLayout,
    LayoutChange,
    LayoutColumn,
    TableLayout,
    TypeFacts,
    has_other_texts,
    sent_of,
)
from pg_cdc_source.values.registry import CatalogType

# What a type with its modifier is.
TypeOf = Callable[[int, int], TypeFacts]

# Types whose values have the same text, so that a change between them, which leaves rows as they are, changes none:
# varchar and text; varbit and bit.
_LIKE = {1043: 25, 1562: 1560}


def find_layout(
    relation: RelationMessage, known: TableLayout | None, catalog: CatalogLayout | None, type_of: TypeOf
) -> tuple[TableLayout, tuple[LayoutChange, ...]]:
    """Return a relation's layout, and what changed since the ``known`` one; nothing where none is known.

    ``catalog`` is None for a table that is gone.
    """
    sent = relation.columns
    present = catalog if catalog is not None and _is_at(catalog, sent) else None
    numbers = find_numbers(sent, known, catalog, present)
    key = _key(relation, known, catalog, present, numbers)
    last_known = known if catalog is None else catalog
    nullable = {} if last_known is None else {column.attnum: column.nullable for column in last_known.columns}
    columns = tuple(
        _column(column, number, column.name in key, nullable.get(number or 0, True), type_of)
        for column, number in zip(sent, numbers, strict=True)
    )
    facts: CatalogLayout | TableLayout | None = present or known
    layout = TableLayout(
        relation.oid,
        dotted(relation.schema, relation.name),
        relation.identity,
        columns,
        _last(numbers, known, present),
        None if facts is None else facts.files,
        None if facts is None else facts.altered,
        None if facts is None else facts.primary,
        "" if facts is None else facts.insides,
    )
    return layout, () if known is None else tuple(_changes(known, layout, catalog, present))


def find_changes(known: TableLayout, layout: TableLayout, catalog: CatalogLayout) -> tuple[LayoutChange, ...]:
    """Return what changed since the ``known`` layout in one that ``catalog`` has."""
    return tuple(_changes(known, layout, catalog, catalog))


def _is_at(catalog: CatalogLayout, sent: Sequence[RelationColumn]) -> bool:
    """Whether the catalog has just the columns that were sent."""
    return [column.sent for column in catalog.columns if column.published] == list(map(sent_of, sent))


def _column(sent: RelationColumn, number: int | None, key: bool, nullable: bool, type_of: TypeOf) -> LayoutColumn:
    found = type_of(sent.type_oid, sent.typmod)
    return LayoutColumn(
        sent.name, number, found.name, sent.type_oid, sent.typmod, found.type, found.spark, nullable, key
    )


def _key(
    relation: RelationMessage,
    known: TableLayout | None,
    catalog: CatalogLayout | None,
    present: CatalogLayout | None,
    numbers: Sequence[int | None],
) -> frozenset[str]:
    """Return the columns that tell rows apart. Under FULL all are marked; only the catalog knows the primary key."""
    names = frozenset(column.name for column in relation.columns)
    of_catalog = frozenset(present.key) if present is not None and present.identity == relation.identity else None
    if relation.identity == "f" and _was_away(known, catalog):
        key = frozenset[str]()
    elif relation.identity == "f" and of_catalog is not None:
        key = of_catalog
    elif relation.identity == "f":
        # Another primary key may have been there already.
        key = frozenset() if _has_another_key(known, catalog) else _known_key(relation, known, numbers)
    else:
        key = frozenset(column.name for column in relation.columns if column.is_key)
    # A part of a key does not tell rows apart.
    return key if names.issuperset(key | (of_catalog or key)) else frozenset()


def _known_key(relation: RelationMessage, known: TableLayout | None, numbers: Sequence[int | None]) -> frozenset[str]:
    """Return the known key's columns under the names that they have in ``relation``; a column may be renamed."""
    now = {number: column.name for number, column in zip(numbers, relation.columns, strict=True)}
    return frozenset(
        now.get(column.attnum, column.name) if column.attnum is not None else column.name
        for column in (() if known is None else known.columns)
        if column.key
    )


def _was_away(known: TableLayout | None, catalog: CatalogLayout | None) -> bool:
    """Whether the primary key was dropped and added again since: nothing told rows apart meanwhile.

    Of a table that was not FULL before as well: it has to become so before UPDATE and DELETE go on without a key.
    """
    return known is not None and catalog is not None and known.primary not in (None, catalog.primary)


def _has_another_key(known: TableLayout | None, catalog: CatalogLayout | None) -> bool:
    """Whether the catalog, which is ahead, has another primary key than the columns that told rows apart."""
    if known is None or catalog is None or catalog.identity not in ("f", "d"):
        return False
    of_known = {column.attnum for column in known.columns if column.key}
    return None not in of_known and of_known != {c.attnum for c in catalog.columns if c.name in catalog.key}


def _last(numbers: Sequence[int | None], known: TableLayout | None, present: CatalogLayout | None) -> int | None:
    if present is not None and (known is None or not has_gap(present, known.last)):
        return present.last
    if known is None or known.last is None or None in numbers:
        return None
    return max(known.last, *(number for number in numbers if number is not None), 0)


# --- changes ----------------------------------------------------------------------------------------------------------


def _changes(
    known: TableLayout, layout: TableLayout, catalog: CatalogLayout | None, present: CatalogLayout | None
) -> Iterator[LayoutChange]:
    pairs = _pairs(known, layout)
    if known.name != layout.name:
        yield LayoutChange("renamed", None, layout.name, known.name)
    kept = {id(was) for was, _ in pairs if was is not None}
    dropped = [column for column in known.columns if id(column) not in kept]
    for column in dropped:
        yield LayoutChange("dropped", column.attnum, column.name)
    fills = {} if catalog is None else {column.attnum: column.fill for column in catalog.columns}
    for was, column in pairs:
        if was is None:
            fill = None if column.attnum is None else fills[column.attnum]
            yield LayoutChange("added", column.attnum, column.name, None, fill)
            continue
        if was.name != column.name:
            yield LayoutChange("renamed", column.attnum, column.name, was.name)
        if (was.type_oid, was.typmod) != (column.type_oid, column.typmod):
            yield LayoutChange("retyped", column.attnum, column.name, was.type_name)
    if known.identity != layout.identity or _is_rekeyed(pairs, dropped):
        yield LayoutChange("rekeyed", None, listed_names(layout.key), listed_names(known.key))
    if _is_rewritten(known, pairs, dropped, catalog, present):
        yield LayoutChange("rewritten")


_Pair = tuple[LayoutColumn | None, LayoutColumn]


def _pairs(known: TableLayout, layout: TableLayout) -> list[_Pair]:
    """Return each column with what it was, None for one that was added."""
    by_number = {column.attnum: column for column in known.columns if column.attnum is not None}
    unnumbered = {column.sent: column for column in known.columns if column.attnum is None}
    pairs: list[_Pair] = []
    for column in layout.columns:
        was = None if column.attnum is None else by_number.get(column.attnum)
        pairs.append((unnumbered.get(column.sent) if was is None else was, column))
    return pairs


def _is_rekeyed(pairs: Sequence[_Pair], dropped: Sequence[LayoutColumn]) -> bool:
    return any(column.key for column in dropped) or any(
        column.key != (was is not None and was.key) for was, column in pairs
    )


def _is_rewritten(
    known: TableLayout,
    pairs: Sequence[_Pair],
    dropped: Sequence[LayoutColumn],
    catalog: CatalogLayout | None,
    present: CatalogLayout | None,
) -> bool:
    """Whether old rows may have other values now than they came with and the other changes say."""
    added = [column for was, column in pairs if was is None]
    if any(column.attnum is None for column in added):
        # What old rows have in it cannot be looked up.
        return True
    if any(may_become(was.type, column.type) for was in dropped for column in added):
        # It cannot be told which rows came before a column was replaced by its like.
        return True
    if added and present is not None and has_gap(present, known.last):
        # One that came and went may have been sent instead.
        return True
    if any(column.attnum <= (known.last or 0) for column in added if column.attnum is not None):
        # It was there all the time, with values that were not sent.
        return True
    retyped = [(was, column) for was, column in pairs if was is not None and was.sent[1:] != column.sent[1:]]
    if any(was is not None and not _are_alike(was.type, column.type) for was, column in pairs):
        # Rows that PostgreSQL leaves as they are have another text.
        return True
    if not all(_have_one_type(was.spark, column.spark) for was, column in retyped):
        # What a sink has of them is of another type (numeric(10,2) to numeric, which is STRING).
        return True
    renamed = [column for was, column in pairs if was is not None and was.name != column.name]
    if present is None and not (added or dropped or retyped or renamed):
        # The catalog is ahead. What else it says is of a later commit.
        return False
    if present is not None and has_other_texts(known.insides, present.insides):
        # A label of an enum was renamed, or a composite type has other attributes.
        return True
    if catalog is None or known.files is None:
        filled = set() if catalog is None else {c.attnum for c in catalog.columns if c.fill is not None}
        return bool(retyped) or any(column.attnum not in filled for column in added)
    # Without DDL it was TRUNCATE, VACUUM FULL or CLUSTER.
    return catalog.files != known.files and catalog.altered != known.altered


def _are_alike(was: CatalogType, now: CatalogType) -> bool:
    """Whether values that two types have in common have the same text."""
    if was.element is not None and now.element is not None:
        return _are_alike(was.element, now.element)
    return _LIKE.get(was.oid, was.oid) == _LIKE.get(now.oid, now.oid)


def _have_one_type(was: str, now: str) -> bool:
    """Whether values of one Spark type can become those of another, where PostgreSQL leaves rows as they are."""
    return was == now or (was.startswith("decimal") and now.startswith("decimal"))
