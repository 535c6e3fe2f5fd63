"""Find out which columns a Relation message has: known layout and catalog.

Columns are told apart by their numbers (attnum), which a Relation message does not have. PostgreSQL gives numbers in
order, never gives one twice, and sends columns in their order. So::

    the catalog has just the columns that were sent          their numbers are the catalog's
    otherwise the catalog is ahead of the commit             they are, in this order:
      known columns that are still there                       all of them
      known columns that are gone by now                       some of them
      columns that came since, there or gone by now            the first ones

Where several answers fit, by the count of columns, their types and their names, none is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from pg_cdc_source.protocol.pgoutput import RelationColumn
from pg_cdc_source.protocol.table_layout import CatalogColumn, CatalogLayout, LayoutColumn, TableLayout, sent_of
from pg_cdc_source.values.registry import CatalogType

# Columns that are gone may be among those that were sent in so many ways at most; otherwise nobody tells which.
_MOST_WAYS = 4096

# Types that a column can have one after the other without a rewrite of the rows, by one of each: casts without a
# function (pg_cast), and timestamp, which is timestamptz in a session whose zone is UTC.
_FAMILIES = {
    **dict.fromkeys((18, 19, 25, 142, 1042, 1043), 25),  # text
    **dict.fromkeys((1560, 1562), 1560),  # bit, varbit
    **dict.fromkeys((650, 869), 869),  # cidr, inet
    **dict.fromkeys((1114, 1184), 1184),  # timestamp, timestamptz
    # int4, oid and what is shown by a name (regclass, regproc, …)
    **dict.fromkeys((23, 24, 26, *range(2202, 2207), 3734, 3769, 4089, 4096, 4191), 26),
}
# From here on types are those of extensions and users, who define casts as well.
_FIRST_OF_USERS = 16384


def find_numbers(
    sent: Sequence[RelationColumn],
    known: TableLayout | None,
    catalog: CatalogLayout | None,
    present: CatalogLayout | None,
) -> list[int | None]:
    """Return the numbers of the columns that were ``sent``, None where they cannot be told.

    ``catalog`` is None for a table that is gone; ``present`` is the catalog where it has just these columns.
    """
    if present is not None:
        return [column.attnum for column in present.columns if column.published]
    if known is None:
        return [None] * len(sent)
    numbers = [column.attnum for column in known.columns]
    if catalog is not None and known.last is not None and None not in numbers:
        return _told(sent, known, catalog, known.last)
    return numbers if known.is_sent_as(sent) else _equal(sent, known.columns)


def _told(sent: Sequence[RelationColumn], known: TableLayout, catalog: CatalogLayout, last: int) -> list[int | None]:
    """Return the numbers of what was sent, as far as only one answer fits. ``last`` is the layout's."""
    there: dict[int | None, CatalogColumn] = {column.attnum: column for column in catalog.columns}
    kept = [column for column in known.columns if column.attnum in there]
    gone = [column for column in known.columns if column.attnum not in there]
    if len(sent) == len(kept) == len(known.columns):
        return [column.attnum for column in kept]
    numbers = {column.attnum for column in known.columns}
    # One that the catalog has had all the time was not sent before, such as one that was generated.
    is_shown = any(c.published and c.attnum <= last and c.attnum not in numbers for c in catalog.columns)
    ways: list[_Way] = []
    if not is_shown:
        ways = _fitting(sent, _ways(sent, kept, gone, catalog.last - last), there, last)
    if len(ways) != 1:
        return _equal(sent, [column for column in kept if column.sent == there[column.attnum].sent])
    [way] = ways
    return [column.attnum for column in way] + _new_numbers(sent[len(way) :], catalog, last)


# The known columns that were sent; all behind them are new.
_Way = Sequence[LayoutColumn]


def _ways(
    sent: Sequence[RelationColumn], kept: Sequence[LayoutColumn], gone: Sequence[LayoutColumn], most_new: int
) -> list[_Way]:
    """Return which known columns may have been sent: all that are ``kept``, and some that are ``gone``."""
    counts = [n for n in range(len(gone) + 1) if 0 <= len(sent) - len(kept) - n <= most_new]
    if sum(math.comb(len(gone), n) for n in counts) > _MOST_WAYS:
        return []
    return [
        sorted((*kept, *some), key=lambda column: column.attnum or 0)
        for n in counts
        for some in itertools.combinations(gone, n)
    ]


def _fitting(
    sent: Sequence[RelationColumn],
    ways: Sequence[_Way],
    there: Mapping[int | None, CatalogColumn],
    last: int,
) -> list[_Way]:
    """Return the ways that fit by types and, where several do, by names; none where a name may have been another."""
    seen = [(way, _seen(way, there, last)) for way in ways]
    if len(seen) > 1:
        seen = [(way, known) for way, known in seen if _is_typed(sent, known)]
    if len(seen) > 1:
        # A new column may have been renamed since: what it was called when it was sent, nobody knows.
        seen = [(way, known) for way, known in seen if _is_named(sent[: len(way)], known)]
        if not all(_is_named(sent, known) for _, known in seen):
            return []
    return [way for way, _ in seen]


# What is known of columns: names and types that they have had.
_Seen = Sequence[tuple[tuple[str, int], ...]]


def _seen(way: _Way, there: Mapping[int | None, CatalogColumn], last: int) -> _Seen:
    """Return what is known of each column that may have been sent, those behind all known ones included."""
    known = [(_named(column), _named(there.get(column.attnum, column))) for column in way]
    return [*known, *((_named(column),) for column in _new(there.values(), last))]


def _is_typed(sent: Sequence[RelationColumn], seen: _Seen) -> bool:
    """Whether every column has a type that it may have had."""
    return all(
        any(_may_become(column.type_oid, type_oid) for _, type_oid in known)
        for column, known in zip(sent, seen, strict=False)
    )


def _is_named(sent: Sequence[RelationColumn], seen: _Seen) -> bool:
    """Whether every column has a name that it is known to have had."""
    return all(column.name in (name for name, _ in known) for column, known in zip(sent, seen, strict=False))


def _named(column: LayoutColumn | CatalogColumn) -> tuple[str, int]:
    return column.name, column.type_oid


def may_become(was: CatalogType, now: CatalogType) -> bool:
    """Whether a column may have had both types, while its rows stayed as they were."""
    if was.element is not None and now.element is not None:
        return may_become(was.element, now.element)
    return _may_become(was.oid, now.oid)


def _may_become(was: int, now: int) -> bool:
    return max(was, now) >= _FIRST_OF_USERS or _FAMILIES.get(was, was) == _FAMILIES.get(now, now)


def has_gap(catalog: CatalogLayout, last: int | None) -> bool:
    """Whether a column that came after the number ``last`` is gone."""
    there = {column.attnum for column in catalog.columns}
    return last is not None and any(number not in there for number in range(last + 1, catalog.last + 1))


def _new(columns: Iterable[CatalogColumn], last: int) -> list[CatalogColumn]:
    return [column for column in columns if column.published and column.attnum > last]


def _new_numbers(sent: Sequence[RelationColumn], catalog: CatalogLayout, last: int) -> list[int | None]:
    """Return the numbers of columns behind all known ones: those that follow, as long as none of them was dropped."""
    new = _new(catalog.columns, last)
    if len(new) < len(sent) or has_gap(catalog, last):
        return [None] * len(sent)
    others = {column.sent for column in new}
    # One that was generated may have come before: it was not sent then.
    if any(sent_of(s) in others and sent_of(s) != column.sent for s, column in zip(sent, new, strict=False)):
        return [None] * len(sent)
    return [column.attnum for column in new[: len(sent)]]


def _equal(sent: Sequence[RelationColumn], columns: Sequence[LayoutColumn]) -> list[int | None]:
    """Return the numbers of those that were sent just as ``columns``."""
    numbers: list[int | None] = []
    rest = list(columns)
    for column in sent:
        at = next((i for i, other in enumerate(rest) if other.sent == sent_of(column)), None)
        numbers.append(None if at is None else rest[at].attnum)
        rest = rest if at is None else rest[at + 1 :]
    return numbers
