"""One row for each key of a batch, with its final state, in Arrow.

- Within a key the last row wins.
- A value that did not travel (``UNCHANGED``) is that of the row before with the same key, back to where its life began.
  Behind a change of the key, that is the row of the old key, whose delete stands right before the insert. Where the
  batch has no such row, the lake's table has it: under the same key the value stays, under another it is fetched.
- Where columns stay that PostgreSQL has dropped, the lake's table has columns that the batch does not. No value of them
  travels, so a row has that of its row before, also behind a change of the key; but a new row has none.
- With soft deletes, a deleted row stays with the values that it had last: of a delete, none but the key travels.
- Keys are the same where the lake's merge says so: floats as in PostgreSQL (-0.0 is 0.0, NaN is itself), texts where
  all characters are. PostgreSQL sends the key that a row has, so 'a' never stands for 'A', nor 1.0 for 1.00.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import RESNAPSHOT, SchemaChangedError
from pg_cdc_source.lake.segment import CHANGE_NAMES, KIND, LSN, SEQ, UNCHANGED, Segment, numbers_of
from pg_cdc_source.lake.shape import DELETED_LSN, REPLACED, Shape
from pg_cdc_source.values.arrow import from_numpy, to_numpy
from pg_cdc_source.values.ndarrays import Flags, Ints
from pg_cdc_source.values.wire import MAX_OFFSET

# A name that no column of PostgreSQL can have: it is longer than 63 bytes.
IS_DELETE = "is_delete".ljust(64, "_")
# The number that stands for all columns that the lake's table has besides the segment's, and their name below.
DROPPED = -1
_DROPPED_NAME = "dropped".ljust(64, "_")

Key = tuple[Any, ...]
# The rows of the lake's table that have these keys, with all columns; others may be among them.
Fetch = Callable[[Sequence[Key]], pa.Table]


def kept_name(column: int) -> str:
    """The name of the flag by which a row keeps the table's own value of a column."""
    return f"kept_{column}".ljust(64, "_")


@dataclass(frozen=True, slots=True)
class States:
    """Final rows by key. ``emptied``: the table is emptied first.

    ``rows`` has the table's columns, ``IS_DELETE``, and of each column in ``kept`` the flag :func:`kept_name`. With
    ``DROPPED`` in ``kept``, columns that ``rows`` lacks have nothing in rows without that flag. Where deleted rows
    stay, ``IS_DELETE`` says of which nothing but the key is known.
    """

    key: tuple[str, ...]
    emptied: bool
    rows: pa.Table
    kept: tuple[int, ...]

    @property
    def upserted(self) -> pa.Table:
        """The rows that are not deleted, with the table's columns alone."""
        names = [name for name in self.rows.column_names if len(name) < 64]
        return self.rows.filter(pc.invert(self.rows[IS_DELETE])).select(names)


def states_of(segment: Segment, fetch: Fetch, shape: Shape = REPLACED) -> States:
    """Find the final rows of a segment.

    Raises SchemaChangedError where a value that did not travel is nowhere, or a key is NULL.
    """
    changes = ChangesByKey.of(segment)
    unchanged = unchanged_flags(segment.rows[UNCHANGED])
    if shape.keeps_columns and not segment.is_emptied:
        unchanged[_DROPPED_NAME] = ~changes.is_insert | changes.is_pair()
    # The rows whose values are wanted though they did not travel.
    wanted = {name: flags & ~changes.is_delete for name, flags in unchanged.items()}
    if shape.is_soft and changes.is_delete.any():
        for name in [*segment.rows.column_names, *unchanged]:
            if name not in (*segment.key, *CHANGE_NAMES.values()):
                unchanged[name] = wanted[name] = unchanged.get(name, False) | changes.is_delete

    def fetch_postgresql_columns(keys: Sequence[Key]) -> pa.Table:
        found = fetch(keys)
        return found.select([name for name in found.column_names if name not in shape.columns])

    values, kept = values_of_last(segment, changes, unchanged, wanted, fetch_postgresql_columns)
    is_delete = changes.is_delete[changes.last]
    if shape.is_soft:
        lsn = pc.if_else(from_numpy(is_delete), segment.rows[LSN].take(from_numpy(changes.last)), None)
        values = values.append_column(shape.deleted, from_numpy(is_delete)).append_column(DELETED_LSN, lsn)
        is_delete = is_delete & (changes.before[changes.last] == changes.last)
    values = values.append_column(IS_DELETE, from_numpy(is_delete))
    for i, flags in kept.items():
        values = values.append_column(kept_name(i), from_numpy(flags))
    return States(segment.key, segment.is_emptied, values, tuple(kept))


def values_of_last(
    segment: Segment,
    changes: ChangesByKey,
    unchanged: Mapping[str, Flags],
    wanted: Mapping[str, Flags],
    fetch: Fetch,
    *,
    keeps: bool = True,
) -> tuple[pa.Table, dict[int, Flags]]:
    """Return the values of the last rows; by column, in which of them the lake's table keeps its own.

    With ``keeps`` False, these are fetched as well. Where rows need values of dropped columns that are fetched, these
    columns stand behind the others.
    """
    values = segment.rows.select([name for name in segment.rows.column_names if name not in CHANGE_NAMES.values()])
    sources = {
        i: _Sources.of(changes, name, unchanged[name], wanted[name], keeps=keeps)
        for i, name in [*enumerate(values.column_names), (DROPPED, _DROPPED_NAME)]
        if name in unchanged
    }
    if segment.is_emptied and (lacking := [i for i, found in sources.items() if found.is_in_lake.any()]):
        raise SchemaChangedError(
            f"a row lacks the value of column {values.column_names[lacking[0]]} behind a TRUNCATE", remedy=RESNAPSHOT
        )
    fetched = _fetched(changes, values, sources, fetch)
    columns = []
    for i, column in enumerate(values.columns):
        if fetched is not None and i in sources:
            column = pa.chunked_array([*column.chunks, *fetched.column(i).chunks], column.type)
        columns.append(taken(column, sources[i].rows if i in sources else changes.last))
    kept = {i: found.is_kept for i, found in sources.items() if found.is_kept.any()}
    last = pa.Table.from_arrays(columns, schema=values.schema)
    if (dropped := sources.get(DROPPED)) is not None:
        kept[DROPPED] = dropped.is_kept
        if fetched is not None:
            for field in list(fetched.schema)[values.num_columns :]:
                column = pa.chunked_array([pa.nulls(values.num_rows, field.type), *fetched[field.name].chunks])
                kept[last.num_columns] = dropped.is_kept
                last = last.append_column(field, taken(column, dropped.rows))
    return last, kept


def taken(column: pa.ChunkedArray, places: Ints) -> pa.ChunkedArray:
    """Return the values at these places; of texts, there may be more than the 2 GB that one array can have.

    Nothing is tried: PyArrow before 26 gives other values then (apache/arrow#50840).
    """
    sizes = np.concatenate([np.zeros(0, np.int64), *map(_sizes, column.chunks)])
    wanted = sizes[places]
    if sizes.sum() <= MAX_OFFSET and wanted.sum() <= MAX_OFFSET:
        return column.take(from_numpy(places))
    # PyArrow writes all chunks together first, also for a few values.
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    cuts = np.flatnonzero(np.diff(np.cumsum(wanted) // (MAX_OFFSET // 4))) + 1
    pieces = [_taken_piece(column, ends, piece) for piece in np.split(places, cuts)]
    return pa.chunked_array([piece for piece in pieces if len(piece)], column.type)


def _taken_piece(column: pa.ChunkedArray, ends: Ints, places: Ints) -> pa.Array:
    """The values at places, which are few enough for one array; ``ends`` are the ends of the column's chunks."""
    chunks = np.searchsorted(ends, places, side="right")
    order = np.argsort(chunks, kind="stable")
    parts = [pa.nulls(0, column.type)]
    for i in np.unique(chunks):
        chunk = column.chunk(int(i))
        parts.append(chunk.take(from_numpy(places[order][chunks[order] == i] - int(ends[i]) + len(chunk))))
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return pa.concat_arrays(parts).take(from_numpy(back))


def _sizes(array: pa.Array) -> Ints:
    """How many bytes and items each value has that are counted in 32 bits."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return to_numpy(pc.fill_null(pc.binary_length(array), 0)).astype(np.int64)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        items = [array.keys, array.items] if pa.types.is_map(kind) else [array.values]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(1 + sum(map(_sizes, items)))])
        offsets: Ints = to_numpy(array.offsets)
        sizes: Ints = ends[offsets[1:]] - ends[offsets[:-1]]
        return sizes
    return np.zeros(len(array), np.int64)


@dataclass(frozen=True, slots=True)
class ChangesByKey:
    """A segment's rows by number: of which key each is, which row of that key is ``before`` (itself: none), and so on.

    ``last`` are the last rows of all keys, in order; or those of all keys in each commit.
    """

    table: pa.Table
    key: tuple[str, ...]
    keys: Ints
    before: Ints
    last: Ints
    is_delete: Flags
    is_insert: Flags

    @classmethod
    def of(cls, segment: Segment, *, by_commit: bool = False) -> ChangesByKey:
        rows = segment.rows
        keys = key_numbers([rows[name] for name in segment.key], segment.key)
        order = np.argsort(keys, kind="stable")
        first, then = order[:-1], order[1:]
        is_same = keys[first] == keys[then]
        before = np.arange(len(keys))
        before[then[is_same]] = first[is_same]
        is_last = np.ones(len(keys), np.bool_)
        if by_commit:
            lsn = numbers_of(rows[LSN])
            is_same &= lsn[first] == lsn[then]
        is_last[first[is_same]] = False
        kinds = rows[KIND]
        is_delete, is_insert = (_flags(pc.equal(kinds, kind)) for kind in ("delete", "insert"))
        return cls(rows, segment.key, keys, before, np.flatnonzero(is_last), is_delete, is_insert)

    def is_pair(self) -> Flags:
        """Which rows are the insert of a change of the key: its delete stands right before."""
        lsn, seq = numbers_of(self.table[LSN]), numbers_of(self.table[SEQ])
        flags = self.is_insert.copy()
        flags[:1] = False
        flags[1:] &= self.is_delete[:-1] & (lsn[:-1] == lsn[1:]) & (seq[:-1] + 1 == seq[1:])
        return flags


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where each final row has one column's value from: the number of a row of the batch.

    ``is_in_lake``: the batch has none, and the value is in the lake's row whose key that row has. It ``is_kept`` where
    this is the final row's own key.
    """

    rows: Ints
    is_in_lake: Flags
    is_kept: Flags

    @classmethod
    def of(cls, changes: ChangesByKey, name: str, unchanged: Flags, wanted: Flags, *, keeps: bool) -> _Sources:
        lacks = unchanged | changes.is_delete
        is_pair = changes.is_pair()
        numbers = np.arange(len(lacks))
        # Where to look for what a row lacks. A row that points to itself is the end of the search.
        former = np.where(lacks, changes.before, numbers)
        inserts = np.flatnonzero(changes.is_insert & lacks)
        former[inserts] = np.where(is_pair[inserts], inserts - 1, inserts)
        while not np.array_equal(further := former[former], former):
            former = further
        wanted = wanted[changes.last]
        rows = np.where(wanted, former[changes.last], changes.last)
        is_in_lake = wanted & lacks[rows]
        if (is_in_lake & changes.is_insert[rows]).any():
            raise SchemaChangedError(f"an insert lacks the value of column {name}", remedy=RESNAPSHOT)
        is_kept = is_in_lake & (changes.keys[rows] == changes.keys[changes.last])
        return cls(rows, is_in_lake, is_kept if keeps else np.zeros_like(is_kept))

    @property
    def is_fetched(self) -> Flags:
        return self.is_in_lake & ~self.is_kept


def _fetched(changes: ChangesByKey, values: pa.Table, sources: Mapping[int, _Sources], fetch: Fetch) -> pa.Table | None:
    """Let ``sources`` name rows of the lake's table, which follow those of the batch; these rows, None for none.

    Columns that the lake's table has besides stand behind the others.
    """
    asked = [found.rows[found.is_fetched] for found in sources.values()]
    # Rows that were read again after a crash may have the new key already.
    asked += [changes.last[found.is_fetched] for found in sources.values()]
    _, places = np.unique(changes.keys[_joined(asked)], return_index=True)
    if not len(places):
        return None
    n = values.num_rows
    wanted = values.select(changes.key).take(from_numpy(_joined(asked)[places]))
    keys = list(zip(*(column.to_pylist() for column in wanted.columns), strict=True))
    found = fetch(keys)
    schema = pa.schema([*values.schema, *(field for field in found.schema if field.name not in values.column_names)])
    found = found.select(schema.names).cast(schema)
    both = [pa.chunked_array([*values[name].chunks, *found[name].chunks], values[name].type) for name in changes.key]
    numbers = key_numbers(both, changes.key)
    at = np.full(int(numbers.max()) + 1, -1)
    at[numbers[n:]] = np.arange(n, len(numbers))
    for i, source in sources.items():
        which = np.flatnonzero(source.is_fetched)
        old, new = at[numbers[source.rows[which]]], at[numbers[changes.last[which]]]
        source.rows[which] = np.where(old >= 0, old, new)
        lacking = which[source.rows[which] < 0]
        if i == DROPPED:
            # Without a row there is no value either.
            source.rows[lacking] = changes.last[lacking]
        elif len(lacking):
            raise SchemaChangedError(
                "the lake's table lacks a row that was changed, and PostgreSQL did not send all of its values",
                remedy=RESNAPSHOT,
            )
    return found


def key_numbers(columns: Sequence[pa.ChunkedArray], names: Sequence[str]) -> Ints:
    """Return a number for each row, the same where all columns are the same to a lake's merge.

    Raises SchemaChangedError for NULL.
    """
    numbers: Ints = np.zeros(len(columns[0]), np.int64)
    for column, name in zip(columns, names, strict=True):
        if column.null_count:
            raise SchemaChangedError(
                f"the key's column {name} is NULL in a change",
                remedy=f"give the table a primary key, and {RESNAPSHOT}. Old minor versions of PostgreSQL do not "
                "say some keys: before 14.3 and 13.7 those stored out of line; before 16.2 and 15.6, under REPLICA "
                "IDENTITY FULL, those of columns with a DEFAULT that were added",
            )
        if pa.types.is_floating(column.type):
            # Of -0.0 it makes 0.0.
            column = pc.add(column, pa.array([0.0], column.type)[0])
        codes = _joined([to_numpy(chunk.indices) for chunk in column.dictionary_encode().chunks])
        _, numbers = np.unique(numbers * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)
    return numbers


def rows_that_stay(rows: pa.Table, key: Sequence[str], shape: Shape) -> Flags:
    """Return which rows stay where they are told apart by ``key``: of deleted rows, the last ones without others.

    ``rows`` has the columns of the key, and those of soft deletes.
    """
    stays = np.ones(rows.num_rows, np.bool_)
    has_key = np.flatnonzero(np.logical_and.reduce([_flags(pc.is_valid(rows[name])) for name in key]))
    keyed = rows.take(from_numpy(has_key))
    numbers = key_numbers([keyed[name] for name in key], key)
    is_deleted = _flags(keyed[shape.deleted])
    order = np.lexsort((-numbers_of(pc.fill_null(keyed[DELETED_LSN], 0)), is_deleted, numbers))
    follows = order[1:][numbers[order[1:]] == numbers[order[:-1]]]
    stays[has_key[follows[is_deleted[follows]]]] = False
    return stays


def unchanged_flags(lists: pa.ChunkedArray) -> dict[str, Flags]:
    """Return by its name, for each column that any row lists, which rows do."""
    rows, start = [], 0
    for chunk in lists.chunks:
        rows.append(to_numpy(pc.list_parent_indices(chunk)).astype(np.int64) + start)
        start += len(chunk)
    names = pa.chunked_array([chunk.flatten() for chunk in lists.chunks], pa.string())
    found = {}
    for name in names.unique().drop_null().to_pylist():
        found[name] = np.zeros(start, np.bool_)
        found[name][_joined(rows)[_flags(pc.equal(names, name))]] = True
    return found


def _flags(column: pa.ChunkedArray) -> Flags:
    """Return flags, False where they are NULL."""
    return np.concatenate([np.zeros(0, np.bool_), *(to_numpy(pc.fill_null(chunk, False)) for chunk in column.chunks)])


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])
