"""One row for each key of a batch, with its final state, in Arrow.

- Within a key the last row wins. Rows before the last TRUNCATE are left out.
- A value that did not travel (``_unchanged``) is that of the row before with the same key, back to where its life
  began. Behind a change of the key, that is the row of the old key, whose delete stands right before the insert. Where
  the batch has no such row, the lake's table has it: under the same key the value stays, under another it is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake.batch_of_table import CHANGE_NAMES, Segment

# Names that no column of PostgreSQL can have: they are longer than 63 bytes.
IS_DELETE, _ROW = "is_delete".ljust(64, "_"), "row".ljust(64, "_")

Key = tuple[Any, ...]
# The rows of the lake's table that have these keys, with all columns.
Fetch = Callable[[Sequence[Key]], pa.Table]


def kept_name(column: int) -> str:
    """The name of the flag by which a row keeps the table's own value of a column."""
    return f"kept_{column}".ljust(64, "_")


@dataclass(frozen=True, slots=True)
class States:
    """Final rows by key. ``emptied``: the table is emptied first.

    ``rows`` has the table's columns, ``IS_DELETE``, and of each column in ``kept`` the flag :func:`kept_name`.
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


def states_of(segment: Segment, fetch: Fetch) -> States:
    """Find the final rows of a segment."""
    kinds = segment.rows["_change_type"]
    truncates = np.flatnonzero(pc.equal(kinds, "truncate").to_numpy())
    rows = segment.rows.slice(int(truncates[-1]) + 1 if len(truncates) else 0)
    columns = [name for name in rows.column_names if name not in CHANGE_NAMES]
    _require_values(rows, segment.key)
    numbered = rows.select(segment.key).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(segment.key, use_threads=False).aggregate([(_ROW, "max")])[f"{_ROW}_max"]
    places = np.sort(last.to_numpy())
    is_delete = pc.equal(rows["_change_type"].take(pa.array(places)), "delete")
    listed = pc.list_value_length(rows["_unchanged"]).to_numpy()[places] > 0
    values = rows.select(columns)
    final = values.take(pa.array(places))
    kept: Mapping[int, np.ndarray[Any, Any]] = {}
    if (listed & ~is_delete.to_numpy()).any():
        final, kept = _with_former_values(rows, values, segment.key, places, listed, fetch, bool(len(truncates)))
    final = final.append_column(IS_DELETE, is_delete)
    for column, flags in kept.items():
        final = final.append_column(kept_name(column), pa.array(flags))
    return States(segment.key, bool(len(truncates)), final, tuple(kept))


def _require_values(rows: pa.Table, key: Sequence[str]) -> None:
    for name in key:
        if rows[name].null_count:
            raise SchemaChangedError(
                f"the key's column {name} is NULL in a change",
                remedy="give the table a primary key, and have its rows come again: pg-cdc resnapshot",
            )


@dataclass(frozen=True, slots=True)
class _Former:
    """Where a value is that did not travel: a row of the batch, or the table's row of a key."""

    row: int | None = None
    key: Key | None = None


class _Search:
    """Finds values that did not travel among the rows before."""

    def __init__(self, rows: pa.Table, key: Sequence[str]) -> None:
        self._keys: list[Key] = list(zip(*(rows[name].to_pylist() for name in key), strict=True))
        self._kinds = rows["_change_type"].to_pylist()
        self._unchanged = [frozenset(names) for names in rows["_unchanged"].to_pylist()]
        self._places = list(zip(rows["_commit_lsn"].to_pylist(), rows["_seq"].to_pylist(), strict=True))
        self._before: list[int | None] = []
        latest: dict[Key, int] = {}
        for i, found in enumerate(self._keys):
            self._before.append(latest.get(found))
            latest[found] = i

    def unchanged(self, row: int) -> frozenset[str]:
        return self._unchanged[row]

    def key(self, row: int) -> Key:
        return self._keys[row]

    def find(self, row: int, column: str) -> _Former:
        at: int | None = row
        while at is not None:
            if column not in self._unchanged[at] and self._kinds[at] != "delete":
                return _Former(row=at)
            row = at
            if self._kinds[at] == "insert":
                # The row before is the delete of its old key, and ends the life that has the value.
                lsn, seq = self._places[at]
                row = at - 1
                if row < 0 or self._kinds[row] != "delete" or self._places[row] != (lsn, seq - 1):
                    raise SchemaChangedError(
                        f"an insert lacks the value of column {column}",
                        remedy="have the table's rows come again: pg-cdc resnapshot",
                    )
            at = self._before[row]
        return _Former(key=self._keys[row])


def _with_former_values(
    rows: pa.Table,
    values: pa.Table,
    key: Sequence[str],
    places: np.ndarray[Any, Any],
    listed: np.ndarray[Any, Any],
    fetch: Fetch,
    emptied: bool,
) -> tuple[pa.Table, Mapping[int, np.ndarray[Any, Any]]]:
    search = _Search(rows, key)
    sources = {i: places.copy() for i in range(values.num_columns)}
    kept: dict[int, np.ndarray[Any, Any]] = {}
    fetched: dict[Key, None] = {}
    waiting: list[tuple[int, int, Key]] = []
    kinds = rows["_change_type"].to_pylist()
    for n in np.flatnonzero(listed).tolist():
        row = int(places[n])
        if kinds[row] == "delete":
            continue
        for i, name in enumerate(values.column_names):
            if name not in search.unchanged(row):
                continue
            former = search.find(row, name)
            if former.row is not None:
                sources[i][n] = former.row
            elif emptied:
                raise SchemaChangedError(
                    f"a row lacks the value of column {name} behind a TRUNCATE",
                    remedy="have the table's rows come again: pg-cdc resnapshot",
                )
            elif former.key == search.key(row):
                kept.setdefault(i, np.zeros(len(places), np.bool_))[n] = True
            else:
                assert former.key is not None
                # Rows that were read again after a crash may have the new key already.
                fetched |= {former.key: None, search.key(row): None}
                waiting.append((i, n, former.key))
    if fetched:
        found = fetch(list(fetched))
        there = {k: j for j, k in enumerate(zip(*(found[name].to_pylist() for name in key), strict=True))}
        for i, n, old in waiting:
            at = there.get(old, there.get(search.key(int(places[n]))))
            if at is None:
                raise SchemaChangedError(
                    f"the lake's table has no row of the key {old}, whose values a changed key takes along",
                    remedy="have the table's rows come again: pg-cdc resnapshot",
                )
            sources[i][n] = values.num_rows + at
        values = pa.concat_tables([values, found.select(values.column_names).cast(values.schema)])
    columns = [values.column(i).take(pa.array(sources[i])) for i in range(values.num_columns)]
    return pa.Table.from_arrays(columns, schema=values.schema), kept
