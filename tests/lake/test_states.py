"""Final rows by key: random changes against a replay by a dictionary, and what cannot be told by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trials import examples

from pg_cdc_source.errors import SchemaChangedError
from pg_cdc_source.lake import states
from pg_cdc_source.lake.segment import COMMIT_TS, KIND, LSN, SEQ, UNCHANGED, Segment
from pg_cdc_source.lake.shape import Shape
from pg_cdc_source.lake.states import DROPPED, IS_DELETE, Key, States, kept_name, states_of, taken
from pg_cdc_source.lake.versions import versions_of
from pg_cdc_source.protocol.layout import COMMIT_TS_TYPE, UNCHANGED_TYPE

Row = dict[str, Any]
# Texts are told apart by their characters, floats as PostgreSQL does: -0.0 is 0.0, and NaN is itself.
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int": (pa.int32(), [-1, 0, 1, 2, 3]),
    "text": (pa.string(), ["", "1.0", "1.00", "a", "A"]),
    "float": (pa.float64(), [0.0, -0.0, float("nan"), 1.5, float("inf")]),
    "real": (pa.float32(), [0.0, -0.0, float("nan"), 1.5, float("-inf")]),
    "bytea": (pa.binary(), [b"", b"\0", b"a", b"\xff", b"aa"]),
    "bool": (pa.bool_(), [True, False]),
}
LARGE = ("a", "b")


def bits(value: Any) -> Any:
    """What tells a key's value from others."""
    return struct.pack(">d", value + 0.0) if isinstance(value, float) else value


@dataclass
class Table:
    """A table of PostgreSQL, and the rows that its changes make in the stream."""

    key: tuple[str, ...]
    types: dict[str, pa.DataType]
    present: dict[Key, Row]
    changes: list[Row] = field(default_factory=list)
    gone: dict[Key, tuple[Row, int]] = field(default_factory=dict)  # what deleted rows had last, and their commits
    states: list[tuple[int, Key, Row | None]] = field(default_factory=list)  # of each change
    lsn: int = 1
    seq: int = 0

    def identity(self, row: Row) -> Key:
        return tuple(bits(row[name]) for name in self.key)

    def send(self, kind: str, row: Row, unchanged: Sequence[str] = (), *, numbers: int = 1) -> None:
        self.seq += numbers
        sent = {name: None if name in unchanged else row[name] for name in self.types}
        self.changes.append({**sent, KIND: kind, LSN: self.lsn, SEQ: self.seq, UNCHANGED: list(unchanged)})
        self.changes[-1][COMMIT_TS] = datetime.fromtimestamp(self.lsn, timezone.utc)

    def send_delete(self, row: Row) -> None:
        self.send("delete", {name: row[name] if name in self.key else None for name in self.types})

    def insert(self, row: Row) -> None:
        if self.identity(row) not in self.present:
            self._put(row)
            # Records of their own do not stand side by side, as the two rows of one do.
            self.send("insert", row, numbers=2)

    def delete(self, key: Key) -> None:
        self.send_delete(self._remove(key))

    def _put(self, row: Row) -> None:
        self.present[self.identity(row)] = row
        self.gone.pop(self.identity(row), None)
        self.states.append((self.lsn, self.identity(row), row))

    def _remove(self, key: Key) -> Row:
        row = self.present.pop(key)
        self.gone[key] = (row, self.lsn)
        self.states.append((self.lsn, key, None))
        return row

    def update(self, key: Key, new: Row, unchanged: Sequence[str]) -> None:
        old = self.present[key]
        row = {**old, **{name: value for name, value in new.items() if name not in unchanged}}
        if all(repr(row[name]) == repr(old[name]) for name in self.key):
            self._put(row)
            self.send("update", row, unchanged, numbers=2)
        elif self.identity(row) == key or self.identity(row) not in self.present:
            # A key that is equal, and has other bits, is another one to PostgreSQL's WAL.
            self._remove(key)
            self._put(row)
            self.send_delete(old)
            self.send("insert", row, unchanged)

    def schema(self) -> pa.Schema:
        of_changes = {KIND: pa.string(), LSN: pa.int64(), SEQ: pa.int64(), UNCHANGED: UNCHANGED_TYPE}
        of_changes[COMMIT_TS] = COMMIT_TS_TYPE
        return pa.schema([*self.types.items(), *of_changes.items()])

    def segment(self, cuts: Sequence[int] = (), *, is_emptied: bool = False) -> Segment:
        """The changes, in chunks that begin at ``cuts``."""
        edges = [0, *sorted(cut % (len(self.changes) + 1) for cut in cuts), len(self.changes)]
        parts = [pa.Table.from_pylist(self.changes[start:end], self.schema()) for start, end in pairwise(edges)]
        return Segment(self.key, pa.concat_tables(parts), is_emptied)


def nothing_fetched(keys: Sequence[Key]) -> pa.Table:
    pytest.fail(f"rows were fetched: {keys}")


def merged(
    table: Table, lake: dict[Key, Row], states: States, types: Mapping[str, pa.DataType] | None = None
) -> dict[Key, Row]:
    """What a lake's table has after a merge of final rows. With ``types``, its columns, it keeps deleted rows."""
    found = {} if states.emptied else dict(lake)
    names = [*(types or table.types), *(["gone"] if "gone" in states.rows.column_names else [])]
    for row in states.rows.to_pylist():
        key = table.identity(row)
        if row[IS_DELETE] and (types is None or key not in found):
            found.pop(key, None)
            continue
        new = {name: row[name] for name in names}
        for i in states.kept:
            if row[kept_name(i)]:
                name = "gone" if i == DROPPED else states.rows.column_names[i]
                assert key in found, "a value is kept of a row that the lake has not"
                new[name] = found[key][name]
        found[key] = new
    keys = [table.identity(row) for row in states.rows.to_pylist()]
    assert len(keys) == len(set(keys))
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[Table, dict[Key, Row], Segment]:
    key = draw(st.sampled_from([("k",), ("k", "l")]))
    kinds = {name: draw(st.sampled_from(sorted(VALUES))) for name in key}
    # The key need not come first.
    names = draw(st.permutations([*key, *LARGE]))
    types = {name: VALUES[kinds[name]][0] if name in kinds else pa.string() for name in names}
    values = {name: st.sampled_from(VALUES[kinds[name]][1]) for name in key}
    values |= {name: st.one_of(st.none(), st.text("xyz", max_size=3)) for name in LARGE}
    row = st.fixed_dictionaries({name: values[name] for name in names})
    table = Table(key, types, {})
    for new in draw(st.lists(row, max_size=6)):
        table.insert(new)
    is_emptied = draw(st.booleans())
    if is_emptied:
        table.present.clear()
    for number, there in enumerate(table.present.values()):
        # In a column that was dropped. It stays with the row, and a new row has none.
        there["gone"] = f"of row {number}"
    lake = dict(table.present)
    table.changes.clear()
    table.states.clear()
    for _ in range(draw(st.integers(1, 14))):
        what = draw(st.sampled_from(("insert", "update", "update", "update", "key", "key", "delete", "commit")))
        if what == "commit":
            table.lsn, table.seq = table.lsn + 1, 0
        elif what == "insert" or not table.present:
            table.insert(draw(row))
        else:
            of = draw(st.sampled_from(sorted(table.present, key=repr)))
            if what == "delete":
                table.delete(of)
                continue
            new = draw(row)
            if what == "update":
                new |= {name: table.present[of][name] for name in key}
            table.update(of, new, draw(st.lists(st.sampled_from(LARGE), unique=True)))
    return table, lake, table.segment(draw(st.lists(st.integers(0, 20), max_size=2)), is_emptied=is_emptied)


def fetching(table: Table, lake: dict[Key, Row]) -> Callable[[Sequence[Key]], pa.Table]:
    def fetch(keys: Sequence[Key]) -> pa.Table:
        assert len({tuple(map(bits, key)) for key in keys}) == len(keys)
        columns = list(zip(*keys, strict=True))
        wanted = [{bits(value) for value in column} for column in columns]
        # As a lake's table does it: of several columns, more rows than were asked for.
        rows = [
            row
            for row in lake.values()
            if all(bits(row[name]) in some for name, some in zip(table.key, wanted, strict=True))
        ]
        # A lake may have its columns in another order.
        fields = [pa.field(name, {**table.types, "gone": pa.string()}[name]) for name in sorted([*table.types, "gone"])]
        return pa.Table.from_pylist(rows, pa.schema(fields))

    return fetch


@examples(300)
@given(histories())
def test_a_lake_has_what_postgresql_has(history: tuple[Table, dict[Key, Row], Segment]) -> None:
    table, lake, segment = history
    states = states_of(segment, fetching(table, lake))
    states.rows.validate(full=True)
    found = merged(table, lake, states)
    assert shown(table, found) == shown(table, table.present)
    if segment.is_emptied:
        upserted = {table.identity(row): row for row in states.upserted.to_pylist()}
        assert shown(table, upserted) == shown(table, found)


@examples(300)
@given(histories())
def test_deleted_rows_stay_with_what_they_had_last(history: tuple[Table, dict[Key, Row], Segment]) -> None:
    table, present, segment = history
    if segment.is_emptied:
        return
    soft = Shape(is_soft=True)
    lake = {key: {**row, "_deleted": False, "_deleted_lsn": None} for key, row in present.items()}
    states = states_of(segment, fetching(table, lake), soft)
    states.rows.validate(full=True)
    names = [*table.types, *soft.columns]
    found = merged(table, lake, states, dict.fromkeys(names))
    wanted = {key: {**row, "_deleted": False, "_deleted_lsn": None} for key, row in table.present.items()}
    wanted |= {key: {**row, "_deleted": True, "_deleted_lsn": lsn} for key, (row, lsn) in table.gone.items()}
    assert {key: repr([row[name] for name in names]) for key, row in found.items()} == {
        key: repr([row[name] for name in names]) for key, row in wanted.items()
    }


@examples(300)
@given(histories())
def test_each_commit_gives_a_row_one_state(history: tuple[Table, dict[Key, Row], Segment]) -> None:
    table, present, segment = history
    if segment.is_emptied:
        return
    # What came before may be of the same commit as the first changes.
    first = table.changes[0][LSN] if table.changes and len(present) % 2 else 0
    lake = [{**row, "_valid_from": first, "_valid_to": None} for row in present.values()]
    rows = versions_of(segment, fetching(table, present)).rows
    rows.validate(full=True)
    open_rows = {table.identity(row): row for row in lake}
    found = list(lake)
    for row in rows.to_pylist():
        key = table.identity(row)
        if row[IS_DELETE] and key in open_rows:
            if open_rows[key]["_valid_from"] == row["_valid_to"]:
                found.remove(open_rows[key])
            open_rows[key]["_valid_to"] = row["_valid_to"]
        elif not row[IS_DELETE]:
            assert row["_valid_from_ts"] == datetime.fromtimestamp(row["_valid_from"], timezone.utc)
            assert (row["_valid_to_ts"] is None) == (row["_valid_to"] is None)
            found.append(row)
    names = [*table.types, "_valid_from", "_valid_to"]
    wanted = states_by_commit(table, present, first)
    assert sorted(repr([row[name] for name in names]) for row in found) == sorted(
        repr([row[name] for name in names]) for row in wanted
    )


def states_by_commit(table: Table, present: Mapping[Key, Row], first: int) -> list[Row]:
    opened = {key: {**row, "_valid_from": first, "_valid_to": None} for key, row in present.items()}
    found = []
    for lsn, of_commit in groupby(table.states, lambda state: state[0]):
        for key, row in {key: row for _, key, row in of_commit}.items():
            if key in opened:
                found.append({**opened.pop(key), "_valid_to": lsn})
            if row is not None:
                opened[key] = {**row, "_valid_from": lsn, "_valid_to": None}
    return [row for row in [*found, *opened.values()] if row["_valid_from"] != row["_valid_to"]]


def shown(table: Table, rows: Mapping[Key, Row]) -> dict[Key, str]:
    """Rows as texts, because NaN is not equal to itself."""
    return {key: repr([row[name] for name in table.types]) for key, row in rows.items()}


# --- by hand ----------------------------------------------------------------------------------------------------------


def of_ints(*ids: int) -> Table:
    """A table with a key, and a large value in each row."""
    table = Table(("k",), {"k": pa.int32(), "a": pa.string()}, {})
    for i in ids:
        table.insert({"k": i, "a": f"large {i}"})
    table.changes.clear()
    return table


@examples(300)
@given(histories(), st.booleans())
def test_values_of_dropped_columns_go_with_their_rows(
    history: tuple[Table, dict[Key, Row], Segment], is_soft: bool
) -> None:
    table, lake, segment = history
    if is_soft and segment.is_emptied:
        return
    shape = Shape(is_soft=is_soft, on_schema_change="additive")
    states = states_of(segment, fetching(table, lake), shape)
    states.rows.validate(full=True)
    found = merged(table, lake, states, dict.fromkeys([*table.types, *shape.columns]) if is_soft else None)
    wanted = table.present | ({key: row for key, (row, _) in table.gone.items()} if is_soft else {})
    assert {key: row.get("gone") for key, row in found.items()} == {key: row.get("gone") for key, row in wanted.items()}


def test_keys_are_swapped_and_each_row_takes_its_value_along() -> None:
    table = of_ints(1, 2)
    lake = dict(table.present)
    for old, new in ((1, 3), (2, 1), (3, 2)):
        table.update((old,), {"k": new}, ["a"])
    found = merged(table, lake, states_of(table.segment(), fetching(table, lake)))
    assert found == {(1,): {"k": 1, "a": "large 2"}, (2,): {"k": 2, "a": "large 1"}}


def test_a_value_of_a_row_that_has_its_new_key_already_is_there() -> None:
    """Rows that were read again after a crash may be of a later point."""
    table = of_ints(1)
    table.update((1,), {"k": 2}, ["a"])
    lake = dict(table.present)
    assert merged(table, lake, states_of(table.segment(), fetching(table, lake))) == lake


def test_a_changed_key_whose_row_the_lake_lacks_is_refused() -> None:
    table = of_ints(1)
    table.update((1,), {"k": 2}, ["a"])
    with pytest.raises(SchemaChangedError, match="lacks a row that was changed") as caught:
        states_of(table.segment(), fetching(table, {}))
    assert "pg-cdc resnapshot" in str(caught.value)


def test_an_insert_without_all_values_is_refused_where_no_delete_of_its_key_stands_before() -> None:
    """A row filter lets one through that an update has brought under it; a batch may end between the two."""
    table = of_ints(1)
    table.send("insert", {"k": 2, "a": None}, ["a"])
    with pytest.raises(SchemaChangedError, match="an insert lacks the value of column a"):
        states_of(table.segment(), nothing_fetched)
    # A delete of another commit, or of another change, is not of this row.
    for lsn, seq in ((1, 5), (2, 2)):
        other = of_ints(1)
        other.delete((1,))
        other.lsn, other.seq = lsn, seq
        other.send("insert", {"k": 2, "a": None}, ["a"])
        with pytest.raises(SchemaChangedError, match="an insert lacks the value of column a"):
            states_of(other.segment(), fetching(other, {}))


def test_an_insert_without_all_values_matters_only_where_it_is_the_end() -> None:
    table = of_ints()
    table.send("insert", {"k": 2, "a": None}, ["a"])
    table.send("update", {"k": 2, "a": "new"}, numbers=2)
    assert states_of(table.segment(), nothing_fetched).upserted.to_pylist() == [{"k": 2, "a": "new"}]


def test_a_value_that_went_with_a_truncate_is_refused() -> None:
    table = of_ints(1)
    table.update((1,), {"k": 1}, ["a"])
    with pytest.raises(SchemaChangedError, match="a row lacks the value of column a behind a TRUNCATE"):
        states_of(table.segment(is_emptied=True), nothing_fetched)


def test_a_key_that_is_null_is_refused() -> None:
    table = of_ints()
    table.send("insert", {"k": None, "a": "x"})
    with pytest.raises(SchemaChangedError, match="the key's column k is NULL in a change"):
        states_of(table.segment(), nothing_fetched)


def test_errors_do_not_say_values() -> None:
    table = Table(("k",), {"k": pa.string(), "a": pa.string()}, {})
    table.insert({"k": "secret", "a": "x"})
    table.changes.clear()
    table.update(("secret",), {"k": "hidden"}, ["a"])
    with pytest.raises(SchemaChangedError) as caught:
        states_of(table.segment(), fetching(table, {}))
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_no_changes_give_no_rows() -> None:
    states = states_of(of_ints().segment(is_emptied=True), nothing_fetched)
    assert (states.rows.num_rows, states.emptied, states.kept) == (0, True, ())
    assert states.upserted.column_names == ["k", "a"]


def test_columns_may_have_the_names_of_change_columns() -> None:
    table = Table(("_seq",), {"_seq": pa.int32(), "_change_type": pa.string()}, {})
    table.insert({"_seq": 1, "_change_type": "delete"})
    assert states_of(table.segment(), nothing_fetched).upserted.to_pylist() == [{"_seq": 1, "_change_type": "delete"}]


TEXTS = st.none() | st.text(max_size=3)
KINDS = {
    pa.string(): TEXTS,
    pa.binary(): st.none() | st.binary(max_size=3),
    pa.list_(pa.string()): st.none() | st.lists(TEXTS, max_size=3),
    pa.list_(pa.list_(pa.int32())): st.none() | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3),
    pa.map_(pa.string(), pa.string()): st.none() | st.lists(st.tuples(st.text(max_size=2), TEXTS), max_size=3),
    pa.int32(): st.integers(0, 9),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(most=st.integers(4, 40), data=st.data())
def test_values_are_taken_in_pieces_where_one_array_cannot_have_them_all(
    kind: pa.DataType, most: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.lists(st.lists(KINDS[kind], max_size=5), min_size=1, max_size=4))
    values = [value for chunk in chunks for value in chunk]
    places = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=12) if values else st.just([]))
    # Parts of larger ones, as batches have them.
    arrays = [pa.array([chunk[0], *chunk], kind)[1:] if chunk else pa.array([], kind) for chunk in chunks]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(states, "MAX_OFFSET", most)
        found = taken(pa.chunked_array(arrays, kind), np.array(places, np.int64))
    assert found.type == kind
    assert found.to_pylist() == [values[place] for place in places]


def test_a_large_text_that_many_rows_have_is_theirs() -> None:
    """All together are more than one array can have."""
    column = pa.chunked_array([["a" * 100_000_000, "b"], ["c" * 100_000_000]])
    places = np.array([1, *[0, 2] * 11, 1])
    found = taken(column, places)
    assert set(pc.binary_length(found).to_pylist()) == {1, 100_000_000}
    firsts = [
        chr(memoryview(chunk.buffers()[2])[offset.as_py()]) for chunk in found.chunks for offset in _begins(chunk)
    ]
    assert firsts == ["b", *["a", "c"] * 11, "b"]


def _begins(texts: pa.StringArray) -> pa.Array:
    """Where each text begins in the array's bytes."""
    return pa.Array.from_buffers(pa.int32(), len(texts), [None, texts.buffers()[1]], offset=texts.offset)
