"""Turning tables back: what is left out of the later rows and what is added make the earlier ones."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_cdc_source.offsets import Lsn
from pg_cdc_source.options.numeric_as import NumericAs
from pg_cdc_source.protocol.ipc import from_ipc
from pg_cdc_source.protocol.layout import BEFORE, Layout, StreamedTable
from pg_cdc_source.stream.first_rows import rewound as rewound_rows
from pg_cdc_source.stream.first_rows.changed_rows import AmbiguousKeyError, ChangedRows
from pg_cdc_source.stream.first_rows.rewound import turn_back
from pg_cdc_source.values.registry import CatalogType, Column, plan

pytestmark = pytest.mark.usefixtures("accelerated")

LAYOUT = Layout(envelope=False, before_image=False, unrepresentable="error", on_truncate="emit")
WITH_IMAGES = Layout(envelope=False, before_image=True, unrepresentable="error", on_truncate="emit")
ORIGIN = Lsn(1000)

# `old` and `row` are names like others. The key is not what comes first.
COLUMNS = (("old", 25), ("id", 23), ("row", 701))
Row = tuple[str | None, int, float | None]


def table(key: Sequence[str], columns: Sequence[tuple[str, int]] = COLUMNS) -> StreamedTable:
    arrays = {1007: CatalogType(1007, element=CatalogType(23), element_oid=23)}
    planned = [
        Column(name, i + 1, arrays.get(oid, CatalogType(oid)), name, False) for i, (name, oid) in enumerate(columns)
    ]
    codecs = tuple(plan(column, as_string=False, numeric_as=NumericAs("string")) for column in planned)
    return StreamedTable(1, "public.t", codecs, tuple((oid, -1) for _, oid in columns), tuple(key), "f")


KEYED, KEYLESS = table(["id"]), table([])
PAIR = table(["row", "old"])


@dataclass
class History:
    """Rows of a table, and all that was done to them."""

    rows: list[Row]
    changes: list[tuple[str, Row | None, Row]] = field(default_factory=list)

    def insert(self, row: Row) -> None:
        self.rows.append(row)
        self.changes.append(("insert", None, row))

    def delete(self, i: int) -> None:
        row = self.rows.pop(i)
        self.changes.append(("delete", row, row))

    def update(self, i: int, row: Row) -> None:
        self.changes.append(("update", self.rows[i], row))
        self.rows[i] = row

    def changed(self, of: StreamedTable, keys: Sequence[str], rows_per_batch: int, folds: int) -> ChangedRows:
        """The changes as the decoder gives them, folded behind each of so many batches."""
        schema = WITH_IMAGES.schema([of])
        names = [codec.column.name for codec in of.codecs]
        found = ChangedRows(of, keys)
        for start in range(0, len(self.changes), rows_per_batch):
            rows: list[dict[str, Any]] = []
            for kind, before, after in self.changes[start : start + rows_per_batch]:
                old = None if before is None else dict(zip(names, before, strict=True))
                rows.append({**dict(zip(names, after, strict=True)), "_change_type": kind, BEFORE: old})
            found.add(pa.RecordBatch.from_pylist(rows, schema), "f")
            if start // rows_per_batch % folds == 0:
                found.fold()
        found.fold()
        return found


def batches(rows: Sequence[Row], of: StreamedTable, rows_per_batch: int) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([pa.field(codec.column.name, codec.arrow_type) for codec in of.codecs])
    for start in range(0, len(rows), rows_per_batch):
        some = rows[start : start + rows_per_batch]
        yield pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in some], schema)


def turned_back(history: History, of: StreamedTable, rows_per_batch: int = 3, folds: int = 1) -> Counter[str]:
    """The rows that a replay consists of."""
    schema = LAYOUT.schema([of])
    try:
        changed = history.changed(of, of.key, rows_per_batch, folds)
    except AmbiguousKeyError:
        changed = history.changed(of, (), rows_per_batch, folds)
    rewound = turn_back(of, changed, LAYOUT, schema, ORIGIN)
    found = [row for batch in rewound.leave_out(batches(history.rows, of, rows_per_batch)) for row in batch.to_pylist()]
    for chunk in rewound.old_rows:
        olds = from_ipc(chunk.data())
        olds.validate(full=True)
        assert olds.schema == schema
        assert set(olds.column("_change_type").to_pylist()) == {"snapshot"}
        assert set(olds.column("_commit_lsn").to_pylist()) == {ORIGIN}
        found += olds.to_pylist()
    names = [codec.column.name for codec in of.codecs]
    return Counter(repr([row[name] for name in names]) for row in found)


def expected(rows: Sequence[Row]) -> Counter[str]:
    return Counter(repr(list(row)) for row in rows)


def change_at_random(history: History, chance: random.Random, changes: int, *, keyed: bool) -> None:
    """As PostgreSQL would, where a key is unique at any time, and its change a delete and an insert."""

    def value(key: int) -> Row:
        return chance.choice([None, "a", "b"]), key, chance.choice([None, 0.5, float("nan"), -0.0])

    def free_key() -> int:
        taken = {row[1] for row in history.rows} if keyed else set()
        return chance.choice([key for key in range(12) if key not in taken] or [chance.randrange(12, 99999)])

    for _ in range(changes):
        what = chance.choice(["insert", "delete", "update", "update", "move"]) if history.rows else "insert"
        i = chance.randrange(len(history.rows)) if history.rows else 0
        if what == "insert":
            history.insert(value(free_key()))
        elif what == "delete":
            history.delete(i)
        elif what == "update":
            history.update(i, value(history.rows[i][1]))
        else:
            row = value(free_key())
            if keyed:
                history.delete(i)
                history.insert(row)
            else:
                history.update(i, row)


@pytest.mark.parametrize("keyed", [True, False])
@given(
    seed=st.integers(0, 1 << 32),
    changes=st.integers(0, 25),
    rows_per_batch=st.integers(1, 9),
    folds=st.integers(1, 4),
)
def test_any_history_is_undone(keyed: bool, seed: int, changes: int, rows_per_batch: int, folds: int) -> None:
    chance = random.Random(seed)
    start: list[Row] = [("a", i if keyed else i % 3, 0.5) for i in range(chance.randrange(8))]
    history = History(list(start))
    change_at_random(history, chance, changes, keyed=keyed)
    chance.shuffle(history.rows)
    assert turned_back(history, KEYED if keyed else KEYLESS, rows_per_batch, folds) == expected(start)


def test_keys_of_several_columns_are_told_apart_by_all_of_them() -> None:
    start: list[Row] = [("a", 1, 0.5), ("b", 2, 0.5), ("a", 3, float("nan"))]
    history = History(list(start))
    history.update(0, ("a", 7, 0.5))
    history.delete(2)
    assert turned_back(history, PAIR) == expected(start)


def test_a_key_that_arrow_cannot_join_by_is_counted_by_whole_rows() -> None:
    of = table(["id"], (("old", 25), ("id", 1007), ("row", 701)))
    history = History([("a", [1, None], 0.5)])  # type: ignore[list-item]
    history.update(0, ("b", [1, None], 0.5))  # type: ignore[arg-type]
    assert turned_back(history, of) == expected([("a", [1, None], 0.5)])  # type: ignore[list-item]


def test_a_floating_key_is_counted_by_whole_rows() -> None:
    """Two numbers may be one of them, and a NaN has other bits in a COPY than as a text."""
    of = table(["row"])
    start: list[Row] = [("old", 1, 2.0**53), ("a", 2, float("nan"))]
    history = History(list(start))
    history.insert(("new", 1, float(2**53 + 1)))
    history.update(1, ("b", 2, float("nan")))
    (other_bits,) = struct.unpack(">d", bytes.fromhex("fff8000000000000"))
    history.rows[1] = ("b", 2, other_bits)
    assert turned_back(history, of) == expected(start)


def test_batches_are_compared_together_where_many_keys_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    joins: list[int] = []
    in_groups = rewound_rows._in_groups

    def noting(*given: Any) -> Iterator[pa.Table]:
        for group in in_groups(*given):
            joins.append(group.num_rows)
            yield group

    monkeypatch.setattr(rewound_rows, "_in_groups", noting)
    start: list[Row] = [("a", i, 0.5) for i in range(100)]
    history = History(list(start))
    for i in range(40):
        history.update(i, ("b", i, 0.5))
    assert turned_back(history, KEYED) == expected(start)
    assert sum(joins) == 100
    assert len(joins) < 20


def test_a_key_that_its_type_cannot_hold_is_counted_by_whole_rows() -> None:
    """Two rows whose keys are NULL here, as with unrepresentable=null, are two rows all the same."""
    of = table(["old", "id"])
    start: list[Row] = [(None, 1, 0.5), (None, 1, 1.5), (None, 1, 2.5), ("a", 2, 0.5)]
    history = History(list(start))
    history.update(0, (None, 1, 7.5))
    history.delete(1)
    history.insert((None, 1, 8.5))
    history.update(2, ("a", 2, 1.5))
    assert turned_back(history, of) == expected(start)


def test_rows_that_are_alike_are_left_out_as_often_as_they_were_added() -> None:
    start: list[Row] = [*[("a", 1, None)] * 5, ("b", 1, None)]
    history = History(list(start))
    for _ in range(3):
        history.insert(("a", 1, None))
    history.delete(5)
    history.update(0, ("b", 1, None))
    assert turned_back(history, KEYLESS) == expected(start)


def test_without_changes_every_row_is_left_as_it_is() -> None:
    rows: list[Row] = [("a", 1, None), ("b", 2, 1.5)]
    for of in (KEYED, KEYLESS):
        assert turned_back(History(list(rows)), of) == expected(rows)


def test_where_all_is_left_out_no_batch_comes() -> None:
    history = History([])
    history.insert(("a", 1, None))
    schema = LAYOUT.schema([KEYED])
    for of in (KEYED, KEYLESS):
        rewound = turn_back(of, history.changed(of, of.key, 3, 1), LAYOUT, schema, ORIGIN)
        assert list(rewound.leave_out(batches(history.rows, of, 3))) == []
        assert rewound.old_rows == ()


@pytest.mark.parametrize(
    ("kind", "identity", "missing"),
    [
        ("insert", "f", None),
        ("update", "f", "a partition was not FULL, as its root is"),
        ("delete", "f", None),
        ("insert", "d", None),
        ("insert", "n", None),
        ("update", "d", "its replica identity was not FULL"),
        ("delete", "i", "its replica identity was not FULL"),
        ("truncate", "f", "it was truncated in between"),
    ],
)
def test_old_images_are_missing_where_a_change_did_not_bring_one(kind: str, identity: str, missing: str | None) -> None:
    schema = WITH_IMAGES.schema([KEYED])
    changed = ChangedRows(KEYED, KEYED.key)
    changed.add(pa.RecordBatch.from_pylist([{"id": 1, "_change_type": "insert"}], schema), "f")
    changed.add(pa.RecordBatch.from_pylist([{"id": 1, "_change_type": kind}], schema), identity)
    changed.add(pa.RecordBatch.from_pylist([{"id": 2, "_change_type": "insert"}], schema), "f")
    if missing is None:
        assert changed.missing is None
        assert changed.nbytes
    else:
        assert missing in str(changed.missing)
        assert changed.nbytes == 0


@pytest.mark.parametrize("of", [KEYED, KEYLESS])
def test_memory_grows_with_rows_and_not_with_their_changes(of: StreamedTable) -> None:
    def taken(changes: int) -> int:
        history = History([("a", i, 0.5) for i in range(20)])
        for change in range(changes):
            history.update(change % 20, (f"{change:09}", change % 20, 0.5))
        changed = history.changed(of, of.key, 50, 1)
        assert len(changed.old_rows()) == 20
        return changed.nbytes

    assert taken(2000) < 1.5 * taken(100)


@pytest.mark.parametrize("of", [KEYED, KEYLESS])
def test_a_table_that_is_given_up_takes_no_memory(of: StreamedTable) -> None:
    history = History([(f"{i:0200}", i, 0.5) for i in range(2000)])
    for i in range(2000):
        history.update(i, ("b", i, 0.5))
    before = pa.total_allocated_bytes()
    changed = history.changed(of, of.key, 500, 1)
    assert pa.total_allocated_bytes() > before + 200 * 2000
    changed.end("too large")
    assert pa.total_allocated_bytes() < before + 10_000
