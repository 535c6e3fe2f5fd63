"""One table's part of a batch: runs in the layouts of their time become rows in the last one.

- What came before the table's rows came anew, or before its last TRUNCATE, is void and left out, unless the lake keeps
  what PostgreSQL gives up. It may be of another table, which was dropped and had the same name.
- Columns are told apart by their numbers. A row from before a column was added has in it what PostgreSQL says that old
  rows got (``fill``); a row from before a column was renamed has the new name.
- Where dropped columns stay, rows from before a drop have their values. What rows behind it have is the lake's to say.
- What cannot be told raises SchemaChangedError, and never makes a wrong row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import RESNAPSHOT, SchemaChangedError
from pg_cdc_source.lake.columns import MirroredColumn, MirroredLayout, read_layout, with_dropped
from pg_cdc_source.lake.kept_columns import is_wider
from pg_cdc_source.lake.rows_of_batch import BEGINNING, END, FILE, Place, comes_again, place_of, taken
from pg_cdc_source.lake.shape import REPLACED, Shape
from pg_cdc_source.lake.variants import require_exact
from pg_cdc_source.offsets import split_names
from pg_cdc_source.options.names import quoted
from pg_cdc_source.protocol.layout import CHANGE_FIELDS, UNCHANGED_TYPE
from pg_cdc_source.protocol.packed import CHANGES, read_run
from pg_cdc_source.values.arrow import from_numpy, from_texts, to_numpy

# The change columns of a segment's rows. No column of PostgreSQL can have such a name: they are longer than 63 bytes.
CHANGE_NAMES = {field.name: field.name.ljust(64, "_") for field in CHANGE_FIELDS}
KIND, LSN, SEQ, COMMIT_TS, XID, UNCHANGED = CHANGE_NAMES.values()
# What a merge has no use for.
_OF_COMMITS = ("_commit_ts", "_xid")


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that are told apart by one ``key``, in the order of the stream, in the table's last layout.

    ``rows`` has the table's columns, then those of ``CHANGE_NAMES``; in a merge without ``COMMIT_TS`` and ``XID``, and
    without columns that were dropped before them. ``is_emptied``: the table is emptied first.
    """

    key: tuple[str, ...]
    rows: pa.Table
    is_emptied: bool = False

    @property
    def name(self) -> str:
        """Which rows of the batch these are: the same ones have it whenever the batch comes."""
        if not self.rows.num_rows:
            return "no changes"
        ends = (self.rows.slice(place, 1) for place in (0, self.rows.num_rows - 1))
        return "changes " + " to ".join(f"{row[LSN][0].as_py()}.{row[SEQ][0].as_py()}" for row in ends)

    def between(self, begin: Place, end: Place = END) -> Segment:
        """Return it with the rows behind one position and before another."""
        lsn, seq = numbers_of(self.rows[LSN]), numbers_of(self.rows[SEQ])
        wanted = (lsn > begin[0]) | ((lsn == begin[0]) & (seq > begin[1]))
        wanted &= (lsn < end[0]) | ((lsn == end[0]) & (seq < end[1]))
        rows = self.rows if wanted.all() else self.rows.filter(from_numpy(wanted))
        return Segment(self.key, rows, self.is_emptied)


@dataclass(slots=True)
class TableBatch:
    """What a batch has of one table. ``fills`` are what old rows have in columns that were added, by their numbers.

    ``truncates`` and ``files`` are rows of the batch; without those that are void.
    """

    table: str
    layout: MirroredLayout | None
    segments: list[Segment]
    files: list[Mapping[str, Any]]
    fills: dict[int, str | None] = field(default_factory=dict)
    is_rewritten: bool = False  # what came before has other values now, and the batch does not have these
    is_rekeyed: bool = False  # behind some rows of the batch, or before all of them
    is_emptied: bool = False  # before its files, or where it has no rows behind
    truncates: list[Mapping[str, Any]] = field(default_factory=list)
    has_come_again: bool = False  # its rows were read again, which makes up for changes that may be missing
    shape: Shape = REPLACED
    _added: dict[int, Place] = field(default_factory=dict)  # where columns were added that have a fill
    _present: int = 0  # columns of the layout that PostgreSQL has: those behind them were dropped

    @property
    def comes_whole(self) -> bool:
        """Whether the batch has all rows of the table, so that nothing stays of what the lake has."""
        return bool(self.truncates) and not self.is_rewritten

    @property
    def has_moved_values(self) -> bool:
        """Whether a row of the lake under a new key needs values that only the row of the old key has."""
        # A log has a change as it came, and says which values did not.
        return not self.shape.is_log and any(
            pc.any(
                pc.and_(pc.equal(s.rows[KIND], "insert"), pc.greater(pc.list_value_length(s.rows[UNCHANGED]), 0))
            ).as_py()
            for s in self.segments
            if s.rows.num_rows
        )

    @property
    def keeps_values(self) -> bool:
        """Whether a row of the lake has values that a change of it needs."""
        return any(
            pc.any(pc.greater(pc.list_value_length(s.rows[UNCHANGED]), 0)).as_py()
            for s in self.segments
            if s.rows.num_rows
        )

    @classmethod
    def of(
        cls, table: str, rows: Iterable[Mapping[str, Any]], shape: Shape = REPLACED, *, stands_still: bool = False
    ) -> TableBatch:
        """Read rows of runs, and of files that were written of them. ``layout`` None: no row says one.

        ``stands_still``: the lake's table has not what came before, so that this is void in every shape.
        Raises SchemaChangedError for what the lake cannot follow, and UnrepresentableError.
        """
        ordered = sorted(rows, key=place_of)
        layouts = [read_layout(row["layout"]) for row in ordered if row["layout"] is not None]
        # A table that is gone has nothing but its name.
        layout = next((found for found in reversed(layouts) if found.identity), None)
        truncates = [row for row in ordered if row["_change_type"] == "truncate"]
        files = [row for row in ordered if row["_change_type"] == FILE]
        emptied = max(map(place_of, truncates), default=BEGINNING)
        begin = max([emptied, *map(place_of, files)])
        # No transaction has a change right after these. What is said there describes rows that come again.
        again = [row for row in truncates if comes_again(row)]
        anew = {(row["_commit_lsn"] + 1, 0) for row in again}
        # Nobody knows where the changes of a gap are missing: they may be behind a TRUNCATE that comes after it.
        mended = max(map(place_of, again), default=BEGINNING)
        truncates, files, since = taken(truncates, files, shape, stands_still=stands_still)
        batch = cls(table, layout, [], files, truncates=truncates, has_come_again=bool(again), shape=shape)
        # While a table stands still, it may get another key.
        batch.is_rekeyed = stands_still and shape.is_soft
        for row in ordered:
            if row["_change_type"] == "schema":
                identity, place = read_layout(row["layout"]).identity, place_of(row)
                said = json.loads(row["after"])["changes"]
                said = [change for change in said if change["change"] != "gap" or place > mended]
                batch._note(said, identity, place, is_void=place <= begin, is_anew=place in anew)
        # Values of a table that was rewritten are of other types, and nobody takes them.
        if layout is not None and not batch.is_rewritten:
            batch._require_names(layout)
            batch._require_fitting_files(layout)
            batch._require_exact_fills(layout)
            batch._present = len(layout.columns)
            if shape.keeps_columns:
                batch.layout = layout = with_dropped(layout, layouts)
                batch._require_places(layout, (row for row in ordered if place_of(row) > since))
                batch._require_filled_files(layout.columns[batch._present :])
            batch._require_sent_values(layout.columns)
            runs = (row for row in ordered if row["_change_type"] == CHANGES)
            batch._read(layout, runs, since)
        if truncates and not shape.keeps:
            batch._empty()
        return batch

    def _note(
        self, said: Iterable[Mapping[str, Any]], identity: str, place: Place, *, is_void: bool, is_anew: bool
    ) -> None:
        said, is_past = list(said), is_void or is_anew
        for change in said:
            self._refuse(change, is_void=is_void, is_past=is_past)
            kind, attnum = change["change"], change["attnum"]
            if self.shape.is_log:
                # What it says of rows was so when they were written, and nothing is told apart by a key.
                continue
            if kind == "added" and attnum is not None:
                self.fills[attnum] = change["fill"]
                self._added[attnum] = place
            elif kind == "rewritten" and not is_past:
                self.is_rewritten = True
            elif kind == "rekeyed" and (self.shape.keeps or not is_past):
                self.is_rekeyed = True
                if not is_past and identity == "f" and change["name"] != _in_new_names(said, change["was"]):
                    # The primary key is the catalog's, which may be ahead: it may not have told rows apart here.
                    raise SchemaChangedError(
                        f"{self.table} got another key under REPLICA IDENTITY FULL: {change['name'] or 'none'} instead "
                        f"of {change['was'] or 'none'}",
                        remedy=RESNAPSHOT,
                    )

    def _refuse(self, change: Mapping[str, Any], *, is_void: bool, is_past: bool) -> None:
        """Raise SchemaChangedError for a change behind which the table cannot go on, whatever it keeps."""
        kind = change["change"]
        if kind == "renamed" and change["attnum"] is None and not is_past:
            raise SchemaChangedError(
                f"{self.table} was called {change['was']} before: the lake does not have its rows under this name",
                remedy=RESNAPSHOT,
            )
        if kind == "left" and "why" in change and not is_void:
            raise SchemaChangedError(
                f"{self.table} is not streamed any more: {change['why']}",
                remedy=f"{change['remedy']}; its rows come again then",
            )
        if kind == "gap":
            raise SchemaChangedError(f"{self.table}: {change['why']}", remedy=change["remedy"])

    def _empty(self) -> None:
        if self.files or not self.segments:
            self.is_emptied = True
        else:
            self.segments[0] = Segment(self.segments[0].key, self.segments[0].rows, is_emptied=True)

    # --- what the lake cannot follow ----------------------------------------------------------------------------------

    def _require_names(self, layout: MirroredLayout) -> None:
        for column in layout.columns:
            if column.name.lower() in self.shape.columns:
                raise SchemaChangedError(
                    f"{self.table} has the column {column.name}, which the mirror itself adds ({self.shape.text})",
                    remedy=f"rename it in PostgreSQL, and {RESNAPSHOT}; or mirror the table in another mode",
                )
            if column.name.lower() in self.shape.reserved:
                raise SchemaChangedError(
                    f"{self.table} has the column {column.name}, a name that {self.shape.format} uses itself",
                    remedy=f"rename it in PostgreSQL, and {RESNAPSHOT}; or mirror the table in another format",
                )
        names: dict[str, str] = {}
        for column in layout.columns:
            if (other := names.setdefault(column.name.lower(), column.name)) != column.name:
                raise SchemaChangedError(
                    f"{self.table} has columns {other} and {column.name}, which are one name to Spark and the lake",
                    remedy=f"rename one of them in PostgreSQL, and {RESNAPSHOT}",
                )

    def _require_fitting_files(self, layout: MirroredLayout) -> None:
        """Columns of files are told by their names: those of the table have to be the same, or NULL in all rows."""
        for text in {row["layout"] for row in self.files}:
            written = read_layout(text)
            names = {column.name for column in written.columns}
            for column in layout.columns:
                if (place := written.place_of(column)) is not None:
                    was = written.columns[place]
                    fits = (was.name, was.type) == (column.name, column.type)
                else:
                    fits = column.name not in names and self.fills.get(column.attnum or 0) is None
                if not fits:
                    raise altered_later_error(self.table, column.name)

    def _require_filled_files(self, dropped: Iterable[MirroredColumn]) -> None:
        """Rows of files have nothing in columns that were ``dropped``, also where these were added behind them."""
        for column in dropped:
            number = column.attnum or 0
            if self.fills.get(number) is not None and any(place_of(f) < self._added[number] for f in self.files):
                raise altered_later_error(self.table, column.name)

    def _require_sent_values(self, columns: Iterable[MirroredColumn]) -> None:
        """Rows of files lack the values of columns that were altered before they were read; a log says so of each."""
        for row in () if self.shape.is_log else self.files:
            unsent = json.loads(row["after"]).get("unsent", ())
            written = read_layout(row["layout"])
            for column in columns if unsent else ():
                if (place := written.place_of(column)) is not None and written.columns[place].name in unsent:
                    raise altered_later_error(self.table, column.name)

    def _require_exact_fills(self, layout: MirroredLayout) -> None:
        for column in layout.columns:
            fill = self.fills.get(column.attnum or 0)
            if self.shape.has_variants and column.is_json and fill is not None:
                require_exact(self.table, column, from_texts([fill]), lambda _: "rows from before it was added")

    # --- changes ------------------------------------------------------------------------------------------------------

    def _require_places(self, last: MirroredLayout, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise SchemaChangedError for a column that rows have, where another one has its name by now."""
        for row in rows:
            if row["_change_type"] != CHANGES:
                continue
            layout = read_layout(row["layout"])
            for column in layout.columns if layout.oid == last.oid else ():
                if last.place_of(column) is not None:
                    continue
                # A log goes on in the same column, if the other one is new.
                goes_on = any(c.name == column.name and layout.place_of(c) is None for c in last.columns)
                if not (self.shape.is_log and goes_on):
                    raise SchemaChangedError(
                        f"{self.table}: column {column.name} was dropped, and another one has its name, within a batch",
                        remedy=RESNAPSHOT,
                    )

    def _read(self, last: MirroredLayout, runs: Iterable[Mapping[str, Any]], begin: Place) -> None:
        """Read runs that follow each other: none has rows between those of another."""
        groups: list[tuple[tuple[str, ...], list[pa.Table]]] = []
        for row in runs:
            if place_of(row) <= begin:
                continue
            layout = read_layout(row["layout"])
            if layout.oid != last.oid:
                raise SchemaChangedError(f"{self.table} is not the table that had the name before", remedy=RESNAPSHOT)
            key = () if self.shape.is_log else self._key(last, layout)
            part = self._in_last_layout(last, layout, read_run(row["data"]), place_of(row))
            if not groups or groups[-1][0] != key or groups[-1][1][0].schema != part.schema:
                groups.append((key, []))
            groups[-1][1].append(part)
        for key, tables in groups:
            segment = Segment(key, pa.concat_tables(tables))
            self.segments.append(segment if begin == BEGINNING else segment.between(begin))

    def _key(self, last: MirroredLayout, layout: MirroredLayout) -> tuple[str, ...]:
        """What the columns by which rows of ``layout`` are told apart are called in the end."""
        names = []
        for column in layout.columns:
            if not column.key:
                continue
            place = last.place_of(column)
            if place is None:
                raise SchemaChangedError(
                    f"{self.table}: a column of its key was dropped within a batch", remedy=RESNAPSHOT
                )
            is_variant = self.shape.has_variants and last.columns[place].is_json
            if is_variant or pa.types.is_nested(last.columns[place].type):
                raise SchemaChangedError(
                    f"{self.table}: its key has the column {column.name} ({column.codec.column.type_name}), and the "
                    f"lake cannot tell rows apart by {'VARIANT' if is_variant else 'lists'}",
                    remedy=f"give it another key, or REPLICA IDENTITY USING INDEX; then {RESNAPSHOT}",
                )
            names.append(last.columns[place].name)
        if not names:
            raise keyless_error(self.table)
        return tuple(names)

    def _in_last_layout(
        self, last: MirroredLayout, layout: MirroredLayout, run: pa.RecordBatch, begin: Place
    ) -> pa.Table:
        n, arrays, fields, names = run.num_rows, [], [], {}
        for i, column in enumerate(last.columns):
            place, was = layout.place_of(column), column
            if place is None and self.shape.is_log:
                place = layout.place_of_former(column, last)
            if place is None:
                number, texts = column.attnum or 0, pa.nulls(n, pa.string())
                is_before = begin < self._added.get(number, BEGINNING)
                if self._is_merge and i >= self._present and not is_before:
                    continue
                fill = self.fills.get(number)
                # Rows behind a drop have nothing in it.
                if fill is not None and is_before:
                    texts = from_texts([fill]).take(from_numpy(np.zeros(n, np.int32)))
            else:
                if self.shape.is_log:
                    # A log has values as they were, which another type may not hold.
                    was = layout.columns[place]
                if was.type != column.type and not is_wider(was.type, column.type):
                    raise SchemaChangedError(
                        f"{self.table}: column {was.name} had the type {was.codec.column.type_name} before it got "
                        f"{column.codec.column.type_name} within a batch",
                        remedy=RESNAPSHOT,
                    )
                texts = run.column(f"c{place}")
                names[layout.columns[place].name] = column.name
            values = _typed(self.table, column, texts, run, self.shape, was)
            arrays.append(values if was.type == column.type else values.cast(column.type))
            fields.append(pa.field(column.name, column.type))
        schema = pa.schema([*fields, *self.change_fields()])
        changes = {name: run.column(name) for name in CHANGE_NAMES}
        if not self.shape.is_log:
            changes["_unchanged"] = _renamed(changes["_unchanged"], names)
        return pa.Table.from_arrays(
            [*arrays, *(changes[field.name.rstrip("_")] for field in self.change_fields())], schema=schema
        )

    @property
    def _is_merge(self) -> bool:
        return not (self.shape.is_log or self.shape.has_versions)

    def change_fields(self) -> list[pa.Field]:
        """Return the change columns that a segment's rows have."""
        found = [field for field in CHANGE_FIELDS if not (self._is_merge and field.name in _OF_COMMITS)]
        return [field.with_name(CHANGE_NAMES[field.name]) for field in found]


def altered_later_error(table: str, column: str) -> SchemaChangedError:
    """Return the error for rows that came anew, and whose columns are not those that the stream goes on with."""
    return SchemaChangedError(
        f"{table}: column {column} was changed right behind the rows that came anew", remedy=RESNAPSHOT
    )


def keyless_error(table: str) -> SchemaChangedError:
    """Return the error for a table whose rows nothing tells apart, or nothing did at some time since the last ones."""
    return SchemaChangedError(
        f"{table} has no key, or got another one under FULL, so its rows cannot be told apart in the lake",
        remedy="where it has none, add a primary key that is not DEFERRABLE, or set REPLICA IDENTITY USING INDEX; "
        f"then {RESNAPSHOT}",
    )


def _renamed(lists: pa.ListArray, names: Mapping[str, str]) -> pa.ListArray:
    """Return lists of columns with their last names; NULL for columns that are gone."""
    if not len(lists.values):
        return lists
    places = pc.index_in(lists.values, from_texts(list(names)))
    return pa.ListArray.from_arrays(lists.offsets, from_texts(list(names.values())).take(places), type=UNCHANGED_TYPE)


def numbers_of(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a column without NULLs, such as a segment's LSNs."""
    return np.concatenate([np.zeros(0, np.int64), *(to_numpy(chunk) for chunk in column.chunks)])


def typed_columns(table: str, layout: MirroredLayout, run: pa.RecordBatch, shape: Shape) -> pa.RecordBatch:
    """Return a run's rows with the columns of its own layout."""
    arrays = [_typed(table, column, run.column(f"c{i}"), run, shape) for i, column in enumerate(layout.columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema())


def _typed(
    table: str,
    column: MirroredColumn,
    texts: pa.Array,
    run: pa.RecordBatch,
    shape: Shape,
    was: MirroredColumn | None = None,
) -> pa.Array:
    """The values of a column; of one that ``was`` another before, in its type."""

    def place(row: int) -> str:
        lsn, seq = (run.column(name)[row].as_py() for name in ("_commit_lsn", "_seq"))
        return f"the change with _commit_lsn {lsn}, _seq {seq}"

    if shape.has_variants and column.is_json:
        require_exact(table, column, texts, place)
    return (was or column).values_of(table, texts, place)


def _in_new_names(said: Iterable[Mapping[str, Any]], key: str) -> str:
    """What the columns of a key, as ``listed_names`` has them, are called behind the changes that one row says."""
    names = {c["was"]: c["name"] for c in said if c["change"] == "renamed" and c["attnum"] is not None}
    now = {quoted(was): quoted(name) for was, name in names.items()}
    return ", ".join(now.get(name, name) for name in map(str.strip, split_names(key)))
